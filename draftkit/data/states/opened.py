"""Shards of states that are read sample by sample."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from draftkit.data.states import Encoding
from draftkit.data.states.encoding import BY_CHANNEL, LARGEST, Encoded, decode
from draftkit.data.states.shards import Manifest


class OpenedShard:
    """A shard that is there, opened each time: what an open one has read would stay in memory."""

    def __init__(self, path: Path):
        self._path = path
        with safe_open(path, "pt") as file:
            self._offsets: list[int] = file.get_tensor("offsets").tolist()

    def sample(self, place: int, manifest: Manifest, dtype: torch.dtype) -> Tensor:
        """The states [T, S, H] of its sample number `place`, in `dtype`."""
        return read_sample(self._path, self._offsets, place, manifest.encoding, dtype)


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
