"""Serve lines work as they are printed: real paths, quoted, with no more draft tokens than a draft was trained for."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Command
from fixtures import eval_results

from draftkit import zoo
from draftkit.engines import sglang
from draftkit.engines.known import known
from draftkit.engines.releases import Release
from draftkit.engines.serving import local_name, serving_notes, stated_tokens
from draftkit.engines.vllm import releases as vllm
from draftkit.engines.vllm.accepts import serving_notes_of
from draftkit.engines.vllm.serve import method_note
from draftkit.layout.facts import with_facts
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.folder import read_draft
from draftkit.layout.spec import DraftSpec
from draftkit.loading import open_draft
from draftkit.publish import plan_push, write_card
from draftkit.train.checkpoint import load_tensors, save_draft


@pytest.mark.parametrize("name", ["eagle3", "p-eagle", "pard"])
def test_convert_prints_a_line_that_a_shell_can_run(name: str, tmp_path: Path, draftkit: Command) -> None:
    ran = draftkit("convert", f"zoo:{name}", tmp_path / "my draft", "--target", "zoo:target")
    line = next(line for line in ran.out.splitlines() if line.startswith("vLLM: "))
    words = shlex.split(line.removeprefix("vLLM: "))
    assert words[:3] == ["vllm", "serve", str(zoo.path("target"))]
    assert json.loads(words[4])["model"] == str(tmp_path / "my draft")
    assert "zoo:target" not in line
    assert ('cannot read "method"' in ran.out) == (name != "eagle3")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout", "words"),
    [
        ("dflash", "dflash", "--speculative-algorithm DFLASH|--speculative-num-draft-tokens 8"),
        ("dspark", "deepspec", "--speculative-algorithm DSPARK|--speculative-dspark-block-size 7"),
        ("eagle3", "sglang", "--speculative-algorithm EAGLE3|--speculative-num-steps 3"),
    ],
)
def test_sglang_is_told_by_the_flags_that_it_has(
    name: str, layout: str, words: str, tmp_path: Path, draftkit: Command
) -> None:
    ran = draftkit("convert", f"zoo:{name}", tmp_path / "out", "--target", "zoo:target", "--to", layout)
    assert ran.code == 0, ran.err
    line = next(line for line in ran.out.splitlines() if line.startswith("SGLang: "))
    assert all(word in line for word in words.split("|"))
    assert "--speculative-use-block-verification" in ran.out
    assert ("--speculative-dspark-confidence-sts-path FILE" in ran.out.replace(" (", " ")) == (name == "dspark")
    written = {word for word in shlex.split(line) if word.startswith("--speculative")}
    (release,) = known()["SGLang"]
    assert {word.removeprefix("--").replace("-", "_") for word in written} <= release.config_keys.keys()


@pytest.mark.parametrize(("windows", "told"), [((64, 64), "63"), ((64, None), None), ((None, None), None)])
def test_sglang_is_told_the_window_of_all_layers(windows: tuple[int | None, ...], told: str | None) -> None:
    """It counts the tokens before a row, without its own; a draft of which some layers see all has no flag there."""
    with open_draft("zoo:eagle3", "zoo:target") as draft:
        eagle = draft.spec.architecture.expect(EagleSpec)
    full = tuple(layer for layer, window in enumerate(windows) if window is None and any(windows))
    decoder = replace(eagle.decoder, num_hidden_layers=2, sliding_window=windows[0], full_attention_layers=full)
    spec = DraftSpec(architecture=replace(eagle, decoder=decoder), dtype="F32")
    words = shlex.split(sglang.serve_command(spec, "target", "draft", 3))
    flag = "--speculative-draft-window-size"
    assert (words[words.index(flag) + 1] if flag in words else None) == told
    notes = " ".join(sglang.notes_of(spec, "sglang"))
    assert ("learns the draft's window" in notes, f"{flag} (TOKENS" in notes) == (told is not None, told is None)


def test_sglang_is_told_the_first_tokens_that_drafted_ones_see() -> None:
    """Of EAGLE-1, whose prompts it takes in without a window; that it runs a draft model with one is not said."""
    with open_draft("zoo:eagle", "zoo:target") as draft, open_draft("zoo:draft-model", "zoo:target") as model:
        spec, other = (
            replace(one.spec, architecture=with_facts(one.spec.architecture, sliding_window=64, sink_tokens=4))
            for one in (draft, model)
        )
    words = " ".join(shlex.split(sglang.serve_command(spec, "target", "draft", 3)))
    assert "--speculative-draft-window-size 63 --speculative-draft-sink-size 4" in words
    assert "what takes in the text sees all of it" in " ".join(sglang.notes_of(spec, "sglang"))
    assert [one.outcome for one in sglang.verdicts(other, "unified")] == ["wrong"]


@pytest.mark.parametrize("release", vllm.RELEASES, ids=str)
@pytest.mark.parametrize(("name", "older"), [("pard", "takes K more"), ("dflash", "takes K more"), ("eagle3", None)])
def test_what_drafting_takes_of_a_batch_is_told_by_release(name: str, older: str | None, release: Release) -> None:
    with open_draft(f"zoo:{name}", "zoo:target") as draft:
        said = " ".join(serving_notes_of(release, draft.spec, "unified"))
    bounded = name == "dflash" and release is vllm.RELEASES[0]
    assert ("K + 1" in said and "no more sequences" in said) == bounded
    assert ("more of max_num_batched_tokens" in said) == (older is not None and not bounded)
    assert older is None or bounded or older in said


def test_no_more_tokens_than_were_trained(tmp_path: Path, draftkit: Command) -> None:
    draftkit("convert", "zoo:p-eagle", tmp_path / "draft", "--target", "zoo:target")
    spec, tensors = read_draft(tmp_path / "draft").spec, load_tensors(tmp_path / "draft")
    save_draft(tmp_path / "trained", spec, tensors, target="zoo:target", speculative_tokens=4)
    draft = read_draft(tmp_path / "trained")
    assert stated_tokens(draft) == 4
    line, *notes = serving_notes(draft, "zoo:target")
    assert json.loads(shlex.split(line)[-1])["num_speculative_tokens"] == 4
    assert any("parallel_drafting" in note for note in notes)
    ran = draftkit("convert", tmp_path / "trained", tmp_path / "out", "--to", "speculators", "--target", "zoo:target")
    assert ran.code == 0, ran.err
    said = json.loads((tmp_path / "out" / "config.json").read_text())["speculators_config"]
    assert said["proposal_methods"][0]["speculative_tokens"] == 4
    assert said["verifier"]["name_or_path"] == "zoo:target"


def test_names_of_the_hub_stay() -> None:
    assert local_name("org/model") == "org/model"


@pytest.mark.parametrize("name", ["eagle3", "p-eagle", "pard"])
def test_every_command_that_shows_a_folder_says_what_vllm_cannot_read_there(
    name: str, tmp_path: Path, draftkit: Command
) -> None:
    draft, known = tmp_path / "draft", name == "eagle3"
    draftkit("convert", f"zoo:{name}", draft, "--target", "zoo:target")
    assert ('cannot read "method"' in draftkit("inspect", draft).out) != known
    assert plan_push(draft, "org/draft", allow_unmeasured=True).notes == tuple(method_note(read_draft(draft).spec))
    assert (not method_note(read_draft(draft).spec)) == known


@pytest.mark.parametrize("trained", [None, 4])
def test_a_card_proposes_no_more_tokens_than_were_trained(
    trained: int | None, tmp_path: Path, draftkit: Command
) -> None:
    draftkit("convert", "zoo:p-eagle", tmp_path / "converted", "--target", "zoo:target")
    spec, tensors = read_draft(tmp_path / "converted").spec, load_tensors(tmp_path / "converted")
    folder = tmp_path / "draft"
    save_draft(folder, spec, tensors, target="zoo:target", speculative_tokens=trained)
    speedups = {2: 1.1, 4: 1.5, 8: 1.8}
    cells = [
        eval_results.cell(
            folder, num_speculative_tokens=k, tokens_per_second=100 * speedup, **eval_results.sure(speedup)
        )
        for k, speedup in speedups.items()
    ]
    model = {"draft": str(folder), "best_k": 8}
    write_card(folder, [eval_results.write(tmp_path / "result.json", *cells, speed_models=[model])])
    card, best = (folder / "README.md").read_text(), 8 if trained is None else trained
    assert f'"num_speculative_tokens": {best},' in card
    assert f"Use ./{folder.name} at K = {best} at batch 1, " in card
    assert "K = 8 is best" not in card, "a card names one K, by what was measured"

    other = tmp_path / "not-timed"
    save_draft(other, spec, tensors, target="zoo:target", speculative_tokens=trained)
    no_times = {"speedup": None, "speedup_interval": None, "baseline_tokens_per_second": None}
    untimed = [cell | {"draft": str(other)} | no_times for cell in cells]
    model |= {"draft": str(other)}
    write_card(other, [eval_results.write(tmp_path / "untimed.json", *untimed, speed_models=[model])])
    assert ("K = 8 is best" in (other / "README.md").read_text()) == (trained is None)
