"""How results, progress and the next command reach the terminal."""

from __future__ import annotations

import codecs
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from draftkit.errors import DraftkitError, command

if TYPE_CHECKING:
    from rich.console import Console

    from draftkit.evaluate.measure import Progress

PROGRESS_SECONDS = 30.0  # between lines


def refuse_inputs(out: Path, inputs: Iterable[str | Path]) -> None:
    """Raise `DraftkitError` when the file to write is one of those that are read."""
    for path in inputs:
        if out.exists() and os.path.exists(path) and out.samefile(path):
            raise DraftkitError("the output is one of the inputs", where=out, hint="choose another file")


class ProgressLines:
    """How far long work is, as a line on stderr now and then: where that is no terminal, on which a bar would move."""

    def __init__(self) -> None:
        self._said = time.monotonic()

    def __call__(self, name: str, done: int, total: int | None, detail: str = "") -> None:
        now = time.monotonic()
        if now - self._said < PROGRESS_SECONDS:
            return
        self._said = now
        print(f"{name}: {done:,}{'' if total is None else f' of {total:,}'}{detail}", file=sys.stderr, flush=True)


def _so_far(name: str, length: float) -> str:
    """The acceptance length of a run, where it has one."""
    return "" if isnan(length) or name.endswith("no draft") else f", acceptance length {length:.2f}"


@contextmanager
def prompt_progress() -> Iterator[Progress]:
    """A bar for each run with the acceptance length so far, on stderr; lines where that is no terminal."""
    if not sys.stderr.isatty():
        lines = ProgressLines()
        yield lambda name, done, total, length: lines(name, done, total, _so_far(name, length))
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, Any] = {}

        def on_progress(name: str, done: int, total: int, length: float) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done, description=name + _so_far(name, length))

        yield on_progress


def replace_what_streams_lack() -> None:
    """Have stdout and stderr write `?` for what their encoding lacks, instead of failing at the end of long work."""
    for stream in (sys.stdout, sys.stderr):
        fails = stream.errors == "strict" or (stream.errors == "surrogateescape" and not _is_utf8(stream))
        if isinstance(stream, TextIOWrapper) and fails:
            stream.reconfigure(errors="replace")


def _is_utf8(stream: TextIO) -> bool:
    """Whether a stream takes every character; one in memory has no encoding, and does."""
    return stream.encoding is None or codecs.lookup(stream.encoding).name == "utf-8"


def say_next(*words: object) -> None:
    """The command of draftkit that is likely wanted next, on stderr."""
    print(f"next: {command('draftkit', *words)}", file=sys.stderr)


def print_json(value: object) -> None:
    """One JSON object on stdout, in ASCII where that is not UTF-8: `?` for what an encoding lacks would damage data."""
    from draftkit.io.jsonfile import dump, finite

    print(dump(finite(value), ascii_only=not _is_utf8(sys.stdout)), end="")


def print_csv(text: str) -> None:
    """CSV on stdout, in UTF-8 wherever that is."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    print(text, end="")


def console(*, stderr: bool = False) -> Console:
    """Stdout, text as it is. Off a terminal, tables get the width they need instead of being cut to 80 columns."""
    from rich.console import Console

    width = None if (sys.stderr if stderr else sys.stdout).isatty() else 200
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, width=width)


def quiet_transformers() -> None:
    """No loading bars off a terminal, and no advice meant for people who call transformers themselves."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TQDM_DISABLE", "1")
