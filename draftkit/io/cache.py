"""Copies of remote objects on a disk of this machine, of a stated size together: `DRAFTKIT_CACHE_GB` in
`DRAFTKIT_CACHE`.

Each lies in a folder of its own, beside a lock that its readers share. Whatever has not been read for the longest time
goes first, but nothing that is being read. Any number of processes use one cache.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path, PurePath

from draftkit.errors import DraftkitError, SourceError
from draftkit.io.atomic import NO_LOCKS, disk_failures, locked
from draftkit.io.claims import one_at_a_time
from draftkit.io.kept import kept_folder
from draftkit.io.store import Store, is_address

FOLDER, GIGABYTES = "DRAFTKIT_CACHE", "DRAFTKIT_CACHE_GB"  # environment variables
COPIES = "copies"  # a folder of their own there, where nothing else is ever taken for one
DEFAULT_GIGABYTES = 50.0
PAUSE = 0.02  # seconds between two attempts at a lock
LOCK, PART = ".lock", ".part"
TOTAL = "total"  # the file that says how many bytes the copies have, or more than that where a fetch has failed
MANY = 1000  # copies, of which some more are removed at a time, as they have to be listed for it


class LocalCache:
    """The copies in `folder`, of `limit` bytes at most, those among them that are still being fetched."""

    def __init__(self, folder: Path, limit: int):
        self.folder = folder
        self.limit = limit

    def __str__(self) -> str:
        return f"{self.folder}, of {self.limit / 1e9:g} GB at most"

    @contextmanager
    def copy(self, key: str, name: str, size: int, fetch: Callable[[Path], None]) -> Iterator[Path]:
        """The file `name` of what `key` stands for, which has `size` bytes and stays while the body runs.

        `fetch` writes it where it is not there; of several processes that want it one fetches. Raises `DraftkitError`
        where it does not fit beside what is being read, and on a file system without locks.
        """
        path = self.folder / f"{key}.{size}" / name  # its size is counted by its name
        with disk_failures("the cache cannot be written", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = self._locked_copy(path, size, fetch)
        try:
            yield path
        finally:
            os.close(lock)

    def _locked_copy(self, path: Path, size: int, fetch: Callable[[Path], None]) -> int:
        """The lock, shared, on a copy that is there."""
        while True:
            lock = self._locked(path.parent, shared=True)
            if path.exists():
                os.utime(path.parent, ns=(time.time_ns(),) * 2)  # the system's own clock is coarse
                return lock
            os.close(lock)
            lock = self._locked(path.parent, shared=False)
            try:
                if not path.exists():
                    self._fetch(path, size, fetch)
            finally:
                os.close(lock)

    def _locked(self, entry: Path, *, shared: bool) -> int:
        """The lock on an entry, waited for."""
        while True:
            try:
                lock = locked(entry.with_name(entry.name + LOCK), shared=shared)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                raise DraftkitError(
                    "the cache's file system has no locks", where=self.folder, hint=f"name another place in {FOLDER}"
                ) from error
            if lock is not None:
                return lock
            time.sleep(PAUSE)

    def _fetch(self, path: Path, size: int, fetch: Callable[[Path], None]) -> None:
        part = path.with_name(path.name + PART)
        with one_at_a_time(self.folder, "room"):
            shutil.rmtree(path.parent, ignore_errors=True)  # what one has begun that was killed
            self._make_room(size)
            path.parent.mkdir()
        try:
            fetch(part)
            if (found := part.stat().st_size) != size:
                raise DraftkitError(f"{path.name} was fetched with {found:,} bytes", where=path, expected=f"{size:,}")
            part.rename(path)
        except BaseException:
            shutil.rmtree(path.parent, ignore_errors=True)
            raise

    def _make_room(self, size: int) -> None:
        """Have `size` bytes more fit, and count them."""
        held = self._counted()
        if held is None or held + size > self.limit:
            held = self._remove_oldest(size)
        (self.folder / TOTAL).write_text(str(held + size))

    def _counted(self) -> int | None:
        with suppress(OSError, ValueError):
            return int((self.folder / TOTAL).read_text())
        return None

    def _remove_oldest(self, size: int) -> int:
        """Remove what was read the longest time ago until `size` bytes more fit. Returns what is left."""
        names = (path for path in self.folder.iterdir() if path.suffix[1:].isdecimal())
        entries = {path: int(path.suffix[1:]) for path in names}
        total = sum(entries.values())
        wanted = self.limit - (self.limit // 20 if len(entries) > MANY else 0)
        for entry in sorted(entries, key=_last_read) if total + size > self.limit else ():
            if total + size <= wanted:
                break
            if (lock := locked(entry.with_name(entry.name + LOCK))) is not None:
                shutil.rmtree(entry, ignore_errors=True)
                entry.with_name(entry.name + LOCK).unlink(missing_ok=True)
                os.close(lock)
                total -= entries[entry]
        if total + size > self.limit:
            raise DraftkitError(
                f"{size / 1e9:,.3g} GB do not fit into the cache of {self.limit / 1e9:g} GB"
                + (f", of which {total / 1e9:,.3g} GB are in use" if total else ""),
                where=self.folder,
                hint=f"{GIGABYTES}=NUMBER lets it have more",
            )
        return total


def local_cache() -> LocalCache:
    """The cache that the environment names. Raises `DraftkitError` for a size that is no number above 0."""
    stated = os.environ.get(GIGABYTES)
    try:
        gigabytes = DEFAULT_GIGABYTES if stated is None else float(stated)
    except ValueError:
        gigabytes = 0.0
    if not 0 < gigabytes < 1e9:
        raise DraftkitError(f"{GIGABYTES} is {stated}", expected="a number of gigabytes above 0")
    named = os.environ.get(FOLDER)
    folder = kept_folder(COPIES) if not named else Path(named).expanduser() / COPIES
    return LocalCache(folder, int(gigabytes * 1e9))


def local_copy(address: str) -> AbstractContextManager[Path]:
    """A copy of an object, while the body runs. Raises `SourceError` where there is none, and as store and cache do."""
    store = Store(address)
    size = store.size()
    if size is None:
        raise SourceError(f"{PurePath(store.address).name} is missing", where=address, expected="the address of a file")
    key = hashlib.sha256(f"{store.address}\0{store.version()}".encode()).hexdigest()[:32]
    return local_cache().copy(key, PurePath(store.address).name, size, store.download)


_kept = ExitStack()
_addresses: dict[Path, str] = {}  # of the copies that are kept


def local_file(place: str | Path) -> Path:
    """A file of this machine with what is at a place: the file itself, or a copy, which stays until this process ends.

    Raises as `local_copy`.
    """
    if not is_address(place):
        return Path(place)
    with local_copy(str(place)) as path:
        if path not in _addresses:
            _kept.enter_context(local_copy(str(place)))
            _addresses[path] = str(place)
    return path


def named(path: Path) -> str:
    """What the user calls a `local_file`: the address that it is a copy of, or its path."""
    return _addresses.get(path, str(path))


def _last_read(entry: Path) -> float:
    with suppress(OSError):
        return entry.stat().st_mtime
    return 0.0
