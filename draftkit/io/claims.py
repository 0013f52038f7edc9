"""Many processes do the work of one folder: each piece is claimed by one of them, until it is done or the process ends.

A claim is a file in the folder `.claims`, which is made in one step and locked. The kernel lets go of the lock however
its process ends, also for other machines that share the volume: what a dead one has claimed can be claimed anew. On a
file system without locks the owner of a claim renews it instead (`draftkit.io.leases`).
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from draftkit.io.atomic import CLAIMS, NO_LOCKS, locked
from draftkit.io.leases import FilesOfFolder, Leases

PAUSE = 0.02  # seconds between two attempts


@contextmanager
def claimed(folder: Path, name: str, *, lasting: bool = False) -> Iterator[bool]:
    """Whether this process may do a piece of work while the body runs; False where another does it, or did just now.

    Whoever has claimed it looks first whether it is done, unless it is done again and again (`lasting`).
    """
    path = folder / CLAIMS / name
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock = locked(path)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        path.unlink(missing_ok=True)
        with _leases(path.parent).claimed(name, lasting=lasting) as mine:
            yield mine
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
        with claimed(folder, name, lasting=True) as mine:
            if mine:
                yield
                return
        time.sleep(PAUSE)


def settle_claims(folder: Path) -> None:
    """Remove what processes have left that are gone."""
    claims = folder / CLAIMS
    with suppress(OSError):
        for path in claims.iterdir():
            try:
                lock = locked(path)
            except OSError:
                _leases(claims).settle()
                break
            if lock is not None:
                path.unlink(missing_ok=True)
                os.close(lock)
        claims.rmdir()  # unless others are at work


@functools.cache
def _leases(claims: Path) -> Leases:
    return Leases(FilesOfFolder(claims))
