"""How long a target's forward takes, told without its weights: from a product of matrices of its sizes."""

from __future__ import annotations

import time

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftkit.targets.states import decoder_layers, decoder_of

ROWS = 512  # of the product
SECONDS = 0.1  # that it is repeated for
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # what configurations call their number


def token_seconds(model: PreTrainedModel, device: torch.device, dtype: torch.dtype, row: int) -> float:
    """About what the decoder's layers take for a token in a row of `row` tokens, on a device; `model` needs no memory.

    Two operations for each weight that a token meets, and as many for each number of the row's keys and values, which
    masks hide after they were computed.
    """
    text = model.config.get_text_config()
    width = text.hidden_size if getattr(text, "num_attention_heads", None) else 0  # nothing attends in some
    attention = 2 * row * width * len(decoder_layers(decoder_of(model)))
    return 2 * (_active_parameters(model) + attention) / _operations_per_second(model, device, dtype)


def _active_parameters(model: PreTrainedModel) -> float:
    """The weights of the layers, of experts the share that a token goes to."""
    text = model.config.get_text_config()
    experts = next((n for name in EXPERTS if (n := getattr(text, name, None))), None)
    chosen = getattr(text, "num_experts_per_tok", None) or experts
    share = 1.0 if experts is None else chosen / experts
    parts = (part for layer in decoder_layers(decoder_of(model)) for part in layer.named_parameters())
    return sum(p.numel() * (share if ".experts." in name else 1.0) for name, p in parts)


def _operations_per_second(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> float:
    text = model.config.get_text_config()
    size, inner = text.hidden_size, getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    inner = inner if isinstance(inner, int) else max(inner)
    rows, weight = (torch.ones(shape, device=device, dtype=dtype) for shape in ((ROWS, size), (size, inner)))
    _settled(rows @ weight)
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < SECONDS:
        _settled(rows @ weight)
        count += 1
    return count * 2 * ROWS * size * inner / (time.perf_counter() - began)


def _settled(product: Tensor) -> None:
    product[0, 0].item()  # waits for the device
