"""Multi-token prediction heads put back into a target: over its own, or into a copy that lost them.

Shards without any of the heads' tensors are not written again: the new folder has hard links to them. In a shard with
some, their bytes are replaced where they lie; what the target lacks goes into a shard of its own. Heads that were taken
out and not changed leave every file as it was, byte for byte.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.mtp_heads import TargetHeads, find_heads
from draftkit.errors import DraftkitError, FormatError, LayoutError
from draftkit.io.atomic import atomic_folder
from draftkit.io.dtypes import FLOATS, torch_dtype
from draftkit.io.handles import TensorHandle, TensorToWrite, memory_handle
from draftkit.io.jsonfile import dump, read_object
from draftkit.io.safetensors_file import read_regions, read_safetensors, write_safetensors
from draftkit.io.tensors import SAFETENSORS, read_weight_map
from draftkit.layout.families.mtp import MtpSpec
from draftkit.layout.folder import Draft
from draftkit.layout.mtp import LEFT_ALONE, heads_stated

NEW_SHARD = "model-mtp.safetensors"


def put_back(draft: Draft, target: Checkpoint, out: Path) -> list[str]:
    """Write the target with the heads of `draft` as the folder `out`, which may be the target's own; the names of the
    files that changed.

    Raises `LayoutError` for heads of another target, and where the target's are stored in a way that the heads are not;
    `DraftkitError` as `atomic_folder` does.
    """
    source = target.source.path
    index = source / SAFETENSORS.index
    shards = _shards(source, index)
    heads = _fitting(draft, target, shards)
    changed: list[str] = []
    with atomic_folder(out, lambda folder: os.path.realpath(folder) == os.path.realpath(source)) as folder:
        _link(source, folder)
        for shard, names in shards.items():
            if own := [name for name in names if name in heads]:
                _replaced(folder / shard, {name: heads[name] for name in own})
                changed.append(shard)
        stored = {name for names in shards.values() for name in names}
        if added := [handle for name, handle in heads.items() if name not in stored]:
            changed += _add(folder, added, shards, indexed=index.is_file())
        if config := _config(draft, target, added):
            _write(folder / "config.json", dump(config))
            changed.append("config.json")
    return changed


def _shards(folder: Path, index: Path) -> dict[str, list[str]]:
    """The names of the tensors in each weight file. Raises `FormatError` for files other than safetensors."""
    if index.is_file():
        shards: dict[str, list[str]] = {}
        for name, shard in read_weight_map(index).items():
            shards.setdefault(shard, []).append(name)
        return shards
    if not (folder / SAFETENSORS.single).is_file():
        raise FormatError(
            "heads are put back into safetensors files alone",
            where=folder,
            expected=f"{SAFETENSORS.single} or {SAFETENSORS.index}",
        )
    return {SAFETENSORS.single: [handle.name for handle in read_safetensors(folder / SAFETENSORS.single)]}


def _fitting(draft: Draft, target: Checkpoint, shards: Mapping[str, list[str]]) -> dict[str, TensorHandle]:
    """The heads' tensors as the target stores its own: those that it has, else those of its layers that are like them.

    Raises `LayoutError` for heads that are not the target's.
    """
    spec = draft.spec.architecture.expect(MtpSpec)
    found = find_heads(target)
    if found is None or not _same_kind(found, spec):
        raise LayoutError(
            f"{target.source.name} keeps no heads under {', '.join(spec.prefixes)}",
            where=target.source.path,
            expected=f"a target of type {spec.config.get('model_type')}, as the one that the heads were taken from",
        )
    width = next((handle.shape[-1] for name, handle in found.like.items() if name.endswith("norm.weight")), None)
    if width not in (None, spec.target_hidden_size):
        raise LayoutError(
            f"the heads are {spec.target_hidden_size} wide, and {target.source.name} {width}",
            where=target.source.path,
            hint="put them into the target that they were taken from, or a fine-tuned copy of it",
        )
    return {name: _stored_alike(handle, found, target) for name, handle in draft.tensors.items()}


def _same_kind(found: TargetHeads, spec: MtpSpec) -> bool:
    """Whether heads go where the target keeps its own; one that has lost them keeps them in any spelling."""
    spellings = (found.kind,) if found.tensors else found.kind.spellings()
    places = [kind.prefixes(spec.num_modules, found.num_layers) for kind in spellings]
    return spec.prefixes in places and spec.parts == found.kind.parts_run


def _stored_alike(handle: TensorHandle, heads: TargetHeads, target: Checkpoint) -> TensorHandle:
    """A tensor in the dtype of the one that it replaces."""
    own = heads.tensors.get(handle.name)
    if own is None or own.dtype == handle.dtype:
        if own is not None and own.shape != handle.shape:
            raise _unlike(handle, own, target)
        return handle
    if own.shape != handle.shape or not {own.dtype, handle.dtype} <= set(FLOATS):
        raise _unlike(handle, own, target)
    return memory_handle(handle.name, handle.load().to(torch_dtype(own.dtype)), handle.origin)


def _unlike(handle: TensorHandle, own: TensorHandle, target: Checkpoint) -> LayoutError:
    return LayoutError(
        f"{handle.name} is {handle.dtype} {list(handle.shape)}, the target's is {own.dtype} {list(own.shape)}",
        where=target.source.path,
        hint="quantize the heads as the target was, or put them into a copy without its quantized ones",
    )


def _link(source: Path, folder: Path) -> None:
    """Every file of a target, without another copy of it where the file system has hard links."""
    for path in sorted(source.iterdir()):
        if path.is_dir():
            shutil.copytree(path, folder / path.name)
            continue
        try:
            os.link(os.path.realpath(path), folder / path.name)
        except OSError:
            shutil.copyfile(path, folder / path.name)


def _replaced(path: Path, tensors: Mapping[str, TensorHandle]) -> None:
    """The same file with other bytes of some tensors, where these lie."""
    start, regions = read_regions(path)
    copy = path.with_name(f"{path.name}.new")
    shutil.copyfile(path, copy)  # the other link's bytes stay
    with copy.open("r+b") as file:
        for region in regions:
            if region.name in tensors:
                file.seek(start + region.begin)
                file.writelines(tensors[region.name].chunks())
    copy.replace(path)


def _add(folder: Path, added: list[TensorHandle], shards: Mapping[str, list[str]], *, indexed: bool) -> list[str]:
    """Tensors that the target lacks: in a new shard, or in the one file that is all there is."""
    new = [TensorToWrite(handle.name, handle.dtype, handle.shape, handle.chunks()) for handle in added]
    if not indexed:
        (single,) = shards
        old = [TensorToWrite(h.name, h.dtype, h.shape, h.chunks()) for h in read_safetensors(folder / single)]
        copy = folder / f"{single}.new"
        write_safetensors(copy, [*old, *new], {"format": "pt"})
        copy.replace(folder / single)
        return [single]
    if NEW_SHARD in shards:
        raise DraftkitError(f"the target has a {NEW_SHARD} that lacks some of the heads' tensors", where=folder)
    write_safetensors(folder / NEW_SHARD, new, {"format": "pt"})
    index: dict[str, Any] = read_object(folder / SAFETENSORS.index)
    index["weight_map"] |= dict.fromkeys((handle.name for handle in added), NEW_SHARD)
    metadata = index.get("metadata")
    if isinstance(metadata, dict) and isinstance(metadata.get("total_size"), int):
        metadata["total_size"] += sum(handle.nbytes for handle in added)
    _write(folder / SAFETENSORS.index, dump(index))
    return [NEW_SHARD, SAFETENSORS.index]


def _config(draft: Draft, target: Checkpoint, added: list[TensorHandle]) -> dict[str, object] | None:
    """The target's config with the number of heads, and with heads that were added among the modules that are not
    quantized; None where it says that already."""
    spec = draft.spec.architecture.expect(MtpSpec)
    config: dict[str, Any] = {**target.config}
    stated = heads_stated(spec.config)
    if stated is not None and heads_stated(config) != stated:
        holder, key, count = stated
        if holder is None:
            config[key] = count
        else:
            config[holder] = {**config.get(holder, {}), key: count}
    quantization: dict[str, Any] = config.get("quantization_config") or {}
    listed = next((key for key in LEFT_ALONE if key in quantization), None)
    if added and listed is not None:
        modules = sorted({h.name.removesuffix(".weight") for h in added if h.dtype in FLOATS and len(h.shape) > 1})
        missing = [module for module in modules if module not in quantization[listed]]
        config["quantization_config"] = {**quantization, listed: [*quantization[listed], *missing]}
    return None if config == target.config else config


def _write(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)  # the other link's bytes stay
    path.write_text(text, encoding="utf-8")
