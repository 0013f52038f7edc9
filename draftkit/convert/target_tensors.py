"""Tensors of the target that a destination needs a copy of. Only the shards that hold them are opened."""

from __future__ import annotations

from dataclasses import replace

from draftkit.errors import TargetError
from draftkit.hub.locate import locate_file
from draftkit.io.handles import TensorHandle
from draftkit.io.safetensors_file import read_safetensors
from draftkit.io.tensors import SAFETENSORS, read_weight_map
from draftkit.layout.target import TargetFacts

PREFIX = "target:"  # of source names in moves that take a tensor from the target
EMBEDDING = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
)
HEAD = ("lm_head.weight", "language_model.lm_head.weight")


def target_embedding(target: TargetFacts) -> TensorHandle:
    """The target's embedding table [V, H], under the name `target:embed_tokens.weight`. Raises `DraftkitError`."""
    return _find(target, EMBEDDING, "embed_tokens.weight")


def target_head(target: TargetFacts) -> TensorHandle:
    """The target's head [V, H], its embedding where tied, under `target:lm_head.weight`. Raises `DraftkitError`."""
    return _find(target, HEAD + EMBEDDING if target.tied else HEAD, "lm_head.weight")


def _find(target: TargetFacts, names: tuple[str, ...], unified: str) -> TensorHandle:
    """The first of `names` that the target has."""
    index = locate_file(target.name, SAFETENSORS.index, target.revision)
    shards = dict.fromkeys(names, SAFETENSORS.single) if index is None else read_weight_map(index)
    for name in (name for name in names if name in shards):
        path = locate_file(target.name, shards[name], target.revision)
        if path is not None:
            for handle in read_safetensors(path):
                if handle.name == name:
                    return replace(handle, name=PREFIX + unified)
    raise TargetError(
        f"{target.name} has no tensor {' or '.join(names)} in safetensors files",
        where=target.name,
        hint="pass the original target with --target",
    )
