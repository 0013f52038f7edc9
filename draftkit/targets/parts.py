"""Parts of a target without the rest of it, as transformers builds them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from draftkit.errors import TargetError, UnsupportedTarget
from draftkit.io.handles import TensorHandle
from draftkit.io.tensors import open_checkpoint
from draftkit.targets.finite import require_finite
from draftkit.targets.pretrained import empty_model, read_model_config, stored_names
from draftkit.targets.quantized import SCALES


def load_parts(
    folder: Path, choose: Callable[[PreTrainedModel], Sequence[nn.Module]], dtype: torch.dtype
) -> Sequence[nn.Module]:
    """The modules that `choose` finds in the target, on the CPU; only their weights are read.

    Raises `TargetError` where the checkpoint lacks one of them, `UnsupportedTarget` for quantized ones and
    `NonFiniteError` for weights with NaN or infinity.
    """
    model = empty_model(read_model_config(folder, whole=False), dtype)
    tensors = open_checkpoint(folder)
    stored = stored_names(model, tensors)
    names = {part: name for name, part in model.named_modules()}
    parts = choose(model)
    for part in parts:
        found = {}
        for own in part.state_dict():
            name = f"{names[part]}.{own}"
            if name not in stored:
                raise TargetError(f"the target's checkpoint has no tensor {name}", where=folder)
            found[own] = tensors[stored[name]]
        require_plain(found.values(), tensors, folder)
        weights = {own: handle.load().to(dtype) for own, handle in found.items()}
        require_finite(((found[own].name, weight) for own, weight in weights.items()), folder)
        part.load_state_dict(weights, strict=True, assign=True)
        part.eval().requires_grad_(False)
    return parts


def require_plain(weights: Iterable[TensorHandle], names: Iterable[str], folder: Path) -> None:
    """Raise `UnsupportedTarget` for quantized weights, whose scales are stored beside them."""
    modules = tuple(f"{handle.name.rpartition('.')[0]}." for handle in weights)
    if scales := [name for name in names if name.startswith(modules) and name.endswith(SCALES)]:
        raise UnsupportedTarget(f"a weight of it that is needed is quantized ({min(scales)})", where=folder)
