"""Pages whose commands are run: each command that a page shows, and the output that it shows below.

A command is a block of `sh`, its output the block of `text` behind it; a file that the reader makes is a block with a
`:caption:`, which is its name.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

STEP = re.compile(r"^```sh\n(?P<lines>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"^```\{code-block\} \w+\n:caption: (?P<name>\S+)\n\n(?P<text>.*?)^```\n", re.DOTALL | re.MULTILINE)
MOST_LINES = 24  # of an output that is shown
CUT = "[…]"


@dataclass(frozen=True)
class Step:
    """A block of commands, and what the page says that they print; None where it says nothing."""

    commands: tuple[tuple[str, ...], ...]
    output: str | None


def steps(page: Path) -> list[Step]:
    """The steps of a page in their order."""
    return [_step(match) for match in STEP.finditer(page.read_text(encoding="utf-8"))]


def files(page: Path) -> dict[str, str]:
    """What the page has its reader write, by the name of the file."""
    return {match["name"]: match["text"] for match in FILE.finditer(page.read_text(encoding="utf-8"))}


def rewrite(page: Path, output_of: Callable[[Step], str]) -> None:
    """Put what `output_of` says below each step, cut where it is long."""

    def written(match: re.Match[str]) -> str:
        output = output_of(_step(match))
        return f"```sh\n{match['lines']}```\n" + (f"\n```text\n{shortened(output)}```\n" if output else "")

    page.write_text(STEP.sub(written, page.read_text(encoding="utf-8")), encoding="utf-8")


def shortened(output: str) -> str:
    lines = [line.rstrip() for line in output.strip("\n").splitlines()]
    kept = lines if len(lines) <= MOST_LINES else [*lines[: MOST_LINES - 4], CUT, *lines[-3:]]
    return "".join(f"{line}\n" for line in kept)


def likeness(shown: str, printed: str) -> float:
    """The share of the lines of a page's output that are also printed, whatever figures stand in them."""
    lines = [_without_figures(line) for line in shortened(shown).splitlines() if line != CUT]
    others = {_without_figures(line) for line in printed.splitlines()}
    return sum(line in others for line in lines) / max(len(lines), 1)


def _without_figures(line: str) -> str:
    return re.sub(r"[\d.,%±×–\[\] ─]+", " ", line).strip()


def _step(match: re.Match[str]) -> Step:
    return Step(tuple(tuple(shlex.split(line)) for line in match["lines"].splitlines()), match["output"])
