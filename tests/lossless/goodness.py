"""Goodness of fit to a known distribution, and rare events. Everything in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_EXPECTED = 5.0  # draws in a cell, below which cells are pooled


@dataclass(frozen=True)
class ChiSquare:
    """A statistic, its degrees of freedom, and how many draws were compared; those of independent samples add up.

    `allowed` was taken off the statistic, and is missing from what it can show.
    """

    statistic: float
    degrees: int
    draws: int = 0
    allowed: float = 0.0

    def __add__(self, other: ChiSquare) -> ChiSquare:
        return ChiSquare(
            self.statistic + other.statistic,
            self.degrees + other.degrees,
            self.draws + other.draws,
            self.allowed + other.allowed,
        )

    @property
    def p_value(self) -> float:
        """The probability of a statistic as large as this; 1 where there was nothing to compare."""
        if self.degrees == 0:
            return float(self.statistic == 0)
        halves = torch.tensor([self.degrees, self.statistic], dtype=torch.float64) / 2
        return float(torch.special.gammaincc(halves[0], halves[1]))

    def detectable(self, rate: float, power: float) -> float:
        """The smallest total variation between two distributions that makes a p-value below `rate` with probability
        `power`, whatever way they differ; 1 where nothing smaller does.

        A total variation of δ adds 4 δ² for each draw to the statistic, at least: Σ Δ²/p ≥ (Σ |Δ|)² by Cauchy and
        Schwarz, and Σ |Δ| = 2 δ.
        """
        if self.degrees == 0 or self.draws == 0:
            return 1.0
        critical = _bisected(lambda x: ChiSquare(x, self.degrees).p_value >= rate) + self.allowed
        added = _bisected(lambda extra: _noncentral_tail(critical, self.degrees, extra) < power)
        return min(1.0, math.sqrt(added / (4 * self.draws)))


NOTHING = ChiSquare(0.0, 0)


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


def detectable_rate(trials: int, power: float) -> float:
    """The smallest rate of events of which one is seen among `trials` with probability `power`."""
    return 1.0 if trials == 0 else -math.expm1(math.log1p(-power) / trials)


def _noncentral_tail(x: float, degrees: int, extra: float) -> float:
    """The probability that a χ² statistic exceeds `x` where the distributions' difference adds `extra` to it: a Poisson
    mixture of central ones.
    """
    mean = extra / 2
    width = 12 * math.sqrt(mean + 1) + 12
    events = torch.arange(max(0, math.floor(mean - width)), math.ceil(mean + width), dtype=torch.float64)
    weights = (torch.xlogy(events, torch.tensor(mean, dtype=torch.float64)) - mean - torch.lgamma(events + 1)).exp()
    return float((weights * torch.special.gammaincc(degrees / 2 + events, torch.full_like(events, x / 2))).sum())


def _bisected(below: Callable[[float], bool]) -> float:
    """The number at which `below`, which holds from 0 on, ceases to hold, found by bisection."""
    high = 1.0
    while below(high):
        high *= 2
    low = 0.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return high
