"""Output layers: from states to logits in float32."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class OutputHead(NamedTuple):
    """`weight` [V, H], `bias` [V] or None."""

    weight: Tensor
    bias: Tensor | None = None

    def to(self, dtype: torch.dtype) -> OutputHead:
        return OutputHead(self.weight.to(dtype), None if self.bias is None else self.bias.to(widened(dtype)))

    def logits(self, states: Tensor) -> Tensor:
        """float32 [n, V] of `states` [n, H] in the weight's type."""
        logits = product(states, self.weight.T)
        return logits if self.bias is None else logits.add_(self.bias)


def compute_dtype(*factors: Tensor) -> torch.dtype:
    """The type to multiply in: bfloat16 where a GPU has one factor in it, else float32, or float64 if they are."""
    if any(factor.is_cuda and factor.dtype == torch.bfloat16 for factor in factors):
        return torch.bfloat16
    dtype = torch.float32
    for factor in factors:
        dtype = torch.promote_types(dtype, factor.dtype)
    return dtype


def widened(dtype: torch.dtype) -> torch.dtype:
    """The type of a product's sums."""
    return torch.promote_types(dtype, torch.float32)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Of two matrices in one `compute_dtype`; a sum is never rounded to bfloat16."""
    if left.dtype == torch.bfloat16:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left @ right


def add_product(sums: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `product` to `sums`, in one pass where torch has that."""
    if left.dtype == torch.bfloat16:
        sums += product(left, right)
    else:
        sums.addmm_(left, right)


def rows_at_once(size: int, device: torch.device) -> int:
    """How many rows of `size` logits to hold at a time: enough to keep a GPU busy, few enough for a CPU's cache."""
    budget = 1 << (26 if device.type == "cuda" else 18)
    return max(budget // size, 128)  # fewer would wait for the head's weights
