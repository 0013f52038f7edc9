"""The target's hidden states from the shards of a folder or a store, in the place of the target itself."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from draftkit.data.sample_files import samples_sha256
from draftkit.data.states.folder import StatesFolder, folder_at
from draftkit.data.states.online import States
from draftkit.data.states.opened import OpenedShard
from draftkit.data.states.shards import AGAIN, Manifest, Shard, read_manifest
from draftkit.errors import DraftkitError, FormatError, SourceError, TargetError
from draftkit.io.digest import file_sha256
from draftkit.layout.digest import weights_sha256
from draftkit.targets.states import FINAL, AuxLayers


class OfflineStates:
    """Reads what `draftkit data states` has written, one run of bytes for each sample.

    `data` and `target` are the samples file and the folder of the target that training uses, None where all of them
    need not be read to know that they are the same; `aux_layers` what the draft reads: any of the stored states. States
    are returned in `dtype` on the CPU. A shard's size is compared when it is first read. Its checksum was taken where
    it was written, and `verify` compares all of them at once. Raises `DraftkitError` for states that are incomplete, of
    another target or other samples, or that lack a layer, and for a damaged shard.
    """

    def __init__(
        self,
        place: Path | str,
        *,
        data: Path | None,
        target: Path | None,
        aux_layers: AuxLayers | None,
        dtype: torch.dtype = torch.bfloat16,
        verify: bool = False,
    ):
        self.folder = folder_at(place)
        self.manifest = read_manifest(self.folder)
        self.dtype = dtype
        self._firsts = [shard.first for shard in self.manifest.shards]
        self._verify = verify
        self._opened: dict[int, OpenedShard] = {}
        self._check_origin(data, target)
        self._check_complete()
        self._columns = places_of(aux_layers, self.manifest, self.folder.place)
        if verify:
            for number in range(len(self.manifest.shards)):
                self._shard(number)

    def states_of(self, samples: Sequence[int], size: int) -> States:
        """The states of a row of `size` tokens: of the samples with these numbers in their file, then zeros."""
        found = map(self._read, samples)
        return row_states(found, self._columns, size, self.manifest.hidden_size, self.dtype)

    def _read(self, number: int) -> Tensor:
        """The states [T, S, H] of a sample."""
        if not 0 <= number < self.manifest.num_documents:
            raise DraftkitError(
                f"sample {number} has no states",
                where=self.folder.place,
                expected=f"{self.manifest.num_documents} of them",
            )
        index = bisect_right(self._firsts, number) - 1
        return self._shard(index).sample(number - self._firsts[index], self.manifest, self.dtype)

    def _shard(self, index: int) -> OpenedShard:
        if index not in self._opened:
            shard = self.manifest.shards[index]
            check_shard(self.folder, shard, verify=self._verify)
            self._opened[index] = OpenedShard(self.folder.local(shard.file))
        return self._opened[index]

    def _check_origin(self, data: Path | None, target: Path | None) -> None:
        manifest = self.manifest
        again = "write the states again, to another folder: draftkit data states"
        if data is not None and (found := samples_sha256(data)) != manifest.data_sha256:
            raise DraftkitError(
                f"the states were made of other samples than {data}",
                where=self.folder.place,
                expected=f"{manifest.data} with sha256 {manifest.data_sha256[:12]}…; found {found[:12]}…",
                hint=again,
            )
        if target is not None and (found := weights_sha256(target)) != manifest.target_sha256:
            raise TargetError(
                f"the states were made by another target than {target}",
                where=self.folder.place,
                expected=f"{manifest.target}, fingerprint {manifest.target_sha256[:12]}…; found {found[:12]}…",
                hint=again,
            )

    def _check_complete(self) -> None:
        done = sum(shard.documents for shard in self.manifest.shards)
        if done < self.manifest.num_documents:
            raise DraftkitError(
                f"there are states of {done:,} of {self.manifest.num_documents:,} samples",
                where=self.folder.place,
                hint=AGAIN,
            )


def places_of(aux_layers: AuxLayers | None, manifest: Manifest, folder: Path | str) -> list[int] | None:
    """Where the states of `aux_layers` lie among the states of a folder. Raises `DraftkitError` for one that is not
    there."""
    if aux_layers is None:
        return None
    stored = (*manifest.layers, FINAL)
    missing = [state for state in aux_layers.states if state not in stored]
    if missing:
        raise DraftkitError(
            f"the states of layers {missing} are not stored",
            where=folder,
            expected=f"the draft's {list(aux_layers.states)}; stored are {list(manifest.layers)}",
            hint="draftkit data states … --layers writes others, to another folder",
        )
    return [stored.index(state) for state in aux_layers.states]


def row_states(
    samples: Iterable[Tensor], columns: Sequence[int] | None, size: int, width: int, dtype: torch.dtype
) -> States:
    """The states of a row of `size` tokens, of samples [T, S, H], then zeros; `columns`: those that a draft reads."""
    features = None if columns is None else torch.zeros(1, size, len(columns) * width, dtype=dtype)
    last = torch.zeros(1, size, width, dtype=dtype)
    begin = 0
    for states in samples:
        end = begin + len(states)
        if features is not None and columns is not None:
            features[0, begin:end] = states[:, columns].flatten(1)
        last[0, begin:end] = states[:, -1]
        begin = end
    return States(features, last)


def check_shard(folder: StatesFolder, shard: Shard, *, verify: bool) -> None:
    """Raise `SourceError` for a shard that is missing, `FormatError` for one that is not what was written: by its size,
    and with `verify` byte by byte."""
    where, size = f"{folder.place}/{shard.file}", folder.size(shard.file)
    if size is None:
        raise SourceError(f"{shard.file} is missing", where=where, hint=AGAIN)
    if size != shard.bytes or (verify and file_sha256(folder.local(shard.file)) != shard.sha256):
        raise FormatError(
            f"{shard.file} is damaged",
            where=where,
            expected=f"{shard.bytes:,} bytes (found {size:,}) with sha256 {shard.sha256[:12]}…",
            hint=f"remove it: {AGAIN}",
        )
