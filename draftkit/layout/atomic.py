"""A folder that appears complete or not at all.

What is written goes to a hidden sibling, `.NAME.tmp-PID@HOST-RANDOM`, which is renamed at the end. The name says who
owns it, so that a later run can tell the remains of a killed one from the work of one that is still running.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from draftkit.errors import DraftkitError

HOST = platform.node() or "localhost"

# The failures of a disk or its permissions. Any other OSError from the body may be a network's, or a bug.
DISK_FAILURES = {
    errno.EACCES,
    errno.EBUSY,
    errno.EDQUOT,
    errno.EEXIST,
    errno.EIO,
    errno.ENAMETOOLONG,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
    errno.EXDEV,
}


@contextmanager
def atomic_folder(out: Path, force: bool = False) -> Iterator[Path]:
    """Yield an empty folder that becomes `out` when the body ends, and is removed when it raises.

    `force` lets it replace what is there, which stays untouched until the new folder is complete and on disk.
    Raises `DraftkitError` when `out` exists and is not empty, when it cannot be replaced (a mount point, the current
    folder or a parent of it), and when the disk is full or forbids writing.
    """
    out = Path(os.path.realpath(out))  # the sibling must lie in the file system of the folder itself
    try:
        with _replacement(out, force) as temporary:
            yield temporary
    except OSError as error:
        if error.errno not in DISK_FAILURES:
            raise
        raise DraftkitError(f"writing {out.name} failed: {error.strerror}", where=error.filename or out) from error


def write_file(path: Path, data: bytes) -> None:
    """Put a whole file on disk in the place of what is there. Raises `DraftkitError` where it cannot be written."""
    temporary = sibling(path, "tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
    except OSError as error:
        raise DraftkitError(f"the file cannot be written: {error.strerror}", where=path) from error
    finally:
        temporary.unlink(missing_ok=True)


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


@contextmanager
def _replacement(out: Path, force: bool) -> Iterator[Path]:
    settle_leftovers(out)
    _check_replaceable(out, force)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = sibling(out, "tmp")
    try:
        temporary.mkdir()
        yield temporary
        _sync_tree(temporary)
        _check_replaceable(out, force)  # again: the body may have taken hours
        _swap(temporary, out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync(out.parent)


def _check_replaceable(out: Path, force: bool) -> None:
    if not out.exists():
        return
    if out.is_mount() or Path.cwd().is_relative_to(out):
        raise DraftkitError(
            "a mount point and the current folder cannot be replaced", where=out, hint=f"write to {out / 'draft'}"
        )
    if not force and not (out.is_dir() and not any(out.iterdir())):
        raise DraftkitError(
            "the output is already there", where=out, hint="choose another folder, or replace it with --force"
        )


def sibling(out: Path, role: str) -> Path:
    return out.with_name(f".{out.name}.{role}-{os.getpid()}@{HOST}-{secrets.token_hex(4)}")


def _swap(temporary: Path, out: Path) -> None:
    """Put `temporary` in the place of `out`, or leave `out` as it was."""
    aside = sibling(out, "old")
    try:
        if out.exists():
            out.rename(aside)
        temporary.rename(out)
    except BaseException:
        if aside.exists() and not out.exists():
            aside.rename(out)
        raise
    _discard(aside, out)


def settle_leftovers(out: Path) -> None:
    """Tidy up after killed runs: put back what they had moved aside, remove what they had begun."""
    for path in list(out.parent.iterdir()) if out.parent.is_dir() else []:
        role = _leftover_role(path, out)
        if role == "old" and not out.exists():
            path.rename(out)
        elif role == "old":
            _discard(path, out)
        elif role == "tmp":
            _remove(path)


def _discard(aside: Path, out: Path) -> None:
    """Remove what was moved aside, once its name no longer says that it may be put back: half of it must not be."""
    if aside.exists():
        _remove(aside.rename(sibling(out, "tmp")))


def _leftover_role(path: Path, out: Path) -> str | None:
    """`"tmp"` or `"old"` for a sibling of `out` whose owner is gone, None for any other path."""
    match = re.fullmatch(rf"\.{re.escape(out.name)}\.(tmp|old)-(\d{{1,9}})@(.+)-[0-9a-f]+", path.name)
    if match is None:
        return None
    role, pid, host = match.groups()
    return None if host != HOST or _is_alive(int(pid)) else role  # another host's processes cannot be seen


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _remove(path: Path) -> None:
    """Remove a file or folder as far as possible; what stays is tried again at the next run."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


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
