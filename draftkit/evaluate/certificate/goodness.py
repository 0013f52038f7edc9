"""Goodness of fit, and p-values of many tests together. Everything in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_EXPECTED = 5.0  # draws in a cell, below which cells are pooled


@dataclass(frozen=True)
class ChiSquare:
    """A statistic and its degrees of freedom; those of independent samples add up."""

    statistic: float
    degrees: int

    def __add__(self, other: ChiSquare) -> ChiSquare:
        return ChiSquare(self.statistic + other.statistic, self.degrees + other.degrees)

    @property
    def p_value(self) -> float:
        """The probability of a statistic as large as this; 1 where there was nothing to compare."""
        if self.degrees == 0:
            return float(self.statistic == 0)
        halves = torch.tensor([self.degrees, self.statistic], dtype=torch.float64) / 2
        return float(torch.special.gammaincc(halves[0], halves[1]))


NOTHING = ChiSquare(0.0, 0)


def chi_square(counts: Tensor, law: Tensor) -> ChiSquare:
    """Pearson's test that `counts` [N] were drawn from `law` [N]; the statistic is ∞ where the impossible occurred.

    Cells with fewer than five expected draws are pooled, with the next larger cell where that is still too few.
    """
    counts, law = counts.double().cpu(), law.double().cpu()
    if counts[law == 0].sum() > 0:
        return ChiSquare(torch.inf, 1)
    expected, order = (law / law.sum() * counts.sum()).sort()
    counts = counts[order]
    pooled = int((expected < MIN_EXPECTED).sum())
    if pooled and expected[:pooled].sum() < MIN_EXPECTED:
        pooled += 1
    counts = torch.cat((counts[:pooled].sum()[None], counts[pooled:]))
    expected = torch.cat((expected[:pooled].sum()[None], expected[pooled:]))
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected).square() / expected).sum()
    return ChiSquare(float(statistic), max(len(counts) - 1, 0))


def poisson_tail(observed: int, mean: float) -> float:
    """The probability of `observed` events or more where `mean` are expected."""
    if observed == 0:
        return 1.0
    return float(torch.special.gammainc(*torch.tensor([observed, mean], dtype=torch.float64)))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for all of them being looked at (Holm 1979), in the given order."""
    adjusted, least = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = least
    return adjusted
