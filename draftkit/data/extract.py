"""Writing the target's hidden states of a file of documents to shards.

T tokens of a document, S states of H numbers: those of the layers, then the one after the final norm.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftkit.data.encoding import DTYPES, LARGEST, encode
from draftkit.data.packing import pack, row_tensors
from draftkit.data.samples import Document
from draftkit.data.shards import Manifest, offsets_of, shard_ranges, write_manifest, write_shard
from draftkit.data.states import OnlineStates
from draftkit.errors import DraftkitError, TargetError
from draftkit.models.target import AuxLayers

FILE_BYTES = 4096  # at most, of a shard's header and its line in the manifest


class Extractor(Protocol):
    """Computes states."""

    def __call__(self, documents: Sequence[Document]) -> Iterator[tuple[int, Tensor]]:
        """The states [T, S, H] of every document, by its place among them, in any order."""


class TargetExtractor:
    """Runs the target in this process, on rows of at most `tokens_per_row` packed tokens."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[int], tokens_per_row: int):
        self._source = OnlineStates(model, AuxLayers(tuple(layers)) if layers else None)
        self._device = model.device
        self._tokens_per_row = tokens_per_row

    def __call__(self, documents: Sequence[Document]) -> Iterator[tuple[int, Tensor]]:
        lengths = [len(document) for document in documents]
        for row in pack(lengths, self._tokens_per_row):
            states = self._row([documents[place] for place in row])
            yield from zip(row, states.split([lengths[place] for place in row]), strict=True)

    def _row(self, documents: Sequence[Document]) -> Tensor:
        """[N, S, H] of documents one after the other. Raises `TargetError` naming the one that fails alone."""
        try:
            return self._forward(documents)
        except TargetError as error:
            if len(documents) > 1:  # one document's NaN reaches the others of its row
                for document in documents:
                    self._row([document])
            names = ", ".join(document.id for document in documents)
            raise TargetError(f"document {names}: {error}") from error

    def _forward(self, documents: Sequence[Document]) -> Tensor:
        row = row_tensors(documents, sum(map(len, documents)))
        tokens, positions, numbers = (row[name][None].to(self._device) for name in ("tokens", "positions", "documents"))
        features, last = self._source.states(tokens, positions, numbers)
        last = last[0, :, None]
        return last if features is None else torch.cat((features[0].unflatten(1, (-1, last.shape[2])), last), dim=1)


@dataclass(frozen=True)
class Plan:
    """What is left to write, before it is begun.

    `bytes_per_token` without what a document and a shard add, `bytes` with it except for the files' headers. `seconds`
    is an estimate from `probe_tokens`.
    """

    documents: int
    tokens: int
    shards: int
    bytes_per_token: int
    bytes: int
    free_bytes: int
    probe_tokens: int
    seconds: float


def remaining(manifest: Manifest, lengths: Sequence[int]) -> dict[int, range]:
    """The shards that are still to be written: number → documents."""
    done = {shard.first for shard in manifest.shards}
    ranges = shard_ranges(lengths, manifest.shard_tokens)
    return {number: documents for number, documents in enumerate(ranges) if documents.start not in done}


def plan(
    folder: Path, manifest: Manifest, documents: Sequence[Document], extractor: Extractor, probe_tokens: int
) -> Plan:
    """Count what is to do, and time the first documents of it, about `probe_tokens` tokens, after one to warm up."""
    left = remaining(manifest, [len(document) for document in documents])
    todo = [documents[number] for shard in left.values() for number in shard]
    tokens = sum(map(len, todo))
    offsets = torch.int64.itemsize * (len(todo) + len(left))
    probe = _first(todo, probe_tokens)
    probed = sum(map(len, probe))
    seconds = 0.0
    if probe:
        _run(extractor, probe[:1])
        begin = time.perf_counter()
        _run(extractor, probe)
        seconds = (time.perf_counter() - begin) * tokens / probed
    return Plan(
        documents=len(todo),
        tokens=tokens,
        shards=len(left),
        bytes_per_token=manifest.token_bytes,
        bytes=tokens * manifest.token_bytes + offsets,
        free_bytes=free_bytes(folder),
        probe_tokens=probed,
        seconds=seconds,
    )


def _first(documents: Sequence[Document], tokens: int) -> list[Document]:
    """The first document, and those after it as long as they fit."""
    chosen: list[Document] = []
    for document in documents:
        tokens -= len(document)
        if chosen and tokens < 0:
            break
        chosen.append(document)
    return chosen


def _run(extractor: Extractor, documents: Sequence[Document]) -> None:
    for _, states in extractor(documents):
        states.cpu()  # waits for the device


def free_bytes(folder: Path) -> int:
    """On the disk that a folder lies on, or will."""
    parents = (folder.absolute(), *folder.absolute().parents)
    return shutil.disk_usage(next(path for path in parents if path.exists())).free


def check_room(plan: Plan, folder: Path, scratch: int = 0) -> None:
    """Raise `DraftkitError` when what is left, and `scratch` bytes meanwhile, do not fit on the disk."""
    needed = plan.bytes + plan.shards * FILE_BYTES + scratch
    if needed > plan.free_bytes:
        raise DraftkitError(
            f"the states take {needed / 1e9:,.1f} GB, and the disk has {plan.free_bytes / 1e9:,.1f} GB free",
            where=folder,
            hint="choose another disk, fewer documents or layers, or --encoding int8",
        )


def check_documents(documents: Sequence[Document], vocab_size: int, longest: int) -> None:
    """Raise `DraftkitError` naming the first document that the target cannot read in one piece."""
    for document in documents:
        if not 0 < len(document) <= longest:
            raise DraftkitError(
                f"document {document.id} has {len(document)} tokens",
                expected=f"1 to {longest}",
                hint="raise --tokens-per-row, or prepare the data with a smaller --max-length",
            )
        if (largest := int(document.tokens.max())) >= vocab_size:
            raise TargetError(
                f"document {document.id} has token {largest}; the target has {vocab_size}",
                hint="prepare the data with this target",
            )


def write_states(
    folder: Path,
    manifest: Manifest,
    documents: Sequence[Document],
    extractor: Extractor,
    on_tokens: Callable[[int], None] = lambda _: None,
) -> Manifest:
    """Write the shards that are missing, and tell `on_tokens` how many tokens are done after each.

    Finished shards stay whatever happens. Raises `DraftkitError` for states that are not finite or that the encoding
    cannot hold, naming the document, and when the disk is full.
    """
    write_manifest(folder, manifest)  # first: it says whose the shards are, should the run be killed
    for number, numbers in remaining(manifest, [len(document) for document in documents]).items():
        tensors = _shard_tensors([documents[i] for i in numbers], extractor, manifest)
        manifest = write_shard(folder, manifest, number, numbers.start, tensors)
        on_tokens(len(tensors["states"]))
    return manifest


def _shard_tensors(documents: Sequence[Document], extractor: Extractor, manifest: Manifest) -> dict[str, Tensor]:
    offsets = offsets_of([len(document) for document in documents])
    tokens = int(offsets[-1])
    states = torch.empty(tokens, manifest.num_states, manifest.hidden_size, dtype=DTYPES[manifest.encoding])
    scales = torch.empty(tokens, manifest.num_states)
    for place, found in extractor(documents):
        run = slice(int(offsets[place]), int(offsets[place + 1]))
        encoded = encode(found, manifest.encoding)
        if not torch.isfinite(encoded.values if encoded.scales is None else encoded.scales).all():
            raise TargetError(
                f"document {documents[place].id}: its hidden states are not finite",
                expected=f"numbers that {manifest.encoding} holds",
                hint="run the target in bfloat16 or float32",
            )
        states[run] = encoded.values
        if encoded.scales is not None:
            scales[run] = encoded.scales
    named = {"states": states, "offsets": offsets}
    return named | {"scales": scales} if manifest.encoding in LARGEST else named
