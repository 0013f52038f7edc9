"""How far apart two computations of the same number may lie, on whatever CPU.

CPUs and libraries add up in different orders. A sum is then off by some units in the last place of its largest terms,
and each product that reads it adds as much again: the error grows with the dtype's epsilon, with the magnitude of what
is computed, and with how many products follow each other. A mistake in what is computed lies orders of magnitude above.
"""

from __future__ import annotations

import torch
from torch import Tensor

MARGIN = 8  # epsilons for each product; with any setting of ATen, MKL and oneDNN the largest seen was 1.3
LAYER = 5  # products of a decoder layer that follow each other: queries and keys, scores, values, and two of the MLP


def tolerance(magnitude: Tensor | float, *, depth: int, dtype: torch.dtype = torch.float32) -> float:
    """The absolute error that `depth` products one after the other, in `dtype`, may leave in numbers that are as large
    as `magnitude`."""
    largest = float(magnitude.detach().abs().max()) if isinstance(magnitude, Tensor) else magnitude
    return MARGIN * depth * torch.finfo(dtype).eps * largest


def assert_close(found: Tensor, expected: Tensor, *, depth: int, magnitude: Tensor | float | None = None) -> None:
    """Equal but for the rounding of `depth` products in the dtype of `found`.

    `magnitude`: of the numbers that were rounded, where `expected` is not one of them, as logits are to probabilities.
    """
    atol = tolerance(expected if magnitude is None else magnitude, depth=depth, dtype=found.dtype)
    torch.testing.assert_close(found.to(expected.dtype), expected, rtol=0, atol=atol)
