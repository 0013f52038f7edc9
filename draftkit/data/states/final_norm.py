"""A target's final norm alone, for states that were taken before it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from draftkit.errors import TargetError
from draftkit.targets.parts import load_parts
from draftkit.targets.states import decoder_of


def load_final_norm(folder: Path, dtype: torch.dtype) -> nn.Module:
    """The module of the target's decoder that gives its last states, as transformers builds it; on the CPU.

    Only its weights are read. Raises `DraftkitError` when there is no such module or it has no weights.
    """
    (norm,) = load_parts(folder, lambda model: [final_norm(model)], dtype)
    return norm


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
