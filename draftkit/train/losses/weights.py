"""The weight of each row in the loss.

`Reduction` states what trainers do implicitly, from the loss mask to a denominator; `Reach` multiplies it by the chance
that serving gets to a draft of a chain, from the draft's own probabilities. N positions, M chains of K drafts, R rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from draftkit.io.records import Bounds
from draftkit.io.settings import setting

Denominator = Literal["tokens", "rows"]


@dataclass(frozen=True)
class Reduction:
    """How K steps of N rows become one number; learning rates carry over only between equal reductions."""

    denominator: Denominator = setting(
        "What the sum of each step is divided by: tokens, its rows of the mask, or rows, all of them (EAGLE-3"
        " as published).",
        "tokens",
    )
    decay: Annotated[float, Bounds(above=0, most=1)] = setting(
        "The factor from each step's loss to the next one's.", 1.0
    )
    normalized: bool = setting("Whether the factors of the steps are divided by their sum.", True)

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


class Reach:
    """Factors of the weights of rows, which come some after the other.

    - `places` int64 [R] of the rows in [M, K], flattened; `shape`: M and K.
    - `factors`: of the chances [M, K] that each draft is the target's choice; those of rows that have not come are 0.
    - `together`: so many rows in a row have to come at once. `alpha` α: a chance p is taken as (1 − α)·p + α.
    """

    def __init__(
        self,
        places: Tensor,
        shape: tuple[int, int],
        factors: Callable[[Tensor], Tensor],
        *,
        together: int,
        alpha: float,
    ):
        self.places, self.factors, self.together, self.alpha = places, factors, together, alpha
        self._chances = torch.zeros(shape, device=places.device)

    def of(self, rows: Tensor, log_chance: Tensor) -> Tensor:
        """float32 [n] of `rows` int64 [n], and the draft's log-probability [n] of the target's choice in each."""
        places = self.places[rows]
        self._chances.view(-1)[places] = (1 - self.alpha) * log_chance.float().exp() + self.alpha
        return self.factors(self._chances).flatten()[places]


def reached(chances: Tensor) -> Tensor:
    """The chance that all drafts before each are right."""
    return torch.cat((torch.ones_like(chances[:, :1]), chances[:, :-1].cumprod(1)), dim=1)


def marginal(chances: Tensor) -> Tensor:
    """D-PACE: of draft t the sum over m ≥ t of the chance that all drafts up to m are right."""
    return chances.cumprod(1).flip(1).cumsum(1).flip(1)
