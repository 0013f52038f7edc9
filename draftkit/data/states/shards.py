"""A folder of the target's hidden states: `manifest.json`, and shards of consecutive samples.

A shard `states-NNNNN.safetensors` holds, with T tokens in D samples one after the other, S states of H numbers:

- `states` [T, S, H]: the pre-norm states of `Manifest.layers`, then the one after the final norm, in the encoding's
  dtype; a sample is one run of bytes.
- `scales` float32, where the encoding has them: [T, S], or [D, S, H] where they are of the channels of a sample.
- `offsets` int64 [D + 1]: where each sample begins, and the last one ends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from draftkit.data.states import Encoding
from draftkit.data.states.encoding import channel_bytes, vector_bytes
from draftkit.data.states.folder import StatesFolder, folder_at
from draftkit.errors import DraftkitError, FormatError
from draftkit.io.digest import file_sha256
from draftkit.io.jsonfile import dump
from draftkit.io.records import from_dict, to_dict
from draftkit.io.tensors import open_checkpoint

MANIFEST = "manifest.json"
SCHEMA = 2
SAMPLE_BYTES = 4096
NAMES = ("target", "target_revision", "data")  # keys for people: the digests beside them decide what is the same
AGAIN = "draftkit data states writes shards that are missing and keeps the others"


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A file and what is in it: `documents` samples of the samples file, from number `first` on."""

    file: str
    first: int
    documents: int
    tokens: int
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of a folder of states: whose states they are, how they are stored, and its complete shards in order.

    `dtype`: the one that the target ran in, by `engine`. `layers` in convention S. `target_sha256`: of all its weights,
    and of a stream what `sampled_sha256` gives.
    """

    schema: int
    target: str
    target_revision: str | None
    target_sha256: str
    engine: Literal["transformers", "vllm"]
    dtype: str
    data: str
    data_sha256: str
    num_documents: int
    num_tokens: int
    layers: tuple[int, ...]
    hidden_size: int
    encoding: Encoding
    shard_tokens: int
    shards: tuple[Shard, ...] = ()

    @property
    def num_states(self) -> int:
        """The number S of states of a token: those of the layers, and the last."""
        return len(self.layers) + 1

    @property
    def token_bytes(self) -> int:
        """The bytes that the states of a token take."""
        return self.num_states * vector_bytes(self.hidden_size, self.encoding)

    @property
    def sample_bytes(self) -> int:
        """The bytes that a sample takes besides its tokens: where it begins, and its scales."""
        return torch.int64.itemsize + self.num_states * channel_bytes(self.hidden_size, self.encoding)


class Part(NamedTuple):
    """Every `of`-th shard, from number `number` on."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


WHOLE = Part(0, 1)


def shard_name(number: int) -> str:
    return f"states-{number:05d}.safetensors"


def shard_ranges(lengths: Sequence[int], shard_tokens: int) -> list[range]:
    """Consecutive samples, by number, in shards of at most `shard_tokens`; a longer sample is one alone."""
    ranges = []
    first = tokens = 0
    for number, length in enumerate(lengths):
        if number > first and tokens + length > shard_tokens:
            ranges.append(range(first, number))
            first, tokens = number, 0
        tokens += length
    return [*ranges, range(first, len(lengths))] if lengths else []


def manifest_name(part: Part) -> str:
    """The manifest of the process that writes a part: without locks, no two may write the same one."""
    return MANIFEST if part == WHOLE else f"manifest-{part.number}-of-{part.of}.json"


def read_manifest(place: Path | str | StatesFolder) -> Manifest:
    """The manifest of a folder, with the shards of all parts. Raises `SourceError` where there is none, `DraftkitError`
    when it is not valid."""
    folder = folder_at(place)
    first, *others = (_read(folder, name) for name in folder.manifests() or [MANIFEST])
    for other in others:
        _check_same(other, first, folder)
    shards = {shard.first: shard for one in (*others, first) for shard in one.shards}
    return replace(first, shards=tuple(shards[number] for number in sorted(shards)))


def _read(folder: StatesFolder, name: str) -> Manifest:
    """One manifest of a folder."""
    path = f"{folder.place}/{name}"
    data = folder.read_object(name)
    if data.get("schema") != SCHEMA:
        raise FormatError(
            f"states of schema {data.get('schema')!r}", where=path, expected=str(SCHEMA), hint="write them again"
        )
    manifest = from_dict(Manifest, data, path, "the manifest")
    end = 0
    for shard in manifest.shards:
        if Path(shard.file).name != shard.file or shard.first < end or shard.documents < 1:
            raise FormatError(f"shard {shard.file!r} of the manifest is not possible", where=path)
        end = shard.first + shard.documents
    if end > manifest.num_documents:
        raise FormatError(f"the shards reach to sample {end} of {manifest.num_documents}", where=path)
    return manifest


def sampled_sha256(folder: Path) -> str:
    """A quick digest of a target: of its config, and the first bytes of each tensor.

    Raises `SourceError` and `FormatError` for a folder that is no checkpoint.
    """
    digest = hashlib.sha256(file_sha256(folder / "config.json").encode())
    for name, handle in sorted(open_checkpoint(folder).items()):
        digest.update(f"\0{name}\0{handle.dtype}\0{handle.shape}\0".encode())
        digest.update(next(iter(handle.chunks(SAMPLE_BYTES)), b"")[:SAMPLE_BYTES])
    return digest.hexdigest()


def begin(folder: StatesFolder, settings: Manifest) -> Manifest:
    """`settings` with the shards that the folder already has.

    A shard whose file is gone or has another size is left out. Raises `DraftkitError` for states
    that were begun with other settings, and for a folder of anything else.
    """
    vacant = folder.is_vacant()  # asked first: another process may be writing its manifest
    if not folder.manifests():
        if not vacant:
            raise DraftkitError(
                "the output is already there, and has no states", where=folder.place, hint="choose another"
            )
        return settings
    found = read_manifest(folder)
    _check_same(settings, found, folder)
    return replace(settings, shards=tuple(shard for shard in found.shards if folder.size(shard.file) == shard.bytes))


def _check_same(settings: Manifest, found: Manifest, folder: StatesFolder) -> None:
    """Raise `DraftkitError` where two manifests are of different states."""
    old, new = (to_dict(replace(one, shards=())) for one in (found, settings))
    differing = [key for key in old if old[key] != new[key] and key not in NAMES]
    if differing:
        raise DraftkitError(
            "the states were begun with other settings:"
            + "".join(f"\n    {key}: {old[key]!r}, now {new[key]!r}" for key in differing),
            where=folder.place,
            hint="give the same settings to go on, or choose another folder",
        )


def enter(folder: StatesFolder, settings: Manifest, part: Part) -> Manifest:
    """Have the folder say what is written to it, or find that it does. Returns what is there of all parts.

    The process that writes everything takes over the manifests of parts. Raises as `begin`.
    """
    with folder.lock(MANIFEST, waits=True):
        manifest, own = begin(folder, replace(settings, shards=())), manifest_name(part)
        recorded = manifest.shards if part == WHOLE else _recorded(folder, own)
        shards = tuple(shard for shard in manifest.shards if shard in recorded)
        write_manifest(folder, replace(manifest, shards=shards), part)
        if part == WHOLE:
            for other in folder.manifests():
                if other != own:
                    folder.remove(other)
    return manifest


def _recorded(folder: StatesFolder, name: str) -> tuple[Shard, ...]:
    """The shards that a manifest has, which may not be there yet."""
    return () if folder.size(name) is None else _read(folder, name).shards


def write_shard(
    folder: StatesFolder, number: int, first: int, tensors: dict[str, Tensor], manifest: Manifest, part: Part
) -> Manifest:
    """Write shard `number`, of the samples from `first` on, then the part's manifest with it. Returns what is there.

    Each file appears complete or not at all, and other processes may write theirs meanwhile. The checksum is taken here
    and nowhere else but where it is asked for. Raises `DraftkitError` when the disk is full; what was there stays.
    """
    name, offsets = shard_name(number), tensors["offsets"]
    size, sha256 = folder.write_tensors(name, tensors)
    shard = Shard(
        file=name,
        first=first,
        documents=len(offsets) - 1,
        tokens=int(offsets[-1]),
        bytes=size,
        sha256=sha256,
    )
    with folder.lock(MANIFEST, waits=True):
        others = (other for other in _recorded(folder, manifest_name(part)) if other.first != first)
        shards = tuple(sorted((*others, shard), key=lambda shard: shard.first))
        write_manifest(folder, replace(manifest, shards=shards), part)
    return read_manifest(folder)


def write_manifest(place: Path | StatesFolder, manifest: Manifest, part: Part = WHOLE) -> None:
    """Replace the manifest of a part, at once. Raises `DraftkitError` when the disk is full."""
    folder_at(place).write(manifest_name(part), dump(to_dict(manifest)).encode())


def offsets_of(lengths: Sequence[int]) -> Tensor:
    """Where each sample begins, and the last one ends: int64 [D + 1]."""
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
