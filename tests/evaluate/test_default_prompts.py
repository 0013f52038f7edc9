"""Which prompts are asked where none are named, and that a result on the bundled ones says so."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
from conftest import Command

from draftkit.cli.options import prompts_of


@pytest.mark.parametrize(
    ("named", "target", "asked"),
    [
        (None, "zoo:target", "zoo"),
        (None, "Qwen/Qwen3-8B", "mt-bench"),
        (None, "models/zoo", "mt-bench"),
        (None, None, "mt-bench"),  # a server without --target
        ("zoo", "Qwen/Qwen3-8B", "zoo"),
        ("mine.jsonl", "zoo:target", "mine.jsonl"),
    ],
)
def test_what_is_asked_where_nothing_is_named(named: str | None, target: str | None, asked: str) -> None:
    assert prompts_of(named, target) == asked


@pytest.mark.slow
def test_without_a_network_the_other_prompts_are_named(
    draftkit: Command, running_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for asked in (("eval",), ("certify",), ("eval", "--dry-run")):
        ran = draftkit(*asked, "--target", running_target, "--draft", "ngram")
        assert (ran.code, ran.out) == (1, "")
        assert "--dataset FILE" in ran.err
        assert "--dataset zoo" in ran.err


@pytest.mark.slow
def test_a_result_on_the_bundled_prompts_says_so_first(draftkit: Command, running_target: Path) -> None:
    few = ("--draft", "ngram", "--dataset", "zoo", "--limit", 2, "--max-new-tokens", 4, "--set", "repeats=0")
    ran = draftkit("eval", "--target", running_target, *few)
    assert ran.out.startswith("On draftkit's bundled prompts, ")
    assert "bundled" not in draftkit("eval", "--target", "zoo:target", *few).out
