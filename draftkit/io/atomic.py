"""Folders and files that appear complete or not at all, and temporary folders that outlive no run.

What is written lies in a hidden sibling, the scratch folder `.NAME.tmp-RANDOM`, as `new`, and is renamed at the end; a
folder that it replaces takes its place there in the same step, or where the system cannot exchange two folders, waits
beside it as `old` between two steps. The owner of a scratch folder holds a lock on the file `lock` in it, which the
kernel releases however the owner ends. So a later run can tell the remains of a killed one from the work of one that is
still running, also in another container that shares the volume.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from draftkit.errors import DraftkitError, command

# The failures of a disk or its permissions. Any other OSError from the body may be a network's, or a bug.
DISK_FAILURES = {
    errno.EACCES,
    errno.EBUSY,
    errno.EDQUOT,
    errno.EEXIST,
    errno.EFBIG,
    errno.EIO,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.ENOTEMPTY,
    errno.EPERM,
    errno.EROFS,
    errno.EXDEV,
}
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}  # what file systems answer that have none
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of Linux' fcntl.h
LOCK_FILE = ".draftkit.lock"  # in a folder that is being filled; see `draftkit.io.lock`
LOCKS = ".locks"  # in a folder that several processes fill; see `draftkit.io.lock`
SCRATCH = r"\.{name}\.(tmp|gone)-[0-9a-f]+"  # what scratch folders of an output are called

_log = logging.getLogger(__name__)


@contextmanager
def atomic_folder(out: Path, replaces: Callable[[Path], bool] | None = None) -> Iterator[Path]:
    """Yield an empty folder that becomes `out` when the body ends, and is removed when it raises.

    An empty `out` is replaced, and one of which `replaces` is true, which stays untouched until the new folder is
    complete and on disk. Raises `DraftkitError` when anything else is there, when it cannot be replaced (a mount point,
    the current folder or a parent of it), and when the disk is full or forbids writing.
    """
    out = Path(os.path.realpath(out))  # the sibling must lie in the file system of the folder itself
    with disk_failures(f"writing {out.name} failed", out):
        _check_replaceable(out, replaces)
        with scratch_folder(out) as scratch:
            _check_replaceable(out, replaces)  # again: a killed run's may have been put back
            new = scratch / "new"
            new.mkdir()
            yield new
            _sync_tree(new)
            _check_replaceable(out, replaces)  # again: the body may have taken hours
            _swap(scratch, out)
        _sync(out.parent)


@contextmanager
def atomic_file(path: Path, force: bool = False) -> Iterator[BinaryIO]:
    """A file to write that becomes `path` when the body ends, and is removed when it raises.

    Raises `DraftkitError` when `path` exists and `force` is not given, when it is a folder, and when the disk is full
    or forbids writing.
    """
    if path.is_dir():
        raise DraftkitError("the output is a folder", where=path, expected="the name of a file")
    if path.exists() and not force:
        raise DraftkitError(
            "the output is already there", where=path, hint="choose another file, or replace it with --force"
        )
    with disk_failures(f"writing {path.name} failed", path), scratch_folder(path) as scratch:
        new = scratch / "new"
        with new.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        _sync(path.parent)


def write_file(path: Path, data: bytes) -> None:
    """Put a whole file on disk in the place of what is there. Raises `DraftkitError` where it cannot be written."""
    with atomic_file(path, force=True) as file:
        file.write(data)


def check_writable(path: Path) -> None:
    """Raise `DraftkitError` where the disk forbids that `path`, a file or folder, be written; leaves nothing."""
    parent = next(parent for parent in Path(os.path.abspath(path)).parents if os.path.lexists(parent))
    with scratch_folder(parent / path.name, asked=path):
        pass


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder in the system's place for temporary files, removed at the end, or by the next run if this is killed.

    Raises `DraftkitError` when the disk is full or forbids writing.
    """
    with scratch_folder(Path(tempfile.gettempdir()) / "draftkit") as scratch:
        yield scratch


@contextmanager
def scratch_folder(out: Path, asked: Path | None = None) -> Iterator[Path]:
    """A hidden sibling of `out` that no other run removes before the body ends; then it goes.

    What killed runs had begun for `out` is tidied up first. Raises `DraftkitError` when the disk is full or forbids
    writing; it names `asked`, the path that the user gave where that is not `out`.
    """
    with disk_failures(f"{out.name} cannot be written", asked or out):
        settle_leftovers(out)
        out.parent.mkdir(parents=True, exist_ok=True)
        scratch, lock = _begin(out)
    try:
        yield scratch
    finally:
        with suppress(OSError):  # a disk that has failed would hide how the body ended
            _discard(scratch, out)
        if lock is not None:
            os.close(lock)


def settle_leftovers(out: Path) -> None:
    """Tidy up after killed runs: put back what they had moved aside, which is said, remove what they had begun."""
    for path, role in _leftovers(out):
        with suppress(OSError):  # another user's, or another run is at it too: what stays is tried the next time
            _settle(path, role, out)


def restore(out: Path) -> None:
    """Put back what a killed run had moved aside, where nothing is at `out`; to be called before it is read.

    Raises `DraftkitError` that says where it lies when it cannot be put back.
    """
    out = Path(os.path.abspath(out))
    if os.path.lexists(out):
        return
    with suppress(OSError):  # a parent that is missing, or may not be read
        settle_leftovers(out)
        for path, _ in _leftovers(out):
            if not out.exists() and (old := path / "old").exists():
                raise DraftkitError(
                    f"{out.name} was moved aside by a run that was killed, and cannot be put back",
                    where=old,
                    hint=f"move it yourself: {command('mv', old, out)}",
                )


def _leftovers(out: Path) -> list[tuple[Path, str]]:
    """The scratch folders of an output, each with its role: `tmp`, or `gone` where it is being removed."""
    pattern = re.compile(SCRATCH.format(name=re.escape(out.name)))
    paths = list(out.parent.iterdir()) if out.parent.is_dir() else []
    return [(path, match[1]) for path in paths if (match := pattern.fullmatch(path.name))]


def is_empty(folder: Path) -> bool:
    """Whether a folder is not there, or holds nothing but the lock and the scratch folders of runs, killed ones too."""
    return not folder.exists() or all(is_passing(path.name) for path in folder.iterdir())


def is_passing(name: str) -> bool:
    """Whether something in a folder is a lock or a scratch folder of a run, and no part of what is written there."""
    return name in (LOCK_FILE, LOCKS) or re.fullmatch(SCRATCH.format(name=".+"), name) is not None


@contextmanager
def disk_failures(what: str, where: Path) -> Iterator[None]:
    """Make a `DraftkitError` of what a disk or its permissions refuse to the body."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FAILURES:
            raise
        raise DraftkitError(f"{what}: {error.strerror}", where=_place(error, where)) from error


def start_write_back(file: BinaryIO, begin: int) -> int:
    """Have the system start putting a file on disk, from byte `begin` on; returns where the file ends so far.

    What reaches the disk while more is being written need not be waited for at the end. Only a hint: nothing is
    promised to be on disk.
    """
    file.flush()
    end = file.tell()
    if hasattr(os, "posix_fadvise"):  # Linux writes what it is told to forget, and keeps it until it is written
        os.posix_fadvise(file.fileno(), begin, end - begin, os.POSIX_FADV_DONTNEED)
    return end


def _place(error: OSError, where: Path) -> object:
    """The file that the error names, but for those in a scratch folder, which are of no use to anyone."""
    name = error.filename
    return where if not isinstance(name, str | Path) or ".tmp-" in str(name) else name


def _holds_current_folder(folder: Path) -> bool:
    try:
        return Path.cwd().is_relative_to(folder)
    except FileNotFoundError:  # the current folder was deleted
        return False


def _check_replaceable(out: Path, replaces: Callable[[Path], bool] | None) -> None:
    try:
        if not stat.S_ISDIR(out.stat().st_mode):
            raise DraftkitError("the output is a file", where=out, hint="choose another folder")
        if os.path.ismount(out) or _holds_current_folder(out):
            raise DraftkitError(
                "a mount point and the current folder cannot be replaced", where=out, hint=f"write to {out / 'draft'}"
            )
        free, ours = not any(out.iterdir()), replaces is not None and replaces(out)
    except FileNotFoundError:  # or another run has just moved it aside
        return
    if free:
        return
    if replaces is None:
        raise DraftkitError(
            "the output is already there",
            where=out,
            hint="choose another folder; --force replaces what draftkit has written",
        )
    if not ours:
        raise DraftkitError(
            "the output is already there, and holds what draftkit has not written",
            where=out,
            hint="choose another folder, or remove this one yourself",
        )


def _begin(out: Path) -> tuple[Path, int | None]:
    """A new scratch folder and its lock, held; None on a file system without locks."""
    while True:
        scratch = _sibling(out, "tmp")
        scratch.mkdir(mode=0o700)
        try:
            lock = locked(scratch / "lock")
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return scratch, None
        if lock is not None:
            return scratch, lock


def locked(path: Path, *, shared: bool = False) -> int | None:
    """The lock on a file, which is made, held until it is closed; None when another process holds it, or removes it.

    A `shared` one is for any number of processes at a time, of which none holds the other kind.
    """
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), os.stat(path)):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(lock)
        raise
    os.close(lock)
    return None


def _settle(path: Path, role: str, out: Path) -> None:
    """Tidy up a scratch folder, unless its owner lives."""
    if role == "gone":
        shutil.rmtree(path, ignore_errors=True)
    elif (lock := locked(path / "lock")) is not None:
        try:
            old = path / "old"
            if old.exists() and (path / "new").exists() and not out.exists():  # the owner died between the renames
                old.rename(out)
                _log.warning("%s is put back: a run that was killed while it replaced it had left it in %s", out, old)
            _discard(path, out)
        finally:
            os.close(lock)


def _discard(scratch: Path, out: Path) -> None:
    """Remove a scratch folder whose lock is held, once its name says so: half of what is in it must not be put back.

    Nor can a run that has just made it take the lock any more, which lies elsewhere now.
    """
    shutil.rmtree(scratch.rename(_sibling(out, "gone")), ignore_errors=True)


def _sibling(out: Path, role: str) -> Path:
    return out.with_name(f".{out.name}.{role}-{secrets.token_hex(8)}")


def _swap(scratch: Path, out: Path) -> None:
    """Put what is new in the place of `out`, or leave `out` as it was."""
    new, old = scratch / "new", scratch / "old"
    if _exchanged(new, out):
        return
    try:
        with suppress(FileNotFoundError):
            out.rename(old)
        new.rename(out)
    except BaseException:
        if old.exists() and not out.exists():
            old.rename(out)
        raise


def _exchanged(one: Path, other: Path) -> bool:
    """Exchange what two names stand for, in one step; False where one is missing, or the system cannot."""
    import ctypes

    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)  # Linux' own; macOS and musl have none
    names = (os.fsencode(one), os.fsencode(other))
    return renameat2 is not None and renameat2(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    """Wait until a file's content or a folder's entries are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
