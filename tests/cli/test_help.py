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


@pytest.mark.parametrize("group", [(), ("data",), ("prepare",)])
def test_a_list_of_commands_says_of_each_what_it_does_without_being_cut(
    group: tuple[str, ...], draftkit: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = draftkit(*group, "--help").out
    assert "Commands:" in shown
    assert "..." not in shown.partition("Commands:")[2]


def test_the_options_of_eval_are_in_panels(draftkit: Command) -> None:
    shown = draftkit("eval", "--help").out
    panels = [line for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert panels == [
        "Options:", "Drafting:", "Prompts:", "Machine:", "Sampling of the target:", "Output:", "What is told of it:",
        "A running server:", "Other engines:", "Example:",
    ]  # fmt: skip
    for name, option in (("Prompts:", "--dataset"), ("Machine:", "--device"), ("Other engines:", "--vllm-url")):
        begin = shown.index(f"\n{name}\n")
        following = panels[panels.index(name) + 1]
        assert begin < shown.index(f"  {option}") < shown.index(f"\n{following}\n")
