"""Where states lie: in a folder of a disk, or beneath an address in a store. Any number of processes fill it together.

Both have the same files, so that one may be copied to the other. On a disk processes share the shards by lock files. A
store has no locks: each process has a part of the shards that it was given.
"""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path, PurePath
from typing import Protocol

from torch import Tensor

from draftkit.errors import SourceError
from draftkit.io.atomic import atomic_file, is_empty, settle_leftovers, temporary_folder, write_file
from draftkit.io.cache import local_file
from draftkit.io.digest import file_sha256
from draftkit.io.dtypes import dtype_name
from draftkit.io.handles import TensorToWrite, raw_memory
from draftkit.io.jsonfile import object_in, read_object
from draftkit.io.lock import many_writers, piece_lock, settle_piece_locks
from draftkit.io.safetensors_file import write_safetensors
from draftkit.io.store import Store, is_address

MANIFESTS = "manifest*.json"  # that of all processes together, and those of parts


class StatesFolder(Protocol):
    """The files of a folder, by name."""

    @property
    def place(self) -> Path | str:
        """Where it is, as messages call it."""

    def size(self, name: str) -> int | None:
        """The bytes of a file; None where it is not there."""

    def manifests(self) -> list[str]:
        """The names of the manifests that are there, in order."""

    def local(self, name: str) -> Path:
        """A file of this machine with what a file holds, which is there."""

    def read_object(self, name: str) -> dict[str, object]:
        """The JSON object of a file. Raises `SourceError` where it is not there."""

    def write(self, name: str, content: bytes) -> None:
        """Put a file in the place of what is there, whole."""

    def write_tensors(self, name: str, tensors: dict[str, Tensor]) -> tuple[int, str]:
        """Put a safetensors file there, whole; its size and digest."""

    def remove(self, name: str) -> None:
        """Take a file away; it may be gone."""

    def settle_leftovers(self) -> None:
        """Put back or remove what killed processes had begun."""

    def is_vacant(self) -> bool:
        """Whether nothing is there but what processes have left that are gone."""

    def shared(self) -> AbstractContextManager[None]:
        """While the body runs, this process and others may fill the folder."""

    def lock(self, name: str, *, waits: bool = False) -> AbstractContextManager[bool]:
        """As `draftkit.io.lock.piece_lock`; in a store always True."""

    def settle_locks(self) -> None:
        """As `draftkit.io.lock.settle_piece_locks`."""

    def free_bytes(self) -> int | None:
        """The room that is left; None where nobody knows."""


def folder_at(place: Path | str | StatesFolder) -> StatesFolder:
    """The folder at a path or an address. Raises `DraftkitError` as `Store`."""
    if not isinstance(place, Path | str):
        return place
    return StoredFolder(str(place)) if is_address(place) else DiskFolder(Path(place))


class DiskFolder:
    """A folder of a disk."""

    def __init__(self, place: Path):
        self.place = place

    def size(self, name: str) -> int | None:
        path = self.place / name
        return path.stat().st_size if path.is_file() else None

    def manifests(self) -> list[str]:
        return sorted(path.name for path in self.place.glob(MANIFESTS))

    def local(self, name: str) -> Path:
        return self.place / name

    def read_object(self, name: str) -> dict[str, object]:
        return read_object(self.place / name)

    def write(self, name: str, content: bytes) -> None:
        write_file(self.place / name, content)

    def write_tensors(self, name: str, tensors: dict[str, Tensor]) -> tuple[int, str]:
        path = self.place / name
        write_tensors(path, tensors)
        return path.stat().st_size, file_sha256(path)

    def remove(self, name: str) -> None:
        (self.place / name).unlink(missing_ok=True)

    def settle_leftovers(self) -> None:
        settle_leftovers(self.place / "manifest.json")

    def is_vacant(self) -> bool:
        return not self.place.exists() or (self.place.is_dir() and is_empty(self.place))

    def shared(self) -> AbstractContextManager[None]:
        return many_writers(self.place)

    def lock(self, name: str, *, waits: bool = False) -> AbstractContextManager[bool]:
        return piece_lock(self.place, name, waits=waits)

    def settle_locks(self) -> None:
        settle_piece_locks(self.place)

    def free_bytes(self) -> int | None:
        parents = (self.place.absolute(), *self.place.absolute().parents)
        return shutil.disk_usage(next(path for path in parents if path.exists())).free


class StoredFolder:
    """Objects beneath an address."""

    def __init__(self, place: str):
        self.place = place
        self.store = Store(place)

    def size(self, name: str) -> int | None:
        return self.store.size(name)

    def manifests(self) -> list[str]:
        return [name for name in self.store.names() if PurePath(name).match(MANIFESTS)]

    def local(self, name: str) -> Path:
        return local_file(f"{self.place}/{name}")

    def read_object(self, name: str) -> dict[str, object]:
        content = self.store.read(name)
        if content is None:
            raise SourceError(f"{name} is missing", where=self.place, expected="what draftkit data states has written")
        return object_in(content, f"{self.place}/{name}")

    def write(self, name: str, content: bytes) -> None:
        self.store.write(name, content)

    def write_tensors(self, name: str, tensors: dict[str, Tensor]) -> tuple[int, str]:
        with temporary_folder() as scratch:
            path = scratch / name
            write_tensors(path, tensors)
            self.store.upload(path, name)
            return path.stat().st_size, file_sha256(path)

    def remove(self, name: str) -> None:
        self.store.remove(name)

    def settle_leftovers(self) -> None:
        pass  # nothing is begun in a store that is not whole

    def is_vacant(self) -> bool:
        return not self.store.names()

    def shared(self) -> AbstractContextManager[None]:
        return nullcontext()

    def lock(self, name: str, *, waits: bool = False) -> AbstractContextManager[bool]:
        return nullcontext(True)

    def settle_locks(self) -> None:
        pass  # there are none

    def free_bytes(self) -> int | None:
        return None


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """A safetensors file, which appears complete or not at all. Raises `DraftkitError` when the disk is full."""
    entries = [
        TensorToWrite(name, dtype_name(tensor.dtype), tuple(tensor.shape), [raw_memory(tensor)])
        for name, tensor in tensors.items()
    ]
    with atomic_file(path, force=True) as file:
        write_safetensors(Path(file.name), entries)  # opens the same file, empty so far, once more
