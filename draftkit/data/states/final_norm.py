"""A target's final norm alone, for states that were taken before it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from draftkit.errors import TargetError
from draftkit.io.tensors import open_checkpoint
from draftkit.models.pretrained import empty_model, read_model_config
from draftkit.models.states import decoder_of


def load_final_norm(folder: Path, dtype: torch.dtype) -> nn.Module:
    """The module of the target's decoder that gives its last states, as transformers builds it; on the CPU.

    Only its weights are read. Raises `DraftkitError` when there is no such module or it has no weights.
    """
    name, norm = _final_norm(folder)
    tensors = open_checkpoint(folder)
    weights = {}
    for part in norm.state_dict():
        # Checkpoints differ in what stands before the decoder's own names.
        ending = f"{name}.{part}"
        found = [n for n in tensors if f".{n}".endswith(f".{ending}") and ".layers." not in f".{n}"]
        if len(found) != 1:
            raise TargetError(f"the target has {len(found)} tensors …{ending}", where=folder, expected="its final norm")
        weights[part] = tensors[found[0]].load().to(dtype)
    norm.load_state_dict(weights, strict=True, assign=True)
    return norm.eval().requires_grad_(False)


def _final_norm(folder: Path) -> tuple[str, nn.Module]:
    """The norm that follows the decoder's layers, with its name; without memory for its weights."""
    decoder = decoder_of(empty_model(read_model_config(folder), torch.float32))
    parts = list(decoder.named_children())
    layers = next(number for number, (_, part) in enumerate(parts) if isinstance(part, nn.ModuleList))
    for number, (name, part) in enumerate(parts):
        # OPT's is made before the layers, where others have norms of their embeddings.
        if "norm" in type(part).__name__.lower() and (number > layers or "final" in name):
            return name, part
    raise TargetError(f"{type(decoder).__name__} does not end in a norm", where=folder)
