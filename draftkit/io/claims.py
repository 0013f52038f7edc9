"""Many processes do the work of one folder: each piece is claimed by one of them, until it is done or the process ends.

A claim is a file in the folder `.claims`, which is made in one step and locked. The kernel lets go of the lock however
its process ends, also for other machines that share the volume: what a dead one has claimed can be claimed anew.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from draftkit.io.atomic import CLAIMS, NO_LOCKS, locked

PAUSE = 0.02  # seconds between two attempts


@contextmanager
def claimed(folder: Path, name: str) -> Iterator[bool]:
    """Whether this process may do a piece of work while the body runs; False where another does it, or did just now.

    Whoever has claimed it looks first whether it is done. On a file system without locks it may always: `many_writers`
    sees to it that there is one process.
    """
    path = folder / CLAIMS / name
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock = locked(path)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        yield True
        path.unlink(missing_ok=True)
        return
    if lock is None:
        yield False
        return
    try:
        yield True
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)  # before the lock goes, or another process's file could be meant
        os.close(lock)


@contextmanager
def one_at_a_time(folder: Path, name: str) -> Iterator[None]:
    """Wait until no other process is in here with the same folder and name."""
    while True:
        with claimed(folder, name) as mine:
            if mine:
                yield
                return
        time.sleep(PAUSE)


def settle_claims(folder: Path) -> None:
    """Remove what processes have left that are gone."""
    with suppress(OSError):
        for path in (folder / CLAIMS).iterdir():
            with claimed(folder, path.name):
                pass
        (folder / CLAIMS).rmdir()  # unless others are at work
