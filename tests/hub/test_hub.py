"""Sources become folders: the Hub is a local server, and its client runs in a process of its own (see `run`)."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fixtures.servers.hub_server import HubServer, Refusal

from draftkit import zoo
from draftkit.errors import SourceError
from draftkit.hub import locate as hub
from draftkit.hub.local_paths import looks_like_path, public_name

NOWHERE = "http://127.0.0.1:9"  # the discard port: nothing listens there
LOCATE = """
import json, sys
from draftkit.errors import SourceError
from draftkit.hub.locate import locate

for source, options in json.loads(sys.argv[1]):
    try:
        print(json.dumps(vars(locate(source, **options)), default=str))
    except SourceError as error:
        print(json.dumps({"error": str(error)}))
"""


def run(home: Path, endpoint: str, *calls: str | tuple[str, dict[str, Any]], **env: str) -> list[dict[str, Any]]:
    """Locate each of `calls` in one new process, because `huggingface_hub` reads its environment when imported."""
    clean = {name: value for name, value in os.environ.items() if not name.upper().startswith(("HF_", "HTTP"))}
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    arguments = json.dumps([(call, {}) if isinstance(call, str) else call for call in calls])
    done = subprocess.run(
        [sys.executable, "-c", LOCATE, arguments],
        env={**clean, **settings, "HF_HUB_DISABLE_TELEMETRY": "1", **env},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "it/s" not in done.stderr  # no progress bar where there is no terminal
    return [json.loads(line) for line in done.stdout.splitlines()]


def folder(path: Path, *files: str) -> Path:
    """A folder whose files hold their own names."""
    for file in files:
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        (path / file).write_text(f"{path.name}/{file}")
    return path


def names(located: dict[str, Any]) -> set[str]:
    return {file.name for file in Path(located["path"]).iterdir()}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HubServer]:
    draft = folder(tmp_path / "draft", "config.json", "tokenizer.json", "model.safetensors", "README.md")
    with HubServer(
        {
            "org/draft": draft,
            "org/draft@v1": folder(tmp_path / "v1", "config.json", "pytorch_model.bin"),
            "org/locked": draft,
            "org/empty": folder(tmp_path / "empty", "config.json", "model.gguf"),
        },
        gated={"org/locked"},
    ) as running:
        yield running


def test_a_repository_is_downloaded(server: HubServer, home: Path) -> None:
    commit = server.sha("org/draft", "v1")
    latest, tag, uri, pinned = run(
        home,
        server.endpoint,
        "org/draft",
        "org/draft@v1",
        ("hf://org/draft", {"revision": "v1"}),
        f"org/draft@{commit}",
    )
    assert names(latest) == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (Path(latest["path"]) / "config.json").read_text() == "draft/config.json"
    assert (latest["name"], latest["repo"], latest["default_target"]) == ("org/draft", "org/draft", None)
    assert latest["revision"] == server.sha("org/draft")
    assert names(tag) == {"config.json", "pytorch_model.bin"}
    assert tag["revision"] == commit
    assert uri == pinned == tag


@pytest.mark.slow
def test_only_what_is_needed_is_downloaded(tmp_path: Path, home: Path) -> None:
    sharded = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"}
    tokenizer = {"tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "tokenizer.model"}
    chat = {"chat_template.jinja", "special_tokens_map.json"}
    images = {"preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"}
    config = {"config.json", "generation_config.json"}
    other = ("pytorch_model.bin", "consolidated.safetensors", "optimizer.pt", "onnx/model.safetensors", "README.md")
    source = folder(tmp_path / "repo", *sharded, *tokenizer, *chat, *images, *config, *other)
    with HubServer({"org/model": source}) as server:
        run(home, server.endpoint, ("org/model", {"weights": False, "tokenizer": False}))
        assert server.downloads() == config
        run(home, server.endpoint, ("org/model", {"tokenizer": False}))
        assert server.downloads() == config | sharded
        run(home, server.endpoint, "org/model")
        assert server.downloads() == config | sharded | tokenizer | chat | images


@pytest.mark.parametrize(
    ("files", "weights"),
    [
        ({"model.safetensors", "pytorch_model.bin", "heads.pt"}, {"model.safetensors"}),
        ({"pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json", "heads.pt"}, None),
        ({"pytorch_model.bin", "training_args.bin", "optimizer.pt"}, {"pytorch_model.bin"}),
        ({"training_args.bin", "medusa_lm_head.pt", "optimizer.pt"}, {"medusa_lm_head.pt"}),
        ({"consolidated.safetensors"}, {"consolidated.safetensors"}),
        ({"checkpoint/model.safetensors", "model.gguf"}, set()),
    ],
)
def test_one_kind_of_weights_is_chosen(files: set[str], weights: set[str] | None) -> None:
    assert set(hub._weights(sorted(files))) == (files - {"heads.pt"} if weights is None else weights)


@pytest.mark.slow
def test_the_cache_serves_without_a_network(server: HubServer, home: Path) -> None:
    calls = ("org/draft", "org/draft@v1")
    downloaded = run(home, server.endpoint, *calls)
    server.requests.clear()
    assert run(home, server.endpoint, *calls, HF_HUB_OFFLINE="1") == downloaded
    assert server.requests == []
    assert run(home, NOWHERE, *calls) == downloaded


@pytest.mark.slow
def test_an_incomplete_cache_is_noticed(server: HubServer, home: Path) -> None:
    [located] = run(home, server.endpoint, ("org/draft", {"weights": False}))
    config, all_of_it = run(home, NOWHERE, ("org/draft", {"weights": False}), "org/draft", HF_HUB_OFFLINE="1")
    assert config == located
    assert "org/draft is not in the cache, or not all of it" in all_of_it["error"]
    assert "unset HF_HUB_OFFLINE" in all_of_it["error"]


@pytest.mark.slow
def test_a_cache_without_listing_serves_what_it_has(server: HubServer, home: Path) -> None:
    downloaded = run(home, server.endpoint, "org/draft")
    for listing in home.glob("hub/*/trees/*"):
        listing.unlink()
    assert run(home, NOWHERE, "org/draft", HF_HUB_OFFLINE="1") == downloaded
    (Path(downloaded[0]["path"]) / "model.safetensors").unlink()
    [located] = run(home, NOWHERE, "org/draft", HF_HUB_OFFLINE="1")
    assert "not in the cache" in located["error"]


def test_no_network(home: Path) -> None:
    [located] = run(home, NOWHERE, "org/draft")
    assert "no network" in located["error"]
    assert f"where: {NOWHERE}" in located["error"]


def test_what_the_hub_refuses(server: HubServer, home: Path) -> None:
    missing, gated, revision, empty = (
        located["error"]
        for located in run(home, server.endpoint, "org/missing", "org/locked", "org/draft@v9", "org/empty")
    )
    assert "no repository org/missing, or it is private" in missing
    assert "HF_TOKEN" in missing
    assert f"request access at {server.endpoint}/org/locked" in gated
    assert "org/draft has no revision v9" in revision
    assert "org/empty has no weights" in empty


@pytest.mark.slow
@pytest.mark.parametrize("token", ["“hf_secret”", "hf_\vsecret"])
def test_a_malformed_token_is_named_and_not_shown(server: HubServer, home: Path, token: str) -> None:
    [located] = run(home, server.endpoint, "org/draft", HF_TOKEN=token)
    assert "the Hub token holds characters" in located["error"]
    assert "secret" not in located["error"]


def http_error(status: int, reason: str) -> Exception:
    from huggingface_hub.errors import HfHubHTTPError

    return HfHubHTTPError(
        "", response=SimpleNamespace(status_code=status, reason_phrase=reason, headers={}, request=None)
    )


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
        (RuntimeError("Data processing error: IO Error: No space left on device (os error 28)"), "the disk is full"),
        (RuntimeError("Data processing error: CAS service error"), "the download of org/draft broke off"),
        (PermissionError(errno.EACCES, "Permission denied", "/cache"), "could not be stored: Permission denied"),
        (json.JSONDecodeError("Expecting value", "<html>", 0), "does not answer like a Hub"),
        (http_error(503, "Service Unavailable"), "the Hub answered 503 Service Unavailable"),
        (http_error(401, "Unauthorized"), "the Hub rejects the token"),
    ],
)
def test_other_failures_are_explained(monkeypatch: pytest.MonkeyPatch, error: Exception, message: str) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def fail(*args: object, **kwargs: object) -> None:
        raise error

    def not_cached(*args: object, **kwargs: object) -> None:
        raise LocalEntryNotFoundError("not cached")

    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: False)
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", fail)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", not_cached)
    with pytest.raises(SourceError, match=message) as caught:
        hub.locate("org/draft")
    assert caught.value.__cause__ is error


def test_a_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path / "org" / "draft", "config.json")
    assert hub.locate(str(tmp_path)) == hub.Located(tmp_path, str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.locate("~/org").path == tmp_path / "org"
    monkeypatch.chdir(tmp_path)
    assert hub.locate("org/draft").repo is None
    with pytest.raises(SourceError, match=r"is a file(.|\n)*pass the folder: org/draft"):
        hub.locate("org/draft/config.json")
    with pytest.raises(SourceError, match="has no revisions"):
        hub.locate("org/draft", revision="v1")


@pytest.mark.parametrize("source", ["./draft", "../draft", "/no/draft", "~/no/draft", "out/org/draft"])
def test_a_missing_path_is_not_sought_on_the_hub(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match="there is no folder"):
        hub.locate(source)


@pytest.mark.parametrize(
    "source",
    ["", "draft", "org/", "org/dr aft", "org/draft@", "org/dr--aft", "hf://draft", "hf://a/b/c", "@v1", "órg/x"],
)
def test_bad_ids(source: str) -> None:
    with pytest.raises(SourceError, match="neither a folder nor a Hub id"):
        hub.locate(source)


def test_two_revisions() -> None:
    with pytest.raises(SourceError, match="two revisions are given: v1 and v2"):
        hub.locate("org/draft@v1", revision="v2")


def test_revisions_may_hold_slashes() -> None:
    assert hub._repo_and_revision("org/draft@refs/pr/3", None) == ("org/draft", "refs/pr/3")
    assert not looks_like_path("org/draft@refs/pr/3")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("zoo:target", "zoo:target"),
        (str(zoo.path("eagle3")), "zoo:eagle3"),
        ("org/draft@v1", "org/draft@v1"),
        ("hf://org/draft", "org/draft"),
        ("/somewhere/models--org--tiny--draft/snapshots/0a1b", "org/tiny--draft"),
        ("/somewhere/else/draft/", "draft"),
        ("~/draft.gguf", "draft.gguf"),
        ("runs/one/draft", "draft"),
        ("here", "here"),
        (".", "folder"),
        ("ngram:2-4", "ngram:2-4"),
    ],
)
def test_a_source_is_called_by_its_name_and_not_by_its_path(
    source: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "folder")
    assert public_name(source) == name


def test_the_zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo, "_MODELS", tmp_path)
    assert zoo.names() == []
    folder(tmp_path, "target/config.json", "eagle/config.json", "smollm2-eagle3/config.json", "README.md")
    assert zoo.names() == ["eagle", "smollm2-eagle3", "target"]
    assert zoo.drafts() == ["eagle"]
    assert hub.locate("zoo:eagle") == hub.Located(tmp_path / "eagle", "zoo:eagle", default_target="zoo:target")
    assert hub.locate("zoo:target").default_target is None
    assert hub.locate("zoo:smollm2-eagle3").default_target is None
    for name in ("medusa", "../zoo", ""):
        with pytest.raises(SourceError, match="one of zoo:eagle, zoo:smollm2-eagle3, zoo:target"):
            hub.locate(f"zoo:{name}")
    with pytest.raises(SourceError, match="has no revisions"):
        hub.locate("zoo:eagle", revision="v1")


def test_importing_stays_cheap() -> None:
    code = "import sys, draftkit.hub.locate; print({'huggingface_hub', 'torch', 'transformers'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_server_resumes_downloads(server: HubServer) -> None:
    request = urllib.request.Request(
        f"{server.endpoint}/org/draft/resolve/main/config.json", headers={"Range": "bytes=6-"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request) as response:
        assert (response.status, response.headers["Content-Range"]) == (206, "bytes 6-16/17")
        assert response.read() == b"config.json"


def busy(status: int, **headers: str) -> Refusal:
    return Refusal(status, "", "too many requests", **headers)


def test_a_busy_hub_is_asked_again_when_it_says(server: HubServer, home: Path) -> None:
    past = "Wed, 21 Oct 2015 07:28:00 GMT"
    server.busy = [
        busy(429, **{"Retry-After": "0"}),
        busy(503, **{"Retry-After": past}),
        busy(429, RateLimit='"api";r=0;t=1'),
    ]
    begun = time.monotonic()
    [located] = run(home, server.endpoint, "org/draft")
    assert names(located) == {"config.json", "tokenizer.json", "model.safetensors"}
    assert not server.busy
    assert time.monotonic() - begun > 1


def test_a_hub_that_is_busy_for_long_is_not_waited_for(server: HubServer, home: Path) -> None:
    server.busy = [busy(429, **{"Retry-After": "3600"})]
    [located] = run(home, server.endpoint, "org/draft")
    assert "the Hub answered 429" in located["error"]


def test_files_without_names_are_no_answer_of_a_hub(server: HubServer, home: Path) -> None:
    server.nameless = True
    [located] = run(home, server.endpoint, "org/draft")
    assert "does not answer like a Hub" in located["error"]


def test_the_token_goes_to_the_hub_alone(server: HubServer, home: Path, tmp_path: Path) -> None:
    """Where the Hub says that files lie elsewhere, and that access to them is asked for there with the token."""
    pytest.importorskip("hf_xet")  # the client of that storage
    with HubServer({"org/draft": tmp_path / "draft"}) as elsewhere:
        server.storage = elsewhere.endpoint
        (located,) = run(home, server.endpoint, "org/draft", HF_TOKEN="hf_secret", HF_HUB_DISABLE_XET="0")
    assert "Bearer hf_secret" in server.tokens
    assert "Bearer hf_secret" not in elsewhere.tokens
    assert f"{elsewhere.endpoint} asks for the Hub's token, which is sent only to the Hub" in located["error"]
