"""A `Distribution` inside kernels."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from draftkit.runtime.kernels.backend import jit, tl
from draftkit.runtime.sampling.probabilities import Distribution


def law_arguments(law: Distribution) -> tuple[Tensor, ...]:
    """The pointers `logits, scales, peaks, bests, floors, log_sums` of a kernel's signature."""
    return law.logits.contiguous(), law.scale, *(column.contiguous() for column in law.statistics)


@jit
def load_log_weights(
    logits: tl.tensor,
    peaks: tl.tensor,
    floors: tl.tensor,
    scale: tl.tensor,
    row: tl.tensor,
    token: tl.tensor,
    size: tl.tensor,
) -> Any:
    """`probabilities.log_weights` for a block of tokens of one row int64, −∞ beyond the vocabulary."""
    x = tl.load(logits + row * size + token, mask=token < size, other=-float("inf")).to(tl.float32)
    return tl.where(x >= tl.load(floors + row), (x - tl.load(peaks + row)) * scale, -float("inf"))
