"""The command line: parse, call the public API, render.

Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 known failure, 2 usage, 3 measured but below the
required acceptance length or worse than before, 4 measured but undecided, 130 interrupted, 143 ended by SIGTERM, 129 by
SIGHUP. DRAFTKIT_DEBUG=1 shows tracebacks.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated

import typer

from draftkit.cli import data, vocab
from draftkit.cli.calibrate import calibrate
from draftkit.cli.convert import convert, inspect
from draftkit.cli.doctor import doctor
from draftkit.cli.evaluate import certify, evaluate
from draftkit.cli.gate import gate
from draftkit.cli.options import join_words
from draftkit.cli.output import replace_what_streams_lack, say_stopped
from draftkit.cli.panels import PanelCommand, PanelGroup
from draftkit.cli.publish import push
from draftkit.cli.report import report
from draftkit.cli.train import adapt, train
from draftkit.errors import DraftkitError, native_failures
from draftkit.version import __version__

app = typer.Typer(
    cls=PanelGroup,
    help="Convert, train, measure, explain and publish draft models for speculative decoding.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command(cls=PanelCommand)(convert)
app.command(cls=PanelCommand)(inspect)
app.command(name="eval", cls=PanelCommand)(evaluate)
app.command(cls=PanelCommand)(certify)
app.command(cls=PanelCommand)(gate)
app.command(cls=PanelCommand)(calibrate)
app.command(cls=PanelCommand)(doctor)
app.command(cls=PanelCommand)(train)
app.command(cls=PanelCommand)(adapt)
app.command(cls=PanelCommand)(report)
app.command(cls=PanelCommand)(push)
app.add_typer(data.app, name="data")
app.add_typer(vocab.app, name="vocab")


def _version(value: bool) -> None:
    if value:
        print(__version__)
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """The `draftkit` command."""
    replace_what_streams_lack()
    join_words()
    try:
        with _ending_by_signals(), native_failures():
            app(prog_name="draftkit")  # also of `python -m draftkit`
    except DraftkitError as error:
        if os.environ.get("DRAFTKIT_DEBUG"):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:  # outside a command
        say_stopped()
        sys.exit(130)


@contextmanager
def _ending_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the command as Ctrl-C does: what it has begun is removed. An ignored one stays ignored."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    ending = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in ending:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ending:
            signal.signal(number, signal.SIG_DFL)
