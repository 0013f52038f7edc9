"""The multi-token prediction heads of a target: those that its config promises, and those that its weights hold."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from draftkit.convert.checkpoint import Checkpoint
from draftkit.io.handles import TensorHandle
from draftkit.layout.mtp import HeadKind, HeadParts, head_kind, heads_promised
from draftkit.layout.target import language_model

WEIGHTS = (".weight", ".bias", "_bias", "_sinks")
LAYER = re.compile(r"(.*\blayers\.)(\d+)\.(.+)")


@dataclass(frozen=True)
class TargetHeads:
    """What a checkpoint has of its target's heads.

    `promised`: how many the config says that there are. `tensors` by name; those of heads that the config does not
    promise are `unexpected`. `like`: the decoder layer of the target itself that is most like a head's, its tensors by
    what comes after the layer's prefix `trunk`; empty where the checkpoint holds the heads alone.
    """

    kind: HeadKind
    promised: int
    prefixes: tuple[str, ...]
    tensors: dict[str, TensorHandle]
    unexpected: dict[str, TensorHandle]
    trunk: str
    like: dict[str, TensorHandle]

    @property
    def count(self) -> int:
        """The heads of which there are tensors."""
        return sum(any(name.startswith(block) for name in self.tensors) for block in self.blocks)

    @property
    def blocks(self) -> tuple[str, ...]:
        """The prefixes of the heads' decoder layers, one for each head that the config promises."""
        return tuple(
            self.prefixes[min(i, len(self.prefixes) - 1)] + block_of(self.kind.parts, i) for i in range(self.promised)
        )

    @property
    def wanted(self) -> dict[str, tuple[int, ...] | None]:
        """Every tensor that the heads must have, with its shape where it is known; of those that are quantized, none
        that only says how."""
        wanted: dict[str, tuple[int, ...] | None] = {}
        parts = self.kind.parts
        if parts is None:
            return wanted
        width = next((handle.shape[-1] for name, handle in self.like.items() if name.endswith("norm.weight")), None)
        for prefix in self.prefixes if self.promised else ():
            for norm in (parts.embedding_norm, parts.hidden_norm, parts.final_norm):
                wanted[f"{prefix}{norm}.weight"] = None if width is None else (width,)
            wanted[f"{prefix}{parts.projection}.weight"] = None if width is None else (width, 2 * width)
        for block in self.blocks:
            wanted |= {block + name: handle.shape for name, handle in self.like.items() if name.endswith(WEIGHTS)}
        return wanted

    @property
    def missing(self) -> list[str]:
        """Those of them that are not there."""
        return [name for name in self.wanted if name not in self.tensors]


def block_of(parts: HeadParts | None, index: int) -> str:
    """What stands before the names of a head's decoder layer, below the prefix."""
    return "" if parts is None else parts.block.format(index=index)


def find_heads(checkpoint: Checkpoint) -> TargetHeads | None:
    """The heads of a target, which may be none; None where its kind has none that draftkit knows."""
    kind = head_kind(checkpoint.config)
    layers = language_model(checkpoint.config).get("num_hidden_layers")
    if kind is None or not isinstance(layers, int):
        return None
    promised = heads_promised(checkpoint.config)
    prefixes = kind.prefixes(max(promised, 1), layers)
    tensors = {n: handle for n, handle in checkpoint.tensors.items() if n.startswith(prefixes)}
    later = tuple(set(kind.prefixes(promised + 8, layers)) - set(prefixes))  # more than any target has
    unexpected = {n: handle for n, handle in checkpoint.tensors.items() if later and n.startswith(later)}
    trunk, like = _like(checkpoint.tensors, tensors, kind, prefixes)
    return TargetHeads(kind, promised, prefixes, tensors, unexpected, trunk, like)


def _like(
    all_tensors: Mapping[str, TensorHandle],
    heads: Mapping[str, TensorHandle],
    kind: HeadKind,
    prefixes: tuple[str, ...],
) -> tuple[str, dict[str, TensorHandle]]:
    """The target's layer whose tensors have most names in common with those of the first head's decoder layer."""
    block = prefixes[0] + block_of(kind.parts, 0)
    own = {name.removeprefix(block) for name in heads if name.startswith(block)}
    layers: dict[tuple[str, int], dict[str, TensorHandle]] = {}
    for name, handle in all_tensors.items():
        if name not in heads and (match := LAYER.fullmatch(name)):
            layers.setdefault((match[1], int(match[2])), {})[match[3]] = handle
    if not layers:
        return "", {}
    best = max(layers, key=lambda layer: (len(own & layers[layer].keys()), layer[1]))
    return f"{best[0]}{best[1]}.", layers[best]
