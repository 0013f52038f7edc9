"""Goodness of fit to a known distribution, and rare events. Everything in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from draftkit.evaluate.two_samples import MIN_EXPECTED, NOTHING, ChiSquare


def chi_square(counts: Tensor, distribution: Tensor) -> ChiSquare:
    """Pearson's test that `counts` [N] were drawn from `distribution` [N]; the statistic is ∞ where the impossible
    occurred.

    Cells with fewer than five expected draws are pooled, with the next larger cell where that is still too few.
    """
    counts, distribution = counts.double().cpu(), distribution.double().cpu()
    if counts[distribution == 0].sum() > 0:
        return ChiSquare(torch.inf, 1)
    expected, order = (distribution / distribution.sum() * counts.sum()).sort()
    counts = counts[order]
    pooled = int((expected < MIN_EXPECTED).sum())
    if pooled and expected[:pooled].sum() < MIN_EXPECTED:
        pooled += 1
    counts = torch.cat((counts[:pooled].sum()[None], counts[pooled:]))
    expected = torch.cat((expected[:pooled].sum()[None], expected[pooled:]))
    counts, expected = counts[expected > 0], expected[expected > 0]
    if len(counts) < 2:
        return NOTHING
    statistic = ((counts - expected).square() / expected).sum()
    return ChiSquare(float(statistic), len(counts) - 1, int(counts.sum()))


def poisson_tail(observed: int, mean: float) -> float:
    """The probability of `observed` events or more where `mean` are expected."""
    if observed == 0:
        return 1.0
    return float(torch.special.gammainc(*torch.tensor([observed, mean], dtype=torch.float64)))
