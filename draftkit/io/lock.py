"""Who writes an output: one process at a time, or any number that share their work by the lock files of its pieces.

An advisory lock says so, which goes with the process that holds it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from draftkit.errors import DraftkitError, command
from draftkit.io.atomic import LOCK_FILE, LOCKS, NO_LOCKS, disk_failures, locked

PAUSE, PATIENCE = 0.02, 0.5  # seconds between two attempts at a lock, and of all at one that is to be shared

_log = logging.getLogger(__name__)


@dataclass
class _Lock:
    """A lock file that this process holds, `holders` times; `descriptor` None on a file system without locks.

    `made`: folders that had to be made for it, the innermost first. `shared`: with other processes.
    """

    path: Path
    descriptor: int | None
    made: tuple[Path, ...]
    shared: bool = False
    holders: int = 0

    def release(self) -> None:
        with suppress(OSError):  # a disk that has failed would hide how the work ended
            if self.shared and self.descriptor is not None:
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while others hold it
            self.path.unlink(missing_ok=True)  # before the lock goes, or another process's file could be meant
        if self.descriptor is not None:
            os.close(self.descriptor)
        for folder in self.made:
            with suppress(OSError):  # something is in it now
                folder.rmdir()


_held: dict[tuple[int, Path], _Lock] = {}  # by process, as a fork has a copy of this


@contextmanager
def sole_writer(out: Path, *, folder: bool = False) -> Iterator[None]:
    """While the body runs, no other process enters this with the same `out`; the same process may, again and again.

    The lock is the file `.NAME.lock` beside `out`, or `.draftkit.lock` in it where it is a `folder`, and says who holds
    it. The kernel lets go of it however the process ends, also for other machines that share the volume; what a killed
    process has left of it is taken over. A file system without locks is warned of, as nothing tells there whether the
    other process lives. Raises `DraftkitError` that names the process that is at work, and where `out` cannot be
    written.
    """
    out = Path(os.path.realpath(out))
    with _written(out, out / LOCK_FILE if folder else out.with_name(f".{out.name}.lock"), shared=False):
        yield


@contextmanager
def many_writers(out: Path) -> Iterator[None]:
    """The same for a folder that any number of processes fill together: only a `sole_writer` is kept out."""
    out = Path(os.path.realpath(out))
    with _written(out, out / LOCK_FILE, shared=True):
        yield


@contextmanager
def piece_lock(folder: Path, name: str, *, waits: bool = False) -> Iterator[bool]:
    """Whether this process alone may do a piece of the work of a folder while the body runs; False where another does.

    With `waits` it is waited for. Whoever has the lock looks first whether the piece is done. The kernel lets go of it
    however the process ends. A file system without locks lets every process do everything.
    """
    path, lock, mine = folder / LOCKS / name, None, False
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock = locked(path)
            mine = lock is not None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            path.unlink(missing_ok=True)
            mine = True
        if mine or not waits:
            break
        time.sleep(PAUSE)
    try:
        yield mine
    finally:
        if lock is not None:
            with suppress(OSError):
                path.unlink(missing_ok=True)  # before the lock goes, or another process's file could be meant
            os.close(lock)


def settle_piece_locks(folder: Path) -> None:
    """Remove the lock files that processes have left that are gone."""
    with suppress(OSError):
        for path in (folder / LOCKS).iterdir():
            if (lock := locked(path)) is not None:
                path.unlink(missing_ok=True)
                os.close(lock)
    with suppress(OSError):
        (folder / LOCKS).rmdir()  # unless others are at work


@contextmanager
def _written(out: Path, path: Path, *, shared: bool) -> Iterator[None]:
    key = os.getpid(), path
    with disk_failures(f"{out.name} cannot be written", out):
        lock = _held.get(key) or _take(path, out, shared)
    _held[key] = lock
    lock.holders += 1
    try:
        yield
    finally:
        lock.holders -= 1
        if not lock.holders:
            del _held[key]
            lock.release()


def _take(path: Path, out: Path, shared: bool) -> _Lock:
    made = tuple(parent for parent in path.parents if not parent.exists())
    until = time.monotonic() + PATIENCE
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock = _Lock(path, locked(path, shared=shared), made, shared)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            _log.warning("%s: its file system has no locks: another process that writes it is not noticed", out)
            return _Lock(path, None, made)
        if lock.descriptor is not None:
            break
        if shared and time.monotonic() < until:  # one that shared it may be just looking whether it was the last
            time.sleep(PAUSE)
        elif path.exists():
            raise DraftkitError(
                f"another process is writing {out.name}: {_holder(path)}",
                where=out,
                hint="wait until it has ended, or choose another output",
            )
    try:
        path.write_bytes(_this_process())
    except OSError:
        lock.release()
        raise
    return lock


def _this_process() -> bytes:
    since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    said = {"pid": os.getpid(), "host": socket.gethostname(), "since": since, "command": command(*sys.argv)}
    return json.dumps(said).encode()


def _holder(path: Path) -> str:
    """The process that holds a lock, in words, as it has written it into the lock's file."""
    try:
        said = json.loads(path.read_bytes())
        return f"process {said['pid']} on {said['host']}, since {said['since']}: {said['command']}"
    except (OSError, ValueError, LookupError, TypeError):
        return "it has just begun, and has not said yet which it is"
