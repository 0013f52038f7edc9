"""Pushing drafts: to a local Hub with the endpoints that `huggingface_hub` uses, in this process and in a new one."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from conftest import Command
from fixtures import eval_results
from fixtures.checkpoints import pico
from fixtures.servers.hub_uploads import READ, WRITE, HubUploads
from huggingface_hub import ModelCard, constants
from safetensors.torch import load_file, save_file

from draftkit.convert.api import convert_checkpoint
from draftkit.errors import DraftkitError, FormatError, LayoutError, SourceError
from draftkit.hub import locate as hub
from draftkit.layout.digest import draft_sha256
from draftkit.layout.folder import read_draft
from draftkit.publish import plan_push, push_draft, write_card

REPO = "org/pico"
NOWHERE = "http://127.0.0.1:9"  # the discard port: nothing listens there


def point_to(endpoint: str, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(constants, "ENDPOINT", endpoint)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubUploads]:
    with HubUploads(tmp_path / "hub") as running:
        point_to(running.endpoint, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setenv("HF_TOKEN", WRITE)
        monkeypatch.setattr("time.sleep", lambda seconds: None)  # between attempts
        yield running


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A unified draft with a card."""
    folder = tmp_path_factory.mktemp("measured")
    target = pico.save_target_config(folder / "target")
    source = pico.write_checkpoint(folder / "source", pico.eagle3_config(), pico.eagle3_tensors())
    draft = convert_checkpoint(str(source), folder / "draft", target=str(target))
    (draft / "adapter").mkdir()
    shutil.copyfile(draft / "model.safetensors", draft / "adapter" / "adapter_model.safetensors")
    with (draft / "adapter" / "adapter_model.safetensors").open("ab") as file:
        file.write(b" ")
    (draft / "optimizer.pt").write_bytes(b"state")
    (draft / ".env").write_text(f"HF_TOKEN={WRITE}")
    write_card(draft, [eval_results.write(folder / "result.json", eval_results.cell(draft, **eval_results.sure()))])
    return draft


@pytest.fixture
def draft(measured: Path, tmp_path: Path) -> Path:
    """A copy, to be changed; its measurements are known by its digest."""
    copy = Path(shutil.copytree(measured, tmp_path / "draft"))
    write_card(copy, force=True)
    return copy


def test_what_is_pushed_comes_back(server: HubUploads, draft: Path) -> None:
    pushed = push_draft(draft, REPO)
    assert pushed.new
    assert server.commits[REPO] == 1
    names = server.names(REPO)
    assert {"config.json", "model.safetensors", "README.md", "eval/result.json"} <= names
    assert "adapter/adapter_model.safetensors" in names
    assert not {"optimizer.pt", ".env"} & names
    located = hub.locate(REPO)
    assert located.revision == pushed.commit
    assert (located.path / "model.safetensors").read_bytes() == (draft / "model.safetensors").read_bytes()
    assert read_draft(located.path).spec == read_draft(draft).spec
    card = ModelCard(server.commit(REPO, "main").files["README.md"].read_text())
    assert f'"model": "{REPO}"' in card.text
    assert str(draft) not in card.text
    assert [entry.metric_value for entry in card.data.eval_results] == [2.5, 1.8]


def test_no_path_of_this_machine_is_published(server: HubUploads, tmp_path: Path) -> None:
    """In no text: the draft's and the target's folders, those of the training, and those that others noted."""
    home = tmp_path / "me and mine"
    target = pico.save_target_config(home / "models" / "target")
    source = pico.save_llama(pico.save_tokenizer(home / "sources" / "small"), num_hidden_layers=1)
    config = json.loads((source / "config.json").read_text()) | {"_name_or_path": str(home / "elsewhere" / "base")}
    (source / "config.json").write_text(json.dumps(config))
    draft = convert_checkpoint(str(source), home / "runs" / "draft", target=str(target))
    settings = {"target": str(target), "data": str(home / "samples.jsonl"), "out": "../runs/draft", "seed": 0}
    (draft / "train.yaml").write_text(json.dumps(settings))
    (draft / "adapter").mkdir()
    (draft / "adapter" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(source)}))
    cell = eval_results.cell(draft, target=str(target))
    write_card(
        draft,
        [
            eval_results.write(
                tmp_path / "result.json", cell, warnings=[{"name": "note", "message": f"see {home}/today.txt"}]
            )
        ],
    )
    push_draft(draft, REPO)
    texts = {n: f for n, f in server.commit(REPO, "main").files.items() if not n.endswith(".safetensors")}
    assert {"config.json", "README.md", "train.yaml", "adapter/adapter_config.json", "eval/result.json"} <= texts.keys()
    told = {n: f.read_text() for n, f in texts.items() if str(tmp_path) in f.read_text() or "../" in f.read_text()}
    assert told == {}
    pushed = hub.locate(REPO).path
    assert read_draft(pushed).provenance.target == "target"
    assert draft_sha256(read_draft(pushed)) == draft_sha256(read_draft(draft))


def test_a_card_that_nobody_edited_is_made_anew(server: HubUploads, draft: Path) -> None:
    push_draft(draft, REPO, license="mit")
    assert ModelCard(server.commit(REPO, "main").files["README.md"].read_text()).data.license == "mit"


def test_a_push_takes_what_a_card_takes(draftkit: Command, server: HubUploads, draft: Path) -> None:
    """A target on the Hub, what it was trained on, its languages; not against a card that was edited."""
    stated = ("--base-model", "org/big", "--dataset", "org/rows", "--language", "en", "--language", "de")
    pushed = draftkit("push", draft, REPO, *stated)
    assert pushed.code == 0, pushed.err
    data = ModelCard(server.commit(REPO, "main").files["README.md"].read_text()).data
    assert (data.base_model, data.datasets, data.language) == ("org/big", ["org/rows"], ["en", "de"])
    with (draft / "README.md").open("a") as card:
        card.write("A word from its author.\n")
    refused = draftkit("push", draft, REPO, *stated)
    assert (refused.code, "a card that was edited" in refused.err) == (1, True)


def test_no_odd_name_of_a_folder_is_told(draft: Path, tmp_path: Path) -> None:
    """In commands it stands in quotes, escaped for JSON and for a shell."""
    folder = Path(shutil.copytree(draft, tmp_path / "o'ut ü" / "d'raft ü"))
    write_card(folder, force=True)
    own = (folder / "README.md").read_text()
    served, measured = (line for line in own.splitlines() if line.startswith(("vllm serve", "draftkit eval")))
    assert json.loads(shlex.split(served)[-1])["model"] == shlex.split(measured)[-1] == f"./{folder.name}"
    pushed = plan_push(folder, REPO, allow_unmeasured=True).card
    assert str(tmp_path) not in pushed
    assert "u00fc" not in pushed
    served, measured = (line for line in pushed.splitlines() if line.startswith(("vllm serve", "draftkit eval")))
    assert json.loads(shlex.split(served)[-1])["model"] == shlex.split(measured)[-1] == REPO


def test_the_same_folder_makes_no_second_commit(server: HubUploads, draft: Path) -> None:
    first, second = push_draft(draft, REPO), push_draft(draft, REPO)
    assert (second.new, second.commit, server.commits[REPO]) == (False, first.commit, 1)
    uploads = len(server.uploads)
    write_card(draft, license="mit", force=True)
    assert push_draft(draft, REPO).new
    assert (server.commits[REPO], len(server.uploads)) == (2, uploads)  # only small files were new


def test_a_folder_without_a_card_gets_one(server: HubUploads, draft: Path, tmp_path: Path) -> None:
    result = draft / "eval" / "result.json"
    shutil.move(result, tmp_path / "result.json")
    (draft / "README.md").unlink()
    before = sorted(path.name for path in draft.rglob("*"))
    for expected in (True, False):
        assert push_draft(draft, REPO, results=[tmp_path / "result.json"], license="mit").new is expected
    assert sorted(path.name for path in draft.rglob("*")) == before  # the folder stays as it is
    card = ModelCard(server.commit(REPO, "main").files["README.md"].read_text())
    assert card.data.license == "mit"
    assert "eval/result.json" in server.names(REPO)


def test_an_edited_card_is_kept(server: HubUploads, draft: Path) -> None:
    card = draft / "README.md"
    card.write_text(card.read_text().replace("## Limitations", "## A word from its author\n\nHello.\n\n## Limitations"))
    push_draft(draft, REPO)
    text = server.commit(REPO, "main").files["README.md"].read_text()
    assert "A word from its author" in text
    assert f"--draft {REPO}" in text
    with pytest.raises(DraftkitError, match=r"a card that was edited(.|\n)*draftkit push"):
        push_draft(draft, REPO, license="mit")


def test_a_branch_is_made(server: HubUploads, draft: Path) -> None:
    pushed = push_draft(draft, REPO, revision="v2/a")
    assert pushed.url.endswith("/tree/v2/a")
    assert server.names(REPO) == {".gitattributes"}
    assert "model.safetensors" in server.names(REPO, "v2/a")
    assert not push_draft(draft, REPO, revision="v2/a").new
    assert hub.locate(f"{REPO}@{pushed.commit}").revision == pushed.commit


def test_a_private_repository(server: HubUploads, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    push_draft(draft, REPO, private=True)
    assert server.private == {REPO}
    assert not push_draft(draft, REPO).new  # stays private
    server.create("org/public")
    with pytest.raises(SourceError, match="everyone can read it"):
        push_draft(draft, "org/public", private=True)
    assert server.names("org/public") == {".gitattributes"}
    monkeypatch.setenv("HF_TOKEN", "")
    with pytest.raises(SourceError, match="or it is private"):
        hub.locate(REPO)


def test_an_upload_that_broke_off_goes_on(server: HubUploads, draft: Path) -> None:
    server.uploads_left = 1
    with pytest.raises(SourceError, match=r"broke off: org/pico is as it was(.|\n)*same command again"):
        push_draft(draft, REPO)
    assert len(server.uploads) == 1
    assert server.names(REPO) == {".gitattributes"}
    server.uploads_left = 1_000
    assert push_draft(draft, REPO).new
    assert len(server.uploads) == len(set(server.uploads))  # nothing was sent twice
    assert server.commits[REPO] == 1


def test_old_shards_and_measurements_are_removed(server: HubUploads, draft: Path) -> None:
    server.create(REPO)
    stale = ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "eval/old.json")
    server.record(REPO, "main", dict.fromkeys((*stale, "notes.txt"), b"{}"))
    push_draft(draft, REPO)
    assert not set(stale) & server.names(REPO)
    assert {"notes.txt", "model.safetensors"} <= server.names(REPO)


def test_what_is_refused_before_anything_is_sent(server: HubUploads, draft: Path, tmp_path: Path) -> None:
    (draft / "README.md").unlink()
    shutil.rmtree(draft / "eval")
    with pytest.raises(LayoutError, match=r"no measured result(.|\n)*--allow-unmeasured"):
        push_draft(draft, REPO)
    (draft / "README.md").write_text("---\nmodel-index: [1]\n---\n")
    with pytest.raises(FormatError, match=r"header of README\.md is not valid"):
        push_draft(draft, REPO)
    (draft / "README.md").unlink()
    weights = draft / "model.safetensors"
    data = weights.read_bytes()
    tensors = load_file(weights)
    tensors["norm.weight"][3] = float("nan")
    save_file(tensors, weights)
    with pytest.raises(FormatError, match="not finite"):
        push_draft(draft, REPO, allow_unmeasured=True)
    weights.write_bytes(data[:-1])
    with pytest.raises(FormatError):
        push_draft(draft, REPO, allow_unmeasured=True)
    with pytest.raises(LayoutError, match="no draftkit block"):
        push_draft(pico.write_checkpoint(tmp_path / "foreign", pico.eagle_config(), {}), REPO)
    assert server.requests == []
    weights.write_bytes(data)
    assert push_draft(draft, REPO, allow_unmeasured=True).new


@pytest.mark.parametrize("repo", ["pico", "org/", "org/a b", "org/a--b", "a/b/c", "órg/x", ""])
def test_bad_names(repo: str, draft: Path) -> None:
    with pytest.raises(SourceError, match="no name of a repository"):
        plan_push(draft, repo)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("", "there is no Hub token"),
        ("hf_unknown_secret", "the Hub rejects the token"),
        (READ, f"the token may not write to {REPO}"),
        ("“hf_odd_secret”", "the Hub token holds characters"),
        ("hf_\vodd_secret", "the Hub token holds characters"),
    ],
)
@pytest.mark.parametrize("exists", [False, True], ids=["new repository", "existing repository"])
def test_tokens_that_do_not_do(
    draftkit: Command,
    server: HubUploads,
    draft: Path,
    monkeypatch: pytest.MonkeyPatch,
    token: str,
    message: str,
    exists: bool,
) -> None:
    if exists:
        server.create(REPO)
    monkeypatch.setenv("HF_TOKEN", token)
    done = draftkit("push", draft, REPO)
    assert done.code == 1
    assert message in done.err
    assert "Traceback" not in done.err
    assert "secret" not in done.out + done.err


@pytest.mark.parametrize("token", ["hf_unknown_secret", READ, "“hf_odd_secret”", "hf_\vodd_secret"])
def test_a_traceback_does_not_show_the_token(
    server: HubUploads, draft: Path, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(SourceError) as caught:
        push_draft(draft, REPO)
    assert "secret" not in "".join(traceback.format_exception(caught.value))


def test_what_the_hub_refuses(server: HubUploads, draft: Path) -> None:
    write_card(draft, license="beerware", force=True)
    with pytest.raises(SourceError, match=r'header of README\.md:(.|\n)*"license" must be one of(.|\n)*--license'):
        push_draft(draft, REPO)
    write_card(draft, license="mit", force=True)
    server.full = True
    with pytest.raises(SourceError, match="storage of org is used up: Private repository storage limit reached"):
        push_draft(draft, REPO)
    assert server.names(REPO) == {".gitattributes"}


def test_no_network(server: HubUploads, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point_to(NOWHERE, monkeypatch)
    with pytest.raises(SourceError, match=r"connection to the Hub broke off(.|\n)*127\.0\.0\.1:9"):
        push_draft(draft, REPO)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("Data processing error: CAS service error"), "the upload to org/pico broke off"),
        (ConnectionError("Network error: HTTP status client error (404 Not Found), domain: x"), "HF_HUB_DISABLE_XET=1"),
        (ConnectionError("Network error: HTTP status client error (403 Forbidden), domain: x"), "may not write to org"),
        (ConnectionError("Network error: connection reset"), "the upload to org/pico broke off"),
        (PermissionError(13, "Permission denied", "model.safetensors"), "a file cannot be read: Permission denied"),
        (json.JSONDecodeError("Expecting value", "<html>", 0), "does not answer like a Hub"),
    ],
)
def test_other_failures_are_explained(
    server: HubUploads, draft: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "create_commit", fail)
    with pytest.raises(SourceError, match=message) as caught:
        push_draft(draft, REPO)
    assert caught.value.__cause__ is error


def test_dry_run(draftkit: Command, server: HubUploads, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "")
    done = draftkit("push", draft, REPO, "--dry-run")
    assert done.code == 0
    assert f"{(draft / 'model.safetensors').stat().st_size:,}" in done.out
    assert done.out.startswith(f"would be uploaded to {REPO}: ")
    assert done.err == f"next: draftkit push {draft} {REPO}\n"
    assert "left out: .env, optimizer.pt" in done.out
    assert "model-index:" in done.out
    assert f'"model": "{REPO}"' in done.out
    plan = json.loads(draftkit("push", draft, REPO, "--dry-run", "--json").out)
    weights = (draft / "model.safetensors").stat().st_size
    assert {"path": "model.safetensors", "bytes": weights} in plan["files"]
    assert plan["card"].startswith("---\n")
    assert server.requests == []


def test_a_folder_may_be_called_like_a_method(
    draftkit: Command, server: HubUploads, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(draft.rename(draft.parent / "eagle3").parent)
    write_card(Path("eagle3"), force=True)
    card = json.loads(draftkit("push", "eagle3", REPO, "--dry-run", "--json").out)["card"]
    assert f'"model": "{REPO}", "method": "eagle3"' in card


def test_command(draftkit: Command, server: HubUploads, draft: Path) -> None:
    done = draftkit("push", draft, REPO, "--private", "--revision", "v1")
    assert (done.code, "commit" in done.out) == (0, True)
    assert f"--draft {REPO}@v1" in done.err
    again = json.loads(draftkit("push", draft, REPO, "--revision", "v1", "--json").out)
    assert (again["repo"], again["new"]) == (REPO, False)
    assert WRITE not in done.out + done.err


@pytest.mark.long
def test_end_to_end(draftkit: Command, server: HubUploads, tmp_path: Path, running_target: Path) -> None:
    """Convert, measure, push from a process of its own, and measure what the Hub has: the same acceptance length."""
    source = pico.write_checkpoint(tmp_path / "source", pico.eagle3_config(), pico.eagle3_tensors())
    draft = convert_checkpoint(str(source), tmp_path / "draft", target=str(running_target))
    sizes = ("--target", running_target, "--dataset", "zoo", "--limit", 10, "--max-new-tokens", 8, "--json")
    result = tmp_path / "result.json"
    result.write_text(draftkit("eval", "--draft", draft, *sizes).out)

    clean = {name: value for name, value in os.environ.items() if not name.upper().startswith(("HF_", "HTTP"))}
    settings = {"HF_ENDPOINT": server.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "draftkit", "push", draft, REPO, "--results", result],
        env={**clean, **settings, "HF_TOKEN": WRITE, "HF_DEBUG": "1", "DRAFTKIT_DEBUG": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"{server.endpoint}/{REPO}: commit" in done.stdout
    assert WRITE not in done.stdout + done.stderr

    [before], [after] = (
        json.loads(text)["cells"] for text in (result.read_text(), draftkit("eval", "--draft", REPO, *sizes).out)
    )
    for name in ("acceptance_length", "num_drafts", "output_tokens"):
        assert after[name] == before[name]
    assert hub.locate(REPO).revision == server.sha(REPO)
