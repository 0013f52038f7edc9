"""Help by topic, with an example at each command's end that the command takes."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import typer.main
from conftest import Command

from draftkit.cli import app
from draftkit.cli.panels import EXAMPLES


def commands() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        found |= {name: command} if inner is None else {f"{name} {part}": inner[part] for part in inner}
    return found


def test_every_command_has_an_example() -> None:
    assert EXAMPLES.keys() == commands().keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_an_example_is_one_that_the_command_takes(name: str, draftkit: Command) -> None:
    program, *arguments = shlex.split(EXAMPLES[name])
    assert program == "draftkit"
    depth = len(name.split())
    assert arguments[:depth] == name.split()
    context = commands()[name].make_context(name, arguments[depth:])
    context.close()
    shown = draftkit(*name.split(), "--help").out
    assert shown.endswith(f"Example:\n  {EXAMPLES[name]}\n")


@pytest.mark.parametrize("group", [(), ("data",), ("vocab",)])
def test_a_list_of_commands_says_of_each_what_it_does_without_being_cut(
    group: tuple[str, ...], draftkit: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = draftkit(*group, "--help").out
    listed = "Commands:" if group else "Start here:"
    assert listed in shown
    assert "..." not in shown.partition(listed)[2]


def test_commands_are_listed_by_what_comes_first(draftkit: Command) -> None:
    shown = draftkit("--help").out
    panels = [line for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert panels == ["Options:", "Start here:", "Then:", "More:"]
    first = [line.split()[0] for line in shown.partition("Start here:\n")[2].splitlines()[:3]]
    assert first == ["convert", "eval", "train"]


def test_the_options_of_eval_are_in_panels(draftkit: Command) -> None:
    shown = draftkit("eval", "--help").out
    panels = [line for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert panels == [
        "Options:", "Prompts:", "Machine:", "Engines:", "What is told of it:", "Output:", "Example:",
    ]  # fmt: skip
    for name, option in (("Prompts:", "--dataset"), ("Machine:", "--device"), ("Engines:", "--server")):
        begin = shown.index(f"\n{name}\n")
        following = panels[panels.index(name) + 1]
        assert begin < shown.index(f"  {option}") < shown.index(f"\n{following}\n")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_a_command_has_no_more_options_than_a_person_reads(name: str) -> None:
    options = [parameter for parameter in commands()[name].params if parameter.param_type_name == "option"]
    assert len(options) <= 35


def test_settings_are_listed_and_explained(draftkit: Command) -> None:
    """All of them, each with what it is for; of a measurement and of a run also with what else they say."""
    assert "k_by_batch" in draftkit("eval", "--settings").out
    assert "optimization.lr" in draftkit("train", "--settings", "--json").out
    shown = draftkit("eval", "--settings", "disable_above_batch").out
    assert "unit: sequences" in shown
    assert "needs: no k_by_batch" in shown
    rates = draftkit("train", "--settings", "optimization.lr").out
    assert "default: 0.0006 for a new draft, 0.002 by Muon, 0.0001" in rates
    assert "default: 0.5" in draftkit("train", "--settings", "optimization.clip").out
    assert "of: drafts of the family eagle" in draftkit("convert", "--settings", "aux_layer_ids").out
    wrong = draftkit("train", "--settings", "lrr")
    assert (wrong.code, "train has no setting lrr" in wrong.err) == (1, True)
