"""A target's final norm alone, for states that were taken before it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from draftkit.errors import TargetError
from draftkit.io.tensors import open_checkpoint
from draftkit.models.pretrained import empty_model, read_model_config, stored_names
from draftkit.models.states import decoder_of


def load_final_norm(folder: Path, dtype: torch.dtype) -> nn.Module:
    """The module of the target's decoder that gives its last states, as transformers builds it; on the CPU.

    Only its weights are read. Raises `DraftkitError` when there is no such module or it has no weights.
    """
    model = empty_model(read_model_config(folder, whole=False), dtype)
    norm = final_norm(model)
    tensors = open_checkpoint(folder)
    stored = stored_names(model, tensors)
    names = {part: name for name, part in model.named_modules()}
    weights = {}
    for part in norm.state_dict():
        name = f"{names[norm]}.{part}"
        if name not in stored:
            raise TargetError(f"the target's checkpoint has no tensor {name}", where=folder, expected="its final norm")
        weights[part] = tensors[stored[name]].load().to(dtype)
    norm.load_state_dict(weights, strict=True, assign=True)
    return norm.eval().requires_grad_(False)


def final_norm(model: PreTrainedModel) -> nn.Module:
    """The norm that follows the decoder's layers. Raises `TargetError` where there is none."""
    decoder = decoder_of(model)
    parts = list(decoder.named_children())
    layers = next(number for number, (_, part) in enumerate(parts) if isinstance(part, nn.ModuleList))
    for number, (name, part) in enumerate(parts):
        # OPT's is made before the layers, where others have norms of their embeddings.
        if "norm" in type(part).__name__.lower() and (number > layers or "final" in name):
            return part
    raise TargetError(f"{type(decoder).__name__} does not end in a norm")
