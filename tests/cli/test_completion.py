"""What the shell is given to complete, and that this takes no slow import."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from conftest import Command

from draftkit import zoo
from draftkit.cli import options
from draftkit.convert.api import inspect_checkpoint
from draftkit.layout.facts import has

ZOO = [f"zoo:{name}" for name in zoo.names()]


Completed = Callable[..., list[str]]


@pytest.fixture
def completed(draftkit: Command, monkeypatch: pytest.MonkeyPatch) -> Completed:
    """The completions of a line, of which bash has made these words; the last is the one to complete."""

    def run(*words: str) -> list[str]:
        monkeypatch.setattr(options, "_typed", "")
        monkeypatch.setattr(sys.modules["__main__"], "__package__", None)  # of a script, which is called by its name
        monkeypatch.setenv("_DRAFTKIT_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", "\n".join(("draftkit", *words)))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        return draftkit().out.split()

    return run


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("convert", "zoo"), ZOO),
        (("convert", "zoo", ":"), zoo.names()),
        (("convert", "zoo", ":", "eag"), ["eagle", "eagle3"]),
        (("inspect", "zoo", ":", "eagle3", "--target", "zoo", ":", "ta"), ["target"]),
        (("eval", "--target", "zoo", ":", "target", "--draft", "ng"), ["ngram"]),
        (("eval", "--target", "zoo:target", "--draft", "zoo:d"), ["zoo:dflash", "zoo:draft-model", "zoo:dspark"]),
        (("convert", "zoo", ":", "eagle3", "--set", "rope_t"), ["rope_theta="]),
        (("convert", "a", "--set", "x", "=", "1", "--set", "aux_"), ["aux_layer_ids="]),
        (("train", "--set", "optimization.l"), ["optimization.lr="]),
        (("convert", "a", "--from", "mlp"), ["mlp-speculator"]),
        (("convert", "http", ":", "ta"), []),
    ],
)
def test_names_are_completed_also_where_bash_splits_them(
    words: tuple[str, ...], found: list[str], completed: Completed
) -> None:
    assert completed(*words) == found


def test_the_facts_of_a_draft_are_among_those_completed() -> None:
    for name in ("eagle3", "dflash", "mlp-speculator", "pard"):
        spec = inspect_checkpoint(f"zoo:{name}", target="zoo:target").plan.spec  # type: ignore[union-attr]
        known = [fact.removesuffix("=") for fact in options.draft_facts() if has(spec.architecture, fact[:-1])]
        assert len(known) > 3
    assert "hidden_size=" in options.draft_facts()


def test_nothing_slow_is_imported() -> None:
    code = (
        "import sys; from draftkit.cli import options as c; c.drafts(), c.draft_facts(), c.training_settings(); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False, timeout=100).returncode == 0
