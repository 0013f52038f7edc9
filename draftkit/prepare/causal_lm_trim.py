"""Making a dense causal LM smaller: fewer layers, fewer MLP channels. What is left needs training."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from draftkit.errors import DraftkitError, FormatError
from draftkit.io.handles import Chunk, TensorHandle, raw_memory
from draftkit.layout.decoder import DENSE_MODEL_TYPES, decoder_of_config
from draftkit.layout.families.causal_lm import CausalLMSpec
from draftkit.layout.folder import Draft

LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
# How the channels of a gated MLP lie in its tensors: the dimension that counts them.
CHANNELS = {
    "mlp.gate_proj.weight": 0,
    "mlp.up_proj.weight": 0,
    "mlp.down_proj.weight": 1,
    "mlp.gate_proj.bias": 0,
    "mlp.up_proj.bias": 0,
}


def parse_layers(text: str, num_layers: int) -> tuple[int, ...]:
    """`12`: that many layers; `0,1,5`: these. Raises `DraftkitError` for layers that there are not."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    chosen = evenly_spread(numbers[0], num_layers) if "," not in text and numbers else tuple(numbers)
    if not chosen or list(chosen) != sorted(set(chosen)) or not 0 <= chosen[0] <= chosen[-1] < num_layers:
        raise DraftkitError(
            f"layers {text}", expected=f"a number from 1 to {num_layers}, or different layers in order, as 0,1,5"
        )
    return chosen


def evenly_spread(count: int, num_layers: int) -> tuple[int, ...]:
    """`count` of the layers at even distances, the first and the last among them; one layer is the first."""
    if not 1 <= count <= num_layers:
        return ()
    return tuple(round(index * (num_layers - 1) / max(count - 1, 1)) for index in range(count))


def keep_layers(draft: Draft, text: str) -> tuple[Draft, tuple[int, ...]]:
    """The draft with the layers that `parse_layers` reads from `text`, in their order, and their numbers."""
    lm = _dense(draft)
    layers = parse_layers(text, decoder_of_config(lm.config).num_hidden_layers)
    place = {layer: index for index, layer in enumerate(layers)}
    tensors = {}
    for name, handle in draft.tensors.items():
        if match := LAYER.fullmatch(name):
            if int(match[1]) not in place:
                continue
            name = f"model.layers.{place[int(match[1])]}.{match[2]}"
        tensors[name] = replace(handle, name=name)
    config = lm.config | {"num_hidden_layers": len(layers)}
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        config["layer_types"] = [kinds[layer] for layer in layers]
    elif config.get("use_sliding_window"):
        raise FormatError(
            "the config counts from which layer on attention slides", where=draft.path, expected="layer_types"
        )
    return _with_config(draft, config, tensors), layers


def keep_channels(draft: Draft, width: int) -> Draft:
    """The draft with the `width` channels of every MLP that have the largest product of norms, in their order.

    The norms are those of the channel's weights in gate, up and down: the product bounds what the channel adds.
    """
    lm = _dense(draft)
    full = decoder_of_config(lm.config).intermediate_size
    if not 1 <= width <= full:
        raise DraftkitError(f"an intermediate size of {width}", expected=f"1 to {full}")
    tensors = dict(draft.tensors)
    for index in range(decoder_of_config(lm.config).num_hidden_layers):
        prefix = f"model.layers.{index}."
        mlp = {part: tensors[prefix + part] for part in CHANNELS if prefix + part in tensors}
        kept = cache(partial(_strongest, mlp, width))
        tensors |= {prefix + part: _selected(handle, CHANNELS[part], width, kept) for part, handle in mlp.items()}
    return _with_config(draft, lm.config | {"intermediate_size": width}, tensors)


def _strongest(mlp: Mapping[str, TensorHandle], width: int) -> Tensor:
    """The channels to keep of one MLP, ascending: int64 [width]."""
    norms = [
        torch.linalg.vector_norm(mlp[part].load(), dim=1 - CHANNELS[part], dtype=torch.float32)
        for part in ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")
    ]
    strength = norms[0] * norms[1] * norms[2]
    return strength.sort(descending=True, stable=True).indices[:width].sort().values


def _selected(handle: TensorHandle, dimension: int, width: int, kept: Callable[[], Tensor]) -> TensorHandle:
    """A tensor with the channels `kept` along one dimension, chosen when it is read."""

    def stream(size: int) -> Iterator[Chunk]:
        memory = raw_memory(handle.load().index_select(dimension, kept()))
        for start in range(0, len(memory), size):
            yield memory[start : start + size]

    shape = tuple(width if axis == dimension else length for axis, length in enumerate(handle.shape))
    return replace(handle, shape=shape, reader=stream)


def _dense(draft: Draft) -> CausalLMSpec:
    """The causal LM of a draft. Raises `FormatError` for families whose layers have other names or parts."""
    lm = draft.spec.architecture.expect(CausalLMSpec)
    kind = lm.config.get("model_type")
    if kind not in DENSE_MODEL_TYPES:
        raise FormatError(
            f"models of the type {kind} cannot be trimmed", where=draft.path, expected=" or ".join(DENSE_MODEL_TYPES)
        )
    return lm


def _with_config(draft: Draft, config: dict[str, object], tensors: dict[str, TensorHandle]) -> Draft:
    architecture = replace(draft.spec.architecture.expect(CausalLMSpec), config=config)
    return replace(draft, spec=replace(draft.spec, architecture=architecture), tensors=tensors)
