"""From the loss mask to the weight of each row in the loss: what trainers do implicitly, stated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from draftkit.io.records import Bounds

Denominator = Literal["tokens", "rows"]


@dataclass(frozen=True)
class Reduction:
    """How K steps of N rows become one number; learning rates carry over only between equal reductions.

    - `denominator` of each step: `tokens`, its rows of the mask, or `rows`, all of them (EAGLE-3 as published).
    - `decay` γ: step t counts γ^t, and with `normalized` these factors are divided by their sum.
    """

    denominator: Denominator = "tokens"
    decay: Annotated[float, Bounds(above=0, most=1)] = 1.0
    normalized: bool = True

    def weights(self, mask: Tensor, counts: Tensor | None = None) -> Tensor:
        """The weight of each row: float32 [K, N] of `mask` [K, N], bool, or numbers that scale rows as well.

        `counts` [K] are the denominators where the mask is only a part of the batch: of all devices and accumulated
        batches together. A step without rows of the mask weighs nothing.
        """
        steps, rows = mask.shape
        mask = mask.float()
        if counts is None:
            counts = mask.sum(-1) if self.denominator == "tokens" else mask.new_full((steps,), rows)
        factors = self.decay ** torch.arange(steps, dtype=torch.float32, device=mask.device)
        if self.normalized:
            factors = factors / factors.sum()
        return mask * torch.where(counts > 0, factors / counts, 0)[:, None]
