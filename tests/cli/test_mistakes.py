"""Usual mistakes are named, with what was meant, before anything long begins; and nothing is written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from conftest import Command

CONVERT = ("convert", "zoo:eagle3", "OUT", "--target", "zoo:target")
EVAL = ("eval", "--target", "zoo:target", "--draft", "zoo:eagle3")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            (*CONVERT, "--set", "aux_layer_ids=1,2,99"),
            ["after layers 99, and zoo:target has 10", "aux_layer_ids=2,5,7?"],
        ),
        ((*CONVERT, "--set", "rope_theta=abc"), ["--set rope_theta: 'abc' is not a number"]),
        ((*CONVERT, "--from", "eagel"), ["there is no format eagel, did you mean eagle?"]),
        (
            ("convert", "zoo:target", "OUT", "--target", "zoo:eagle3"),
            ["zoo:target is larger than its target zoo:eagle3", "did you swap them?"],
        ),
        ((*CONVERT, "--set", "rope_thta=10000"), ["no fact rope_thta to set, did you mean rope_theta?"]),
        ((*CONVERT, "--to", "vlm"), ["did you mean vllm?"]),
        (("eval", "--target", "zoo:target", "--draft", "zoo:eagl3"), ["did you mean zoo:eagle3?"]),
        (("eval", "--target", "zoo:target", "--draft", "eagle3"), ["did you mean zoo:eagle3?"]),
        (("eval", "--target", "zoo:target", "--draft", "ngramm:2-4"), ["did you mean ngram?"]),
        ((*EVAL, "--dataset", "humanevl"), ["did you mean humaneval?"]),
        ((*EVAL, "--context", "1k,16k"), ["--context 16384: 16384 tokens and up to 128 new ones; the target has 2048"]),
        ((*EVAL, "--vllm-python", "/no/such/python"), ["/no/such/python cannot be run: No such file or directory"]),
        (
            (*EVAL, "--vllm-python", sys.executable),
            [f"{sys.executable} has no vLLM"],
        ),
        ((*EVAL, "--draft-temperature", "-1"), ["the draft's temperature is -1.0"]),
        ((*EVAL, "--acceptance-rates", "3"), ["--acceptance-rates without --verification synthetic"]),
        ((*EVAL, "--verification", "synthetic"), ["--verification synthetic without --acceptance-rates"]),
        (
            ("eval", "--target", "zoo:eagle3", "--draft", "zoo:target"),
            ["zoo:eagle3 is a draft (eagle3), not a target", "did you swap --target and --draft?"],
        ),
        (
            ("doctor", "--target", "zoo:eagle3", "--draft", "zoo:target"),
            ["zoo:target is larger than its target zoo:eagle3", "did you swap them?"],
        ),
        (
            ("eval", "--target", "zoo:draft-model", "--draft", "zoo:target", "--limit", "1"),
            ["zoo:target is larger than its target zoo:draft-model", "did you swap them?"],
        ),
    ],
)
def test_a_mistake_is_named(
    draftkit: Command,
    arguments: tuple[str, ...],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loads(*_: object, **__: object) -> None:
        raise AssertionError("the target's weights were loaded")

    monkeypatch.setattr("draftkit.loading.load_target", loads)
    out = tmp_path / "out"
    done = draftkit(*(str(out) if argument == "OUT" else argument for argument in arguments))
    assert done.code == 1
    assert all(word in done.err for word in words), done.err
    assert not out.exists()


def test_a_missing_extra_is_named(draftkit: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    done = draftkit("convert", "zoo:eagle3", tmp_path / "e.gguf", "--to", "gguf", "--target", "zoo:target")
    assert done.code == 1
    assert "next: pip install 'draftkit-spec[gguf]'" in done.err
    assert not any(tmp_path.iterdir())


def test_a_converted_draft_that_is_larger_than_its_target_is_named(draftkit: Command, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    assert draftkit("convert", "zoo:target", draft).code == 0
    done = draftkit("eval", "--target", "zoo:draft-model", "--draft", draft, "--limit", "1")
    assert done.code == 1
    assert f"did you mean --target {draft} --draft zoo:draft-model?" in done.err
