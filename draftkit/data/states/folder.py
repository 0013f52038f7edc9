"""Where states lie: in a folder of a disk, or beneath an address in a store. Any number of processes fill it together.

Both have the same files, so that one may be copied to the other. On a disk files are renamed into their place and
claims are locks; objects are put whole, and claims are objects that are put on condition (`draftkit.io.leases`).
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Protocol

from torch import Tensor

from draftkit.errors import SourceError
from draftkit.io.atomic import CLAIMS, atomic_file, is_empty, settle_leftovers, temporary_folder, write_file
from draftkit.io.claims import claimed, one_at_a_time, settle_claims
from draftkit.io.digest import file_sha256
from draftkit.io.dtypes import dtype_name
from draftkit.io.handles import TensorToWrite, raw_memory
from draftkit.io.jsonfile import object_in, read_object
from draftkit.io.leases import Leases
from draftkit.io.lock import many_writers
from draftkit.io.safetensors_file import write_safetensors
from draftkit.io.store import Store, is_address, is_passing

PAUSE = 0.2  # seconds between two attempts at a claim in a store


class StatesFolder(Protocol):
    """The files of a folder, by name."""

    @property
    def place(self) -> Path | str:
        """Where it is, as messages call it."""

    def size(self, name: str) -> int | None:
        """The bytes of a file; None where it is not there."""

    def sha256(self, name: str) -> str:
        """The digest of a file, which is read whole."""

    def read_object(self, name: str) -> dict[str, object]:
        """The JSON object of a file. Raises `SourceError` where it is not there."""

    def write(self, name: str, content: bytes) -> None:
        """Put a file in the place of what is there, whole."""

    def write_tensors(self, name: str, tensors: dict[str, Tensor]) -> tuple[int, str]:
        """Put a safetensors file there, whole; its size and digest."""

    def settle_leftovers(self) -> None:
        """Put back or remove what killed processes had begun."""

    def is_vacant(self) -> bool:
        """Whether nothing is there but what processes have left that are gone."""

    def shared(self) -> AbstractContextManager[None]:
        """While the body runs, this process may fill the folder, and others too where there is a way to share."""

    def claimed(self, name: str) -> AbstractContextManager[bool]:
        """As `draftkit.io.claims.claimed`."""

    def one_at_a_time(self, name: str) -> AbstractContextManager[None]:
        """As `draftkit.io.claims.one_at_a_time`."""

    def settle_claims(self) -> None:
        """As `draftkit.io.claims.settle_claims`."""

    def free_bytes(self) -> int | None:
        """The room that is left; None where nobody knows."""

    def why_not_many(self) -> str | None:
        """Why one process alone may fill the folder; None where many may."""


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

    def sha256(self, name: str) -> str:
        return file_sha256(self.place / name)

    def read_object(self, name: str) -> dict[str, object]:
        return read_object(self.place / name)

    def write(self, name: str, content: bytes) -> None:
        write_file(self.place / name, content)

    def write_tensors(self, name: str, tensors: dict[str, Tensor]) -> tuple[int, str]:
        path = self.place / name
        write_tensors(path, tensors)
        return path.stat().st_size, file_sha256(path)

    def settle_leftovers(self) -> None:
        settle_leftovers(self.place / "manifest.json")

    def is_vacant(self) -> bool:
        return not self.place.exists() or (self.place.is_dir() and is_empty(self.place))

    def shared(self) -> AbstractContextManager[None]:
        return many_writers(self.place)

    def claimed(self, name: str) -> AbstractContextManager[bool]:
        return claimed(self.place, name)

    def one_at_a_time(self, name: str) -> AbstractContextManager[None]:
        return one_at_a_time(self.place, name)

    def settle_claims(self) -> None:
        settle_claims(self.place)

    def free_bytes(self) -> int | None:
        parents = (self.place.absolute(), *self.place.absolute().parents)
        return shutil.disk_usage(next(path for path in parents if path.exists())).free

    def why_not_many(self) -> str | None:
        return None


class StoredFolder:
    """Objects beneath an address."""

    def __init__(self, place: str):
        self.place = place
        self.store = Store(place)

    @cached_property
    def _leases(self) -> Leases:
        return Leases(self.store.below(CLAIMS))

    def size(self, name: str) -> int | None:
        return self.store.size(name)

    def sha256(self, name: str) -> str:
        digest = hashlib.sha256()
        for chunk in self.store.chunks(name):
            digest.update(chunk)
        return digest.hexdigest()

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

    def settle_leftovers(self) -> None:
        pass  # nothing is begun in a store that is not whole

    def is_vacant(self) -> bool:
        return all(name.startswith(f"{CLAIMS}/") or is_passing(name) for name in self.store.names())

    @contextmanager
    def shared(self) -> Iterator[None]:
        with self.store.shared():
            yield

    @contextmanager
    def claimed(self, name: str, *, lasting: bool = False) -> Iterator[bool]:
        if self.why_not_many() is not None:
            yield True
            return
        with self._leases.claimed(name, lasting=lasting) as mine:
            yield mine

    @contextmanager
    def one_at_a_time(self, name: str) -> Iterator[None]:
        while True:
            with self.claimed(name, lasting=True) as mine:
                if mine:
                    yield
                    return
            time.sleep(PAUSE)

    def settle_claims(self) -> None:
        if self.why_not_many() is None:
            self._leases.settle()

    def free_bytes(self) -> int | None:
        return None

    def why_not_many(self) -> str | None:
        return self.store.why_not_many


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """A safetensors file, which appears complete or not at all. Raises `DraftkitError` when the disk is full."""
    entries = [
        TensorToWrite(name, dtype_name(tensor.dtype), tuple(tensor.shape), [raw_memory(tensor)])
        for name, tensor in tensors.items()
    ]
    with atomic_file(path, force=True) as file:
        write_safetensors(Path(file.name), entries)  # opens the same file, empty so far, once more
