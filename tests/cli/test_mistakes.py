"""Usual mistakes are named, with what was meant, before anything long begins; and nothing is written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from conftest import Command

from draftkit.evaluate import engines

CONVERT = ("convert", "zoo:eagle3", "OUT", "--target", "zoo:target")
EVAL = ("eval", "--target", "zoo:target", "--draft", "zoo:eagle3")


@pytest.mark.slow
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
            (*CONVERT, "--from", "dflash"),
            ["the format eagle3, and cannot be read as dflash", "next: leave out --from dflash"],
        ),
        (
            ("convert", "zoo:target", "OUT", "--part", "mtp"),
            ["there are no multi-token prediction heads in zoo:target"],
        ),
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
        (
            (*EVAL, "--k", "17"),
            ["K = 17 draft tokens a round", "zoo:eagle3", "1 to 16, the most that"],
        ),
        (
            ("eval", "--target", "zoo:target", "--draft", "zoo:mlp-speculator", "--k", "4,64"),
            ["K = 64 draft tokens a round", "zoo:mlp-speculator", "1 to 4, for which the draft's weights are made"],
        ),
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


def test_a_result_is_no_model_and_a_draft_no_training_run(draftkit: Command, tmp_path: Path) -> None:
    result, draft = tmp_path / "result.json", tmp_path / "draft"
    result.write_text("{}")
    assert f"a result is shown by draftkit report {result}" in draftkit("inspect", result).err
    assert draftkit("convert", "zoo:eagle3", draft).code == 0
    assert f"pass the folder: {draft}" in draftkit("inspect", draft / "config.json").err
    page = tmp_path / "page.html"
    refused = draftkit("report", draft, "--out", page)
    assert refused.code == 1
    assert "the folder of a draft, not of a training run" in refused.err
    assert f"next: draftkit eval --target TARGET --draft {draft} --out result.json" in refused.err
    (draft / "eval").mkdir()
    (draft / "eval" / "one.json").write_text("{}")
    assert f"next: draftkit report {draft}/eval/one.json" in draftkit("report", draft, "--out", page).err
    assert not page.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "option", "words"),
    [
        ((*EVAL, "--set", "top_p=3"), "--set top_p", "top_p is 3.0"),
        ((*EVAL, "--k", "0"), "--k", "whole numbers from 1 on"),
        ((*EVAL, "--temperature", "0,-1"), "--temperature", "temperature is -1.0"),
        ((*EVAL, "--set", "draft_temperature=-1"), "--set draft_temperature", "draft_temperature is -1.0"),
        ((*EVAL, "--max-new-tokens", "1"), "--max-new-tokens", "a whole number from 2 on"),
        ((*EVAL, "--slice", "tongue"), "--slice", "language, thinking, tools, category"),
        ((*EVAL, "--set", "verification=synthetic"), "--set verification", "not one of"),
        ((*EVAL, "--k", "2,4", "--set", "k_by_batch=8:2"), "--k", "schedules are for one K"),
        ((*EVAL, "--set", "k_by_batch=8:5"), "--set k_by_batch", "largest batch: K, each K from 0 to 4"),
        (
            (*EVAL, "--engine", "vllm", "--set", "gpu_memory_utilization=1.5"),
            "--set gpu_memory_utilization",
            "at most 1",
        ),
        ((*EVAL, "--engine", "vlm"), "--engine", "draftkit, llama.cpp, server, vllm"),
        ((*EVAL, "--engine", "server"), "--server", "no server to measure"),
        ((*EVAL, "--set", "top_k=many"), "--set top_k", "top_k: 'many' is not a whole number"),
        (
            ("certify", *EVAL[1:], "--set", "verification=coupled"),
            "--set verification",
            "rejection or block, to certify",
        ),
        (("data", "regenerate", "rows", "out", "--target", "t", "--top-p", "0"), "--top-p", "above 0, at most 1"),
        (("data", "synthesize", "--count", "1", "--out", "o", "--target", "t", "--top-p", "0"), "--top-p", "above 0"),
    ],
)
def test_a_value_that_no_run_can_have_is_a_usage_error_of_its_option_before_anything_slow_is_imported(
    draftkit: Command, arguments: tuple[str, ...], option: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for slow in ("evaluate.evaluate", "data.regenerate", "data.synthesize"):  # they import torch and transformers
        monkeypatch.setitem(sys.modules, f"draftkit.{slow}", None)
    done = draftkit(*arguments)
    assert done.code == 2
    assert f"Invalid value for '{option}'" in done.err
    assert words in done.err


def test_settings_of_two_engines_are_refused(draftkit: Command) -> None:
    for options in (
        ("--server", "http://host", "--engine", "llama.cpp"),
        ("--server", "http://host", "--set", "llama_server=x"),
        ("--server", "http://host", "--vllm-python", "x"),
        ("--engine", "vllm", "--set", "llama_server=x"),
        ("--engine", "draftkit", "--set", "tensor_parallel_size=2"),
    ):
        done = draftkit(*EVAL, *options)
        assert done.code == 2
        assert "leave out one of them" in done.err


TOY_ENGINE = """
from dataclasses import dataclass
from draftkit.evaluate.engine import BaseEngine
from draftkit.errors import DraftkitError
from draftkit.io.settings import setting

@dataclass(frozen=True)
class ToySettings:
    color: str = setting("Its color.", "red")

class ToyEngine(BaseEngine):
    name = "toy-9.b"
    settings_type = ToySettings

    def __init__(self, settings):
        raise DraftkitError(f"it is {settings.color}")

    def lane(self, source, asked, report): ...
"""


def test_an_engine_and_its_settings_are_found_by_its_file(
    draftkit: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy_9_b.py").write_text(TOY_ENGINE)
    monkeypatch.setattr(engines, "__path__", [*engines.__path__, str(tmp_path)])
    done = draftkit(*EVAL, "--engine", "toy-9.b", "--set", "color=blue")
    assert (done.code, done.err) == (1, "error: it is blue\n")
    assert draftkit("eval", "--settings", "color").out.startswith("color: Its color.\n")
    sys.modules.pop(f"{engines.__name__}.toy_9_b")


def test_a_setting_that_is_none_or_has_an_option_is_named(draftkit: Command) -> None:
    assert "there is no setting top_kk, did you mean top_k?" in draftkit(*EVAL, "--set", "top_kk=1").err
    assert "limit has an option of its own" in draftkit(*EVAL, "--set", "limit=1").err
    assert "--set NAME=VALUE" in draftkit(*EVAL, "--set", "top_k").err


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
