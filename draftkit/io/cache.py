"""Copies of objects of stores on a disk of this machine, in `DRAFTKIT_CACHE`. They stay there."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path, PurePath

from draftkit.errors import DraftkitError, SourceError
from draftkit.io.atomic import atomic_file
from draftkit.io.kept import kept_folder
from draftkit.io.lock import piece_lock
from draftkit.io.store import Store, is_address

FOLDER = "DRAFTKIT_CACHE"  # the environment variable
COPIES = "copies"  # a folder of their own there

_addresses: dict[Path, str] = {}  # of the copies that this process has asked for


def local_file(place: str | Path) -> Path:
    """A file of this machine with what is at a place: the file itself, or a copy of an object, which one of the
    processes that want it fetches. An object that was replaced has another copy.

    Raises `SourceError` where there is none, and as `Store`; `DraftkitError` where the disk is full.
    """
    if not is_address(place):
        return Path(place)
    store = Store(str(place))
    size, name = store.size(), PurePath(store.address).name
    if size is None:
        raise SourceError(f"{name} is missing", where=place, expected="the address of a file")
    key = hashlib.sha256(f"{store.address}\0{store.version()}".encode()).hexdigest()[:32]
    path = copies_folder() / key / name
    if not path.exists():
        with piece_lock(copies_folder(), key, waits=True):
            if not path.exists():
                _fetch(store, path, size)
    _addresses[path] = str(place)
    return path


def _fetch(store: Store, path: Path, size: int) -> None:
    with atomic_file(path, force=True) as file:
        store.download(Path(file.name))
        if (found := Path(file.name).stat().st_size) != size:
            raise DraftkitError(f"{path.name} was fetched with {found:,} bytes", where=store, expected=f"{size:,}")


def copies_folder() -> Path:
    """The folder of all copies."""
    named = os.environ.get(FOLDER)
    return Path(named).expanduser() / COPIES if named else kept_folder(COPIES)


def named(path: Path) -> str:
    """What the user calls a `local_file`: the address that it is a copy of, or its path."""
    return _addresses.get(path, str(path))
