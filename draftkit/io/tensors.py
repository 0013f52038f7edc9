"""The weights of a checkpoint folder: one file, or shards and an index that says which tensor lies in which."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftkit.errors import FormatError, SourceError
from draftkit.io import jsonfile
from draftkit.io.handles import TensorHandle, TensorToWrite
from draftkit.io.safetensors_file import check_names, read_safetensors, write_safetensors
from draftkit.io.torch_file import read_torch

MAX_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Storage:
    """One way to store weights, with the names that Hugging Face tools give to it."""

    index: str
    single: str
    suffixes: tuple[str, ...]
    read: Callable[[Path], list[TensorHandle]]


SAFETENSORS = Storage("model.safetensors.index.json", "model.safetensors", (".safetensors",), read_safetensors)
TORCH = Storage("pytorch_model.bin.index.json", "pytorch_model.bin", (".bin", ".pt"), read_torch)
KINDS = (SAFETENSORS, TORCH)

# What trainers leave beside the weights under the same suffixes.
NOT_WEIGHTS = {
    "adapter_model.safetensors",
    "adapter_model.bin",
    "training_args.bin",
    "optimizer.bin",
    "optimizer.pt",
    "scheduler.bin",
    "scheduler.pt",
}


def open_checkpoint(folder: Path) -> dict[str, TensorHandle]:
    """The tensors of a checkpoint folder by name, in the order of the files and of their bytes. Reads no tensor data.

    Looks for safetensors files first, then for PyTorch ones; in either kind for an index, the usual name, then for
    a file that is alone of its kind. Raises `SourceError` when there are no weights, `FormatError` when they are
    not what they claim to be or disagree with their index.
    """
    if not folder.is_dir():
        raise SourceError("there is no such folder", where=folder, expected="the folder of a checkpoint")
    for kind in KINDS:
        if (folder / kind.index).exists():
            return _open_shards(folder / kind.index, kind)
        if file := _single_file(folder, kind):
            return {handle.name: handle for handle in kind.read(file)}
    raise _no_weights(folder)


def gguf_file(folder: Path) -> Path | None:
    """The GGUF file with the weights of a folder, which transformers reads; None where `open_checkpoint` does.

    What multi-modal models have beside their language model (`mmproj`) does not count. Raises `SourceError` where there
    are several.
    """
    if any((folder / kind.index).exists() or _candidates(folder, kind) for kind in KINDS):
        return None
    files = sorted(path for path in folder.glob("*.gguf") if "mmproj" not in path.name)
    if len(files) > 1:
        raise SourceError(
            f"{folder.name} holds several GGUF files: {', '.join(path.name for path in files)}",
            where=folder,
            hint="pass the file itself",
        )
    return files[0] if files else None


def _single_file(folder: Path, kind: Storage) -> Path | None:
    named = folder / kind.single
    if named.is_file():
        return named
    candidates = _candidates(folder, kind)
    return candidates[0] if len(candidates) == 1 else None


def _candidates(folder: Path, kind: Storage) -> list[Path]:
    files = (path for path in folder.iterdir() if path.suffix in kind.suffixes and path.name not in NOT_WEIGHTS)
    return sorted(path for path in files if path.is_file())


def _no_weights(folder: Path) -> SourceError:
    looked_for = [f"{kind.index}, {kind.single} or a single *{', *'.join(kind.suffixes)}" for kind in KINDS]
    several = [path.name for kind in KINDS for path in _candidates(folder, kind)]
    found = f"several weight files and no index: {', '.join(several)}" if several else "no weights"
    return SourceError(f"{folder.name} holds {found}", where=folder, expected="; or ".join(looked_for))


def _open_shards(index: Path, kind: Storage) -> dict[str, TensorHandle]:
    """The tensors that an index lists, from the shards beside it."""
    weight_map = read_weight_map(index)
    shards = sorted(set(weight_map.values()))
    present = [shard for shard in shards if os.path.isfile(index.parent / shard)]  # False for impossible names too
    handles = {shard: kind.read(index.parent / shard) for shard in present}
    problems = [f"{shard} is missing" for shard in shards if shard not in handles]
    for shard in present:
        problems += _disagreements(shard, weight_map, {handle.name for handle in handles[shard]})
    if problems:
        raise FormatError(
            f"{index.name} and its shards disagree:\n    " + "\n    ".join(problems),
            where=index,
            hint="download the checkpoint again",
        )
    return {handle.name: handle for shard in shards for handle in handles[shard]}


def read_weight_map(index: Path) -> dict[str, str]:
    """Tensor name → shard name, where no shard name leads out of the index's folder."""
    weight_map = jsonfile.read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise FormatError("weight_map is not an object of tensor names to file names", where=index)
    if not weight_map:
        raise FormatError("weight_map lists no tensors", where=index)
    outside = sorted(shard for shard in set(weight_map.values()) if not _is_plain_name(shard))
    if outside:
        raise FormatError(f"the index names files outside its folder: {outside}", where=index)
    return weight_map


def _is_plain_name(name: str) -> bool:
    return name not in ("", ".", "..") and not any(character in name for character in "/\\:\0")


def _disagreements(shard: str, weight_map: Mapping[str, str], found: set[str]) -> list[str]:
    listed = {name for name, file in weight_map.items() if file == shard}
    absent = [f"{name!r} is listed in {shard}, but is not there" for name in sorted(listed - found)]
    return absent + [f"{name!r} is in {shard}, but is not listed there" for name in sorted(found - listed)]


def write_checkpoint(
    folder: Path,
    tensors: Sequence[TensorToWrite],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    metadata: Mapping[str, str] | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> list[Path]:
    """Write `model.safetensors`, or shards and their index, one chunk of one tensor in memory at a time.

    Tensors go to shards of at most `max_shard_bytes` in name order; one that is larger has a shard to itself.
    `metadata` goes into the header of every file, and `on_bytes` is told the size of every chunk of tensor bytes.
    Returns the files written. Raises `LayoutError` for a name given twice and for chunks that do not add up to their
    tensor's size. Files of an unfinished write stay behind, so write inside `atomic_folder`.
    """
    check_names([tensor.name for tensor in tensors], folder)
    shards = _plan_shards(sorted(tensors, key=lambda tensor: tensor.name), max_shard_bytes)
    files = [folder / name for name in _shard_names(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        write_safetensors(file, shard, metadata, on_bytes)
    return files if len(files) == 1 else [*files, _write_index(folder, files, shards)]


def _plan_shards(tensors: Sequence[TensorToWrite], max_shard_bytes: int) -> list[list[TensorToWrite]]:
    """Tensors in their order, cut into shards by their sizes alone."""
    shards: list[list[TensorToWrite]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.nbytes
    return shards


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return [SAFETENSORS.single]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _write_index(folder: Path, files: Sequence[Path], shards: Sequence[Sequence[TensorToWrite]]) -> Path:
    weight_map = {tensor.name: file.name for file, shard in zip(files, shards, strict=True) for tensor in shard}
    total = sum(tensor.nbytes for shard in shards for tensor in shard)
    index = folder / SAFETENSORS.index
    index.write_text(jsonfile.dump({"metadata": {"total_size": total}, "weight_map": weight_map}), encoding="utf-8")
    return index
