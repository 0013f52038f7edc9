"""How results, progress and the next command reach the terminal."""

from __future__ import annotations

import codecs
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from io import TextIOWrapper
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from draftkit.errors import DraftkitError, command

if TYPE_CHECKING:
    from rich.console import Console

    from draftkit.evaluate.measure import PromptProgress

PROGRESS_SECONDS = 60.0  # between lines
BAR_WIDTH = 14  # characters: what runs is named beside it, in 80


def refuse_inputs(out: Path, inputs: Iterable[str | Path]) -> None:
    """Raise `DraftkitError` when the file to write is one of those that are read."""
    for path in inputs:
        if out == Path(path) or (out.exists() and os.path.exists(path) and out.samefile(path)):
            raise DraftkitError("the output is one of the inputs", where=out, hint="choose another file")


class ShowProgress(Protocol):
    """Shows how far the work of a name is; `total` None where nobody knows."""

    def __call__(self, name: str, done: int, total: int | None, detail: str = "") -> None: ...


@contextmanager
def shown_progress(*, in_bytes: bool = False, one_bar: bool = False) -> Iterator[ShowProgress]:
    """Show on stderr how far long work is: a bar for each name, or `one_bar` that takes the name of what runs; where
    that is no terminal, on which a bar would move, a line now and then."""
    if not sys.stderr.isatty():
        yield _progress_lines(in_bytes)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    amount: tuple[ProgressColumn, ...] = (MofNCompleteColumn(),)
    if in_bytes:
        amount = DownloadColumn(), TransferSpeedColumn()
    columns = TextColumn("{task.description}"), BarColumn(BAR_WIDTH), *amount, TimeRemainingColumn(), TextColumn("left")
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, Any] = {}

        def show(name: str, done: int, total: int | None, detail: str = "") -> None:
            bar = "" if one_bar else name
            if bar not in tasks:
                tasks[bar] = bars.add_task(name, total=total)
            bars.update(tasks[bar], completed=done, total=total, description=name + detail)

        yield show


def _progress_lines(in_bytes: bool, *, begins: bool = False, time_left: bool = False) -> ShowProgress:
    """A line every minute, and where it `begins`, when the name is another; with the time left where it is wanted."""
    began = said = time.monotonic()
    named = ""
    before: int | None = None  # what was done when this began

    def show(name: str, done: int, total: int | None, detail: str = "") -> None:
        nonlocal said, named, before
        before = done if before is None else before
        if begins and name != named:
            named, said = name, time.monotonic()
            print(name, file=sys.stderr, flush=True)
            return
        if time.monotonic() - said < PROGRESS_SECONDS:
            return
        said = time.monotonic()
        if (begins or time_left) and total and done > before:
            left = timedelta(seconds=round((said - began) * (total - done) / (done - before)))
            detail += f", about {left} left"
        amount, whole = (f"{n / 1e9:,.1f} GB" if in_bytes else f"{n:,}" for n in (done, total or 0))
        print(f"{name}: {amount}{'' if total is None else f' of {whole}'}{detail}", file=sys.stderr, flush=True)

    return show


@contextmanager
def counted_progress(name: str, total: int | None, *, in_bytes: bool = False) -> Iterator[Callable[[int], None]]:
    """Progress of one kind of work: yields a function that is called with how many more are done."""
    with shown_progress(in_bytes=in_bytes) as show:
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            show(name, done, total)

        if sys.stderr.isatty():
            show(name, 0, total)
        yield advance


@contextmanager
def answer_progress(name: str, done: int, total: int | None) -> Iterator[Callable[[int, int], None]]:
    """Progress of answers, of which some are `done`, with the tokens a second of this run and the time left: yields a
    function that is called with how many more are done, and how many more tokens were drawn."""
    bar = shown_progress(one_bar=True) if sys.stderr.isatty() else nullcontext(_progress_lines(False, time_left=True))
    with bar as show:
        tokens, began = 0, time.monotonic()

        def advance(rows: int, drawn: int) -> None:
            nonlocal done, tokens
            done += rows
            tokens += drawn
            show(name, done, total, f", {tokens / max(time.monotonic() - began, 1e-9):,.0f} tokens/s" if tokens else "")

        advance(0, 0)
        yield advance


@contextmanager
def prompt_progress() -> Iterator[PromptProgress]:
    """Show how far a measurement is as a whole: one bar with the time left and what runs, with its acceptance length so
    far; off a terminal a line when a cell begins, and every minute."""
    bar = shown_progress(one_bar=True) if sys.stderr.isatty() else nullcontext(_progress_lines(False, begins=True))
    with bar as show:

        def on_progress(name: str, done: int, total: int, length: float) -> None:
            show(name, done, total, "" if isnan(length) else f": {length:.2f}")

        if sys.stderr.isatty():
            show("loading", 0, None)
        yield on_progress


class Stopping:
    """What Ctrl-C says of a command: what is kept, and how to go on."""

    kept: Callable[[], str]

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """A command begins, which has kept nothing yet."""
        self.kept = lambda: "nothing was written"


stopping = Stopping()


def say_stopped() -> None:
    """That the command was stopped, and what is there of it."""
    below = "\n" if sys.stderr.isatty() else ""  # of ^C, as a terminal shows it
    print(f"{below}stopped; {stopping.kept()}", file=sys.stderr, flush=True)


def replace_what_streams_lack() -> None:
    """Have stdout and stderr write `?` for what their encoding lacks, instead of failing at the end of long work."""
    for stream in (sys.stdout, sys.stderr):
        fails = stream.errors == "strict" or (stream.errors == "surrogateescape" and not _is_utf8(stream))
        if isinstance(stream, TextIOWrapper) and fails:
            stream.reconfigure(errors="replace")


def _is_utf8(stream: TextIO) -> bool:
    """Whether a stream takes every character; one in memory has no encoding, and does."""
    return stream.encoding is None or codecs.lookup(stream.encoding).name == "utf-8"


def say_written(where: object, what: str) -> None:
    """The first line of what a command has made: where it is, and what."""
    from rich.text import Text

    console().print(Text.assemble(("written", "bold green"), f": {where}: {what}"), soft_wrap=True)


def counted(number: int, noun: str) -> str:
    """A number of things in words."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


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
