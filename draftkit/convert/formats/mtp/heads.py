"""The multi-token prediction heads of a target: those that its config promises, and those that its weights hold."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from draftkit.convert.checkpoint import Checkpoint
from draftkit.errors import LayoutError
from draftkit.io.dtypes import FLOATS
from draftkit.io.handles import TensorHandle
from draftkit.io.records import excerpt
from draftkit.layout.families.mtp import MtpSpec
from draftkit.layout.mtp import MOST, HeadKind, HeadParts, head_kind, heads_promised
from draftkit.layout.target import language_model

PACKED = ("_packed", "qweight", "_blocks")  # how names of packed weights end
WEIGHTS = (".weight", ".bias", "_bias", "_sinks")
PROJECTIONS = ("eh_proj", "input_proj", "linear_proj")  # of both halves, side by side
NORMS = ("enorm", "hnorm", "emb_norm", "embed_norm", "hidden_norm", "final_layernorm")
LAYER = re.compile(r"(.*\blayers\.)(\d+)\.(.+)")


def refuse_window(spec: MtpSpec, where: Path) -> None:
    """Raise `LayoutError` for heads with a window of their own, which the config of no target says."""
    if spec.sliding_window is not None:
        raise LayoutError(
            f"the heads have a window of {spec.sliding_window} tokens, and beside a target they run with its windows",
            where=where,
            hint="use --to unified, or take it away: draftkit convert --set sliding_window=none --set sink_tokens=0",
        )


@dataclass(frozen=True)
class TargetHeads:
    """What a checkpoint has of its target's heads.

    `promised`: how many the config says that there are. `tensors` by name; those of heads that the config does not
    promise are `unexpected`. `like`: the decoder layer of the target itself that is most like a head's, its tensors by
    what comes after the layer's prefix `trunk`; empty where the checkpoint holds the heads alone. `num_layers`: the
    target's, by its config.
    """

    kind: HeadKind
    promised: int
    prefixes: tuple[str, ...]
    tensors: dict[str, TensorHandle]
    unexpected: dict[str, TensorHandle]
    trunk: str
    like: dict[str, TensorHandle]
    num_layers: int

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
        that only says how. Of kinds that draftkit does not run, those around the decoder layer."""
        width = next((handle.shape[-1] for name, handle in self.like.items() if name.endswith("norm.weight")), None)
        parts, wanted = self.kind.parts, dict[str, tuple[int, ...] | None]()
        shapes = {name: None if width is None else _shape(name, width) for name in self.kind.names}
        if parts is not None:
            norms = parts.embedding_norm, parts.hidden_norm, parts.final_norm
            shapes = dict.fromkeys(norms, None if width is None else (width,)) | {
                parts.projection: None if width is None else (width, 2 * width)
            }
        for prefix in self.prefixes if self.promised else ():
            wanted |= {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}
        for block in self.blocks if parts is not None else ():
            wanted |= {block + name: handle.shape for name, handle in self.like.items() if name.endswith(WEIGHTS)}
        return wanted

    @property
    def misshapen(self) -> list[str]:
        """Plain tensors of the heads that have other shapes than they must, in words."""
        plain = [name for name in self.wanted if name in self.tensors and self.tensors[name].dtype in FLOATS]
        return [
            f"{name} is {list(self.tensors[name].shape)}, the target's are {list(shape)}"
            for name in plain
            if (shape := self.wanted[name]) not in (None, self.tensors[name].shape) and shape is not None
        ]

    @property
    def missing(self) -> list[str]:
        """The wanted tensors that the checkpoint lacks, under their own name and under that of a packed weight."""
        modules = {name.rpartition(".")[0] for name in self.tensors if name.endswith(PACKED)}
        return [n for n in self.wanted if n not in self.tensors and n.removesuffix(".weight") not in modules]


def block_of(parts: HeadParts | None, index: int) -> str:
    """What stands before the names of a head's decoder layer, below the prefix."""
    return "" if parts is None else parts.block.format(index=index)


def _shape(name: str, width: int) -> tuple[int, ...] | None:
    """The shape of a tensor that several kinds of heads have; None for another."""
    own = name.removesuffix(".m").removesuffix(".0").rpartition(".")[2]
    if own in PROJECTIONS:
        return width, 2 * width
    return (width,) if own in NORMS else None


def find_heads(checkpoint: Checkpoint) -> TargetHeads | None:
    """The heads of a target, which may be none; None where its kind has none that draftkit knows. Raises `LayoutError`
    for a config that says how many heads or layers there are, and no number."""
    known = head_kind(checkpoint.config)
    text = language_model(checkpoint.config)
    layers = text.get("num_hidden_layers", text.get("num_layers"))
    if known is None or layers is None:
        return None
    if type(layers) is not int or layers < 0:
        raise LayoutError(f"the target's num_hidden_layers is {excerpt(layers)}", where=checkpoint.config_path)
    kind = next((k for k in known.spellings() if _held(checkpoint, k, layers)), known)
    promised = heads_promised(checkpoint.config, kind, _held(checkpoint, kind, layers))
    prefixes = kind.prefixes(max(promised, 1), layers)
    own = prefixes if kind.beside is None else (*prefixes, kind.beside)
    tensors = {n: handle for n, handle in checkpoint.tensors.items() if n.startswith(own)}
    later = tuple(set(kind.prefixes(promised + MOST, layers)) - set(prefixes))
    unexpected = {n: handle for n, handle in checkpoint.tensors.items() if later and n.startswith(later)}
    trunk, like = _like(checkpoint.tensors, tensors, kind, prefixes)
    return TargetHeads(kind, promised, prefixes, tensors, unexpected, trunk, like, layers)


def _held(checkpoint: Checkpoint, kind: HeadKind, layers: int) -> int:
    """The number of heads that there are tensors of, where each has a prefix of its own; else one or none."""
    prefixes = kind.prefixes(MOST, layers)
    return sum(any(name.startswith(prefix) for name in checkpoint.tensors) for prefix in prefixes)


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
