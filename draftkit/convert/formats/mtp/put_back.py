"""Multi-token prediction heads put back into a target: over its own, or into a copy that lost them.

What changes is written into new files. In a shard with some of the heads' tensors, their bytes are replaced where they
lie; what the target lacks goes into a shard of its own. The new folder shares the other weights with the target by hard
links, as nothing writes into weights that are there, and has copies of everything else, which users do edit. Heads that
were taken out and not changed leave every file as it was, byte for byte.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from draftkit.convert.checkpoint import Checkpoint
from draftkit.convert.formats.mtp.heads import TargetHeads, find_heads, refuse_window
from draftkit.errors import DraftkitError, FormatError, LayoutError
from draftkit.io.atomic import atomic_folder
from draftkit.io.dtypes import FLOATS, torch_dtype
from draftkit.io.finite import check_finite
from draftkit.io.handles import TensorHandle, TensorToWrite, memory_handle
from draftkit.io.jsonfile import MAX_BYTES, dump, read_object
from draftkit.io.safetensors_file import read_regions, read_safetensors, write_safetensors
from draftkit.io.tensors import SAFETENSORS, read_weight_map
from draftkit.layout.families.mtp import MtpSpec
from draftkit.layout.folder import Draft
from draftkit.layout.mtp import LEFT_ALONE, heads_stated
from draftkit.layout.schema import TensorSchema, check_tensors
from draftkit.layout.target import language_model

NEW_SHARD = "model-mtp.safetensors"
TAKEN_FROM = "put them into the target that they were taken from, or a fine-tuned copy of it"

Write = Callable[[Path], object]  # writes a file that is not there yet
Stated = TypeVar("Stated", dict[str, Any], list[Any])


def put_back(draft: Draft, target: Checkpoint, out: Path) -> list[str]:
    """Write the target with the heads of `draft` as the folder `out`, which may be the target's own; the names of the
    files that changed.

    Raises `LayoutError` for heads of another target, and where the target's are stored in a way that the heads are not;
    `FormatError` for heads with numbers that are not finite, and for what in the target is no file and no folder;
    `DraftkitError` for an `out` within the target, and as `atomic_folder` does.
    """
    source = Path(os.path.realpath(target.source.path))
    place = Path(os.path.realpath(out))
    if place != source and place.is_relative_to(source):
        raise DraftkitError("the output lies in the target itself", where=out, hint="choose another folder")
    changed = _changed(draft, target)
    with atomic_folder(place, lambda folder: folder == source) as folder:
        _take_over(source, folder, leave=changed)
        for name, write in changed.items():
            write(folder / name)
            if (source / name).exists():
                shutil.copymode(source / name, folder / name)
    return list(changed)


def _changed(draft: Draft, target: Checkpoint) -> dict[str, Write]:
    """For each file of the target that changes or is new, the function that writes it."""
    source = target.source.path
    index = source / SAFETENSORS.index
    shards = _shards(source, index)
    heads = _fitting(draft, target, shards)
    stored = {name for names in shards.values() for name in names}
    added = [handle for name, handle in heads.items() if name not in stored]
    changed: dict[str, Write] = {}
    for shard, names in shards.items():
        if own := {name: heads[name] for name in names if name in heads}:
            changed[shard] = partial(_replaced, source / shard, own)
    if added and index.is_file():
        if NEW_SHARD in shards:
            raise DraftkitError(f"the target has a {NEW_SHARD} that lacks some of the heads' tensors", where=source)
        if os.path.lexists(source / NEW_SHARD):
            raise DraftkitError(
                f"the target has a {NEW_SHARD} that its index does not name", where=source, hint="move it away"
            )
        changed[NEW_SHARD] = lambda path: write_safetensors(path, [_to_write(h) for h in added], {"format": "pt"})
        changed[SAFETENSORS.index] = partial(_write, dump(_index(index, added)))
    elif added:
        (single,) = shards
        whole = [heads.get(handle.name, handle) for handle in read_safetensors(source / single)] + added
        changed[single] = lambda path: write_safetensors(path, [_to_write(h) for h in whole], {"format": "pt"})
    if config := _config(draft, target, added):
        changed["config.json"] = partial(_write, dump(config))
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
            "heads can be put back only into safetensors files",
            where=folder,
            expected=f"{SAFETENSORS.single} or {SAFETENSORS.index}",
        )
    return {SAFETENSORS.single: [handle.name for handle in read_safetensors(folder / SAFETENSORS.single)]}


def _fitting(draft: Draft, target: Checkpoint, shards: Mapping[str, list[str]]) -> dict[str, TensorHandle]:
    """The heads' tensors as the target stores its own: those that it has, else those of its layers that are like them.

    Raises `LayoutError` for heads that are not the target's.
    """
    spec = draft.spec.architecture.expect(MtpSpec)
    refuse_window(spec, draft.path)
    found = find_heads(target)
    if found is None or not _same_kind(found, spec):
        raise LayoutError(
            f"{target.source.name} keeps no heads under {', '.join(spec.prefixes)}",
            where=target.source.path,
            expected=f"a target of type {spec.config.get('model_type')}, as the one that the heads were taken from",
        )
    own, theirs = (language_model(config).get("model_type") for config in (spec.config, target.config))
    if own != theirs:
        raise LayoutError(
            f"the heads are of a target of type {own}, and {target.source.name} is of type {theirs}",
            where=target.source.path,
            hint=TAKEN_FROM,
        )
    _check_sizes(draft, spec, found, target)
    check_finite(draft.tensors, draft.path)
    return {name: _stored_alike(handle, found, target) for name, handle in draft.tensors.items()}


def _check_sizes(draft: Draft, spec: MtpSpec, found: TargetHeads, target: Checkpoint) -> None:
    """Raise `LayoutError` for heads that are not of the sizes that the target's config states, or, of kinds that
    draftkit does not run, that its layers have."""
    tensors = {name: (handle.dtype, handle.shape) for name, handle in draft.tensors.items()}
    schema = replace(spec, config=target.config).tensors()
    for prefix in spec.prefixes if spec.parts is None else ():
        like = {prefix + name: handle for name, handle in found.like.items() if handle.dtype in FLOATS}
        schema |= {n: TensorSchema(h.shape) for n, h in like.items() if n in tensors and tensors[n][0] in FLOATS}
    check_tensors(schema, tensors, target.source.path, hint=TAKEN_FROM)


def _same_kind(found: TargetHeads, spec: MtpSpec) -> bool:
    """Whether heads go where the target keeps its own; one that has lost them keeps them in any spelling."""
    spellings = (found.kind,) if found.tensors else found.kind.spellings()
    places = [kind.prefixes(spec.num_modules, found.num_layers) for kind in spellings]
    return spec.prefixes in places and spec.parts == found.kind.runnable_parts


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


def _take_over(source: Path, folder: Path, leave: Container[str] = (), above: tuple[Path, ...] = ()) -> None:
    """Put every file of a folder but `leave` into another one: weights as hard links where the file system has them,
    copies of the others. `above`: the folders that `source` was found in.

    Raises `FormatError` for what is no file and no folder, and for a link that leads back to where it lies, or to where
    the files go.
    """
    place = Path(os.path.realpath(source))
    if any(one.is_relative_to(place) for one in (*above, folder)):
        raise FormatError(f"{source.name} is a link to a folder that it lies in", where=source, hint="remove the link")
    folder.chmod(stat.S_IMODE(place.stat().st_mode) | stat.S_IRWXU)
    for path in sorted(source.iterdir()):
        new = folder / path.name
        if path.is_dir():
            new.mkdir()
            _take_over(path, new, above=(*above, place))
        elif not path.is_file():  # to read a pipe or a device may never end
            raise FormatError(
                f"{path.name} is a link to nothing" if path.is_symlink() else f"{path.name} is not a file",
                where=path,
                hint="remove it, or fetch the target again",
            )
        elif path.name not in leave:
            _link_or_copy(path, new)


def _link_or_copy(path: Path, new: Path) -> None:
    """A file under another name; one as large as `MAX_BYTES` holds weights, however it is called."""
    if path.suffix in SAFETENSORS.suffixes or path.stat().st_size >= MAX_BYTES:
        try:
            os.link(os.path.realpath(path), new)
            return
        except OSError:  # without hard links, or of another user's file
            pass
    shutil.copy2(path, new)


def _replaced(source: Path, tensors: Mapping[str, TensorHandle], path: Path) -> None:
    """A file like `source` with other bytes of some tensors, where these lie."""
    start, regions = read_regions(source)
    shutil.copyfile(source, path)
    with path.open("r+b") as file:
        for region in regions:
            if region.name in tensors:
                file.seek(start + region.begin)
                file.writelines(tensors[region.name].chunks())


def _to_write(handle: TensorHandle) -> TensorToWrite:
    return TensorToWrite(handle.name, handle.dtype, handle.shape, handle.chunks())


def _index(path: Path, added: list[TensorHandle]) -> dict[str, object]:
    """An index with tensors of `NEW_SHARD` too."""
    index: dict[str, Any] = read_object(path)
    index["weight_map"] |= dict.fromkeys((handle.name for handle in added), NEW_SHARD)
    metadata = index.get("metadata")
    if isinstance(metadata, dict) and isinstance(metadata.get("total_size"), int):
        metadata["total_size"] += sum(handle.nbytes for handle in added)
    return index


def _config(draft: Draft, target: Checkpoint, added: list[TensorHandle]) -> dict[str, object] | None:
    """The target's config with the number of heads, and with heads that were added among the modules that are not
    quantized; None where it says that already. Raises `FormatError` where those have no place."""
    spec = draft.spec.architecture.expect(MtpSpec)
    config: dict[str, Any] = {**target.config}
    stated = heads_stated(spec.config)
    if stated is not None and heads_stated(config) != stated:
        holder, key, count = stated
        if holder is None:
            config[key] = count
        else:
            config[holder] = {**_stated(config, holder, dict, target), key: count}
    quantization = _stated(config, "quantization_config", dict, target) if added else {}
    listed = next((key for key in LEFT_ALONE if key in quantization), None)
    if listed is not None:
        modules = sorted({h.name.removesuffix(".weight") for h in added if h.dtype in FLOATS and len(h.shape) > 1})
        known = _stated(quantization, listed, list, target)
        missing = [module for module in modules if module not in known]
        config["quantization_config"] = {**quantization, listed: [*known, *missing]}
    return None if config == target.config else config


def _stated(config: Mapping[str, Any], key: str, kind: type[Stated], target: Checkpoint) -> Stated:
    """The object or list at a key, empty where there is none. Raises `FormatError` for what is neither."""
    value = config.get(key)
    if value is not None and not isinstance(value, kind):
        raise FormatError(
            f"{key} is {value!r}", where=target.config_path, expected="an object" if kind is dict else "a list"
        )
    return kind() if value is None else value


def _write(text: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8")
