"""Objects at addresses such as `s3://bucket/name`, in whatever store fsspec reaches.

An object is there whole or not at all, and is never renamed. `hf://` is no address here: the Hub has its own client.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any
from uuid import uuid4

from draftkit.errors import DraftkitError, SourceError
from draftkit.io.atomic import temporary_folder

PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
TRIED = ".try-"  # what objects are called that are made to see what a store does
WRITER = ".writer"  # the object that says that a store without conditional puts has its one writer


def is_address(place: str | PurePath) -> bool:
    """Whether a place is in a store, and no path of this machine."""
    scheme, found, _ = str(place).partition("://")
    return bool(found) and scheme.isalnum() and scheme != "hf"


class Store:
    """The objects beneath an address, by names relative to it; the empty name is that of the address itself.

    Raises `DraftkitError` for an address of no known kind, or one whose package is not installed, and `SourceError`
    where the store cannot be reached or refuses what is asked of it.
    """

    def __init__(self, address: str):
        self.address = address.rstrip("/")
        with self._asked("cannot be opened"):
            self._files, self._root = _opened(address)
            self._root = self._root.rstrip("/")

    def __str__(self) -> str:
        return self.address

    def names(self) -> list[str]:
        """The names of all objects beneath, in order."""
        with self._asked("cannot be listed"):
            try:
                found = self._files.find(self._root)
            except FileNotFoundError:
                return []
        return sorted(str(path)[len(self._root) :].strip("/") for path in found)

    def read(self, name: str = "") -> bytes | None:
        """An object's bytes; None where it is not there."""
        with self._asked("cannot be read", name):
            try:
                found: bytes = self._files.cat_file(self._at(name))
            except FileNotFoundError:
                return None
        return found

    def write(self, name: str, content: bytes) -> None:
        """Put an object in the place of what is there."""
        with self._asked("cannot be written", name):
            self._files.pipe_file(self._at(name), content)

    def create(self, name: str, content: bytes) -> bool:
        """Put an object where there is none; False where there is one. See `creates_once`."""
        with self._asked("cannot be written", name):
            try:
                self._files.pipe_file(self._at(name), content, mode="create")
            except FileExistsError:
                return False
        return True

    def remove(self, name: str) -> None:
        """Take an object away; it may be gone."""
        with self._asked("cannot be removed", name):
            try:
                self._files.rm_file(self._at(name))
            except FileNotFoundError:
                return

    def size(self, name: str = "") -> int | None:
        """The bytes of an object; None where it is not there."""
        with self._asked("cannot be read", name):
            try:
                found = self._files.info(self._at(name))
            except FileNotFoundError:
                return None
        return int(found["size"]) if found["type"] == "file" else None

    def version(self, name: str = "") -> str:
        """What is another once an object is replaced, as far as the store tells."""
        with self._asked("cannot be read", name):
            return str(self._files.info(self._at(name)))  # fsspec's own `ukey` takes what http serves for unchanging

    def upload(self, file: Path, name: str = "") -> None:
        """Put a file of this machine in the place of an object."""
        with self._asked("cannot be written", name):
            self._files.put_file(str(file), self._at(name))

    def download(self, file: Path, name: str = "") -> None:
        """Write an object to a file of this machine."""
        with self._asked("cannot be read", name):
            self._files.get_file(self._at(name), str(file))

    @cached_property
    def creates_once(self) -> bool:
        """Whether of several that create an object at once one does (a conditional put), which is tried.

        What fsspec does itself for stores that have none looks first and writes then.
        """
        from fsspec import AbstractFileSystem

        if getattr(self._files.pipe_file, "__func__", None) is AbstractFileSystem.pipe_file:
            return False
        name = f"{TRIED}{uuid4().hex}"
        once, twice = self.create(name, b"1"), self.create(name, b"2")
        self.remove(name)
        return once and not twice

    @property
    def why_not_many(self) -> str | None:
        """Why one process alone may write beneath the address; None where many may."""
        if self.creates_once:
            return None
        return "the store does not create an object on condition that it is not there, so that one process writes"

    @contextmanager
    def shared(self) -> Iterator[None]:
        """In the body this process writes beneath the address, beside others where many may.

        Raises `DraftkitError` where one alone may, and another does or was killed.
        """
        if self.why_not_many is None:
            yield
            return
        mine = uuid4().hex.encode()
        if self.size(WRITER) is not None or not self.create(WRITER, mine) or self.read(WRITER) != mine:
            raise DraftkitError(
                f"another process writes there, or was killed: {self.why_not_many}",
                where=f"{self.address}/{WRITER}",
                hint="wait until it has ended; where none is at work, remove that object",
            )
        try:
            yield
        finally:
            self.remove(WRITER)

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    @contextmanager
    def _asked(self, what: str, name: str = "") -> Iterator[None]:
        where = f"{self.address}/{name}" if name else self.address
        try:
            yield
        except (DraftkitError, MemoryError):
            raise
        except Exception as error:  # stores and networks raise many types
            said = str(error).partition("\n")[0] or type(error).__name__
            what = f"{PurePath(where).name} {what}: {said}"
            raise SourceError(what, where=where, hint=_hint(where, error)) from error


def is_passing(name: str) -> bool:
    """Whether an object is there while others are written, and is no content."""
    return name == WRITER or name.startswith(TRIED)


def is_there(place: str | Path) -> bool:
    """Whether anything is at a path, or at an address or beneath it."""
    return bool(Store(str(place)).names()) if is_address(place) else Path(place).exists()


@contextmanager
def written(place: str | Path, *, force: bool = False) -> Iterator[Path]:
    """A file of this machine to write: the place itself, or what is put there when the body ends.

    Raises `DraftkitError` where an object is there already and `force` is not given.
    """
    if not is_address(place):
        yield Path(place)
        return
    store = Store(str(place))
    if not force and is_there(place):
        raise DraftkitError(
            "the output is already there", where=place, hint="choose another address, or replace it with --force"
        )
    with temporary_folder() as scratch:
        path = scratch / PurePath(store.address).name
        yield path
        store.upload(path)


def _opened(address: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    files, root = url_to_fs(address, use_listings_cache=False)
    return files, str(root)


def _hint(where: str, error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space"
    package = PACKAGES.get(where.partition("://")[0])
    if isinstance(error, ModuleNotFoundError) and str(error.name).startswith("fsspec"):
        return f"pip install {package or 'fsspec'}"
    if isinstance(error, ImportError):
        return f"pip install {package}" if package else "install the package that fsspec names"
    return "look at the address, the network, and the credentials as the store's own tools read them"
