"""The property that bad input must keep: the API gives a whole draft or a `DraftkitError`.

Never another exception, a hang, a huge allocation or a partial folder.
"""

from __future__ import annotations

import os
import resource
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from draftkit import convert_checkpoint, inspect_checkpoint
from draftkit.errors import DraftkitError
from draftkit.io.tensors import open_checkpoint

SECONDS = 20  # of processor time; a conversion of a pico checkpoint takes some milliseconds
WAITING = 3 * SECONDS  # of any time
EXTRA_MEMORY = 2 << 30
LONGEST_MESSAGE = 60_000  # a hundred lines of five hundred characters
Outcome = DraftkitError | None


class Hang(BaseException):
    """Not an `Exception`, so that no reader takes it for damage."""


@contextmanager
def time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang(f"still busy after {SECONDS} s, or waiting after {WAITING} s")

    timers = ((signal.ITIMER_PROF, signal.SIGPROF, SECONDS), (signal.ITIMER_REAL, signal.SIGALRM, WAITING))
    previous = [(number, signal.signal(number, stop)) for _, number, _ in timers]
    for timer, _, seconds in timers:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for timer, _, _ in timers:
            signal.setitimer(timer, 0)
        for number, handler in previous:
            signal.signal(number, handler)


@contextmanager
def sandbox() -> Iterator[None]:
    """An absurd allocation fails, instead of taking the machine down; and nothing waits for the disk."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + EXTRA_MEMORY, before[1]))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", lambda descriptor: None)
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def attempt(source: Path, target: Path | None = None, **options: Any) -> Outcome:
    """Convert a source; returns the error, or None where it gave a draft that can be read."""
    with tempfile.TemporaryDirectory() as parent:
        out = Path(parent, "out")
        refused = _refusal(convert_checkpoint, source, out, target=target, **options)
        assert os.listdir(parent) == ([] if refused else ["out"])
        if refused is None:
            assert inspect(out) is None
            for handle in open_checkpoint(out).values():
                handle.load()
    return refused


def inspect(source: Path, target: Path | None = None) -> Outcome:
    """Inspect a source; returns the error, or None where it was recognised."""
    return _refusal(inspect_checkpoint, source, target=target)


def _refusal(verb: Callable[..., object], source: Path, *out: Path, target: Path | None, **options: Any) -> Outcome:
    with time_limit():
        try:
            verb(str(source), *out, target=target and str(target), **options)
        except DraftkitError as error:
            refused = error
        else:
            return None
    assert len(str(refused)) <= LONGEST_MESSAGE
    return refused
