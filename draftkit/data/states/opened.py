"""Shards of states that are read sample by sample, on a disk or in a store."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from draftkit.data.states import Encoding
from draftkit.data.states.encoding import BY_CHANNEL, DTYPES, LARGEST, Encoded, decode
from draftkit.data.states.folder import StatesFolder, StoredFolder
from draftkit.data.states.shards import AGAIN, Manifest, Shard
from draftkit.errors import SourceError
from draftkit.io.cache import local_cache
from draftkit.io.safetensors_file import LENGTH_BYTES
from draftkit.io.store import Store

Parts = dict[str, tuple[tuple[int, ...], torch.dtype, int]]  # shape, dtype, and where it begins in its first dimension


class OpenedShard(Protocol):
    """A shard that is there."""

    def sample(self, place: int, manifest: Manifest, dtype: torch.dtype) -> Tensor:
        """The states [T, S, H] of its sample number `place`, in `dtype`."""


class DiskShard:
    """A shard on a disk, opened each time: what an open one has read would stay in memory."""

    def __init__(self, path: Path):
        self._path = path
        with safe_open(path, "pt") as file:
            self._offsets: list[int] = file.get_tensor("offsets").tolist()

    def sample(self, place: int, manifest: Manifest, dtype: torch.dtype) -> Tensor:
        return read_sample(self._path, self._offsets, place, manifest.encoding, dtype)


class StoredShard:
    """A shard in a store, of which each sample's own bytes are fetched, through the cache of this machine."""

    def __init__(self, store: Store, shard: Shard):
        self._store = store
        self._shard = shard
        self._cache = local_cache()
        begin = self._read(0, LENGTH_BYTES)
        size = LENGTH_BYTES + int.from_bytes(begin, "little")
        header = json.loads(self._read(LENGTH_BYTES, size))
        self._begins = {name: size + header[name]["data_offsets"][0] for name in header}
        at = self._begins["offsets"]
        offsets = self._read(at, at + torch.int64.itemsize * (shard.documents + 1))
        self._offsets: list[int] = torch.frombuffer(bytearray(offsets), dtype=torch.int64).tolist()

    def sample(self, place: int, manifest: Manifest, dtype: torch.dtype) -> Tensor:
        encoding = manifest.encoding
        tokens = slice(self._offsets[place], self._offsets[place + 1])
        count, states = tokens.stop - tokens.start, (manifest.num_states, manifest.hidden_size)
        parts: Parts = {"states": ((count, *states), DTYPES[encoding], tokens.start)}
        if encoding in BY_CHANNEL:
            parts["scales"] = ((1, *states), torch.float32, place)
        elif encoding in LARGEST:
            parts["scales"] = ((count, manifest.num_states), torch.float32, tokens.start)
        found = self._fetched(place, parts)
        scales = found.get("scales")
        if scales is not None and encoding not in BY_CHANNEL:
            scales = scales[..., None]
        return decode(Encoded(found["states"], scales), dtype)

    def _fetched(self, place: int, parts: Parts) -> dict[str, Tensor]:
        """The tensors of a sample."""
        sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype, _) in parts.items()}
        begins = {name: self._begins[name] + sizes[name] // shape[0] * at for name, (shape, _, at) in parts.items()}

        def fetch(path: Path) -> None:
            path.write_bytes(b"".join(self._read(begins[name], begins[name] + sizes[name]) for name in parts))

        key = f"{self._shard.sha256[:32]}-{place}"
        with self._cache.copy(key, "states", sum(sizes.values()), fetch) as path:
            content = bytearray(path.read_bytes())
        found, begin = {}, 0
        for name, (shape, dtype, _) in parts.items():
            found[name] = torch.frombuffer(content, dtype=dtype, count=math.prod(shape), offset=begin).view(shape)
            begin += sizes[name]
        return found

    def _read(self, begin: int, end: int) -> bytes:
        found = self._store.read(self._shard.file, begin, end)
        if found is None or len(found) != end - begin:
            raise SourceError(f"{self._shard.file} is missing or was cut", where=self._store, hint=AGAIN)
        return found


def opened_shard(folder: StatesFolder, shard: Shard) -> OpenedShard:
    """A shard of a folder, which is there."""
    if isinstance(folder, StoredFolder):
        return StoredShard(folder.store, shard)
    return DiskShard(Path(folder.place) / shard.file)


def read_sample(path: Path, offsets: Sequence[int], place: int, encoding: Encoding, dtype: torch.dtype) -> Tensor:
    """The states [T, S, H] of a sample in a shard with these `offsets` [D + 1], in `dtype`."""
    run = slice(offsets[place], offsets[place + 1])
    with safe_open(path, "pt") as file:  # closed each time: what an open one has read would stay in memory
        values, scales = file.get_slice("states")[run], None
        if encoding in BY_CHANNEL:
            scales = file.get_slice("scales")[place : place + 1]
        elif encoding in LARGEST:
            scales = file.get_slice("scales")[run][..., None]
        return decode(Encoded(values, scales), dtype)
