"""Activations that are computed again in the backward pass instead of being kept (`optimization.recompute`)."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP


def recompute_activations(draft: nn.Module) -> None:
    """Have a draft keep less: the layers of a transformers model, the MLPs of the others, whose attention keeps the
    keys and values of its chains in any case."""
    if isinstance(draft, PreTrainedModel):
        draft.gradient_checkpointing_enable({"use_reentrant": False})
        return
    for module in draft.modules():
        if isinstance(module, LlamaMLP):
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
