"""What the drafts of a chain count by the chance that serving gets to them, from the draft's own probabilities.

M chains of K drafts, R rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


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
