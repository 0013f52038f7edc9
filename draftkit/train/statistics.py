"""What a training step logs, per step of its chains. R rows, K steps, N positions."""

from __future__ import annotations

import torch
from torch import Tensor

from draftkit.train.losses.linear import LinearLoss


@torch.no_grad()
def step_statistics(found: LinearLoss, steps: Tensor, positions: Tensor, counted: Tensor) -> dict[str, Tensor]:
    """Means over the counted rows of each step: loss, agreement with the target's choice, acceptance probability, and
    over all rows the target's mass that the draft vocabulary lacks.

    `steps`, `positions` int64 [R] of the rows; `counted` bool [K, N].
    """
    weight = counted[steps, positions].float()
    k = len(counted)
    totals = weight.new_zeros(k).index_add_(0, steps, weight).clamp(min=1)
    out: dict[str, Tensor] = {}
    for name, values in (("loss", found.loss), ("agree", found.agree), ("alpha", found.alpha)):
        if values is not None:
            means = weight.new_zeros(k).index_add_(0, steps, values.float() * weight) / totals
            out |= {f"{name}_{t + 1}": mean for t, mean in enumerate(means)}
    if found.oov is not None:
        out["oov"] = (found.oov.float() * weight).sum() / weight.sum().clamp(min=1)
    return out
