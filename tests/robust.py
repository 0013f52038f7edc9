"""The property that bad input must keep: the API gives a whole draft or a `DraftkitError`.

Never another exception, a hang, a huge allocation or a partial folder.
"""

from __future__ import annotations

import os
import resource
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from draftkit import convert_checkpoint, inspect_checkpoint
from draftkit.errors import DraftkitError
from draftkit.layout.tensors import open_checkpoint

SECONDS = 20  # a conversion of a pico checkpoint takes some milliseconds
EXTRA_MEMORY = 2 << 30
LONGEST_MESSAGE = 60_000  # a hundred lines of five hundred characters
Outcome = DraftkitError | None


class Hang(BaseException):
    """Not an `Exception`, so that no reader takes it for damage."""


@contextmanager
def time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang(f"still busy after {SECONDS} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@contextmanager
def memory_limit() -> Iterator[None]:
    """An absurd allocation fails, instead of taking the machine down."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + EXTRA_MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def attempt(source: Path, target: Path | None = None) -> Outcome:
    """Convert a source; returns the error, or None where it gave a draft that can be read."""
    with time_limit(), tempfile.TemporaryDirectory() as parent:
        out = Path(parent, "out")
        try:
            convert_checkpoint(str(source), out, target=target and str(target))
        except DraftkitError as error:
            assert len(str(error)) <= LONGEST_MESSAGE
            assert os.listdir(parent) == []
            return error
        assert os.listdir(parent) == ["out"]
        assert inspect(out) is None
        for handle in open_checkpoint(out).values():
            handle.load()
        return None


def inspect(source: Path, target: Path | None = None) -> Outcome:
    """Inspect a source; returns the error, or None where it was recognised."""
    with time_limit():
        try:
            inspect_checkpoint(str(source), target=target and str(target))
        except DraftkitError as error:
            assert len(str(error)) <= LONGEST_MESSAGE
            return error
        return None
