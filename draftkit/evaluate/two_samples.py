"""Whether two samples come from one distribution, where neither distribution is known: that of an engine, with a draft
and without. Everything in float64.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import NormalDist

import torch

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


def homogeneity(one: Sequence[Hashable], other: Sequence[Hashable]) -> ChiSquare:
    """Pearson's test that both were drawn from one distribution.

    Values of which fewer than five are expected in a sample are pooled. `draws` of the result are those of a sample of
    a known distribution that would show as much: a total variation of δ adds 2 n δ² to the statistic of two samples of
    n, at least, where it adds 4 n δ² to that of one.
    """
    sizes = (len(one), len(other))
    if not all(sizes):
        return NOTHING
    counts = Counter(one), Counter(other)
    least = MIN_EXPECTED * sum(sizes) / min(sizes)
    cells, rare = [], [0, 0]
    for value in counts[0].keys() | counts[1].keys():
        pair = [count[value] for count in counts]
        if sum(pair) >= least:
            cells.append(pair)
        else:
            rare = [a + b for a, b in zip(rare, pair, strict=True)]
    if sum(rare) >= least or (cells and sum(rare)):
        cells.append(rare)
    if len(cells) < 2:
        return NOTHING
    statistic = 0.0
    for pair in cells:
        share = sum(pair) / sum(sizes)
        statistic += sum((found - share * size) ** 2 / (share * size) for found, size in zip(pair, sizes, strict=True))
    return ChiSquare(statistic, len(cells) - 1, sizes[0] * sizes[1] // sum(sizes))


@dataclass(frozen=True)
class RankTest:
    """Wilcoxon's test over strata: how far the ranks of one sample are from where they would lie by chance.

    `deviation`, whose variance by chance is `variance`, counts pairs; there are `pairs`.
    """

    deviation: float = 0.0
    variance: float = 0.0
    pairs: int = 0
    draws: int = 0

    def __add__(self, other: RankTest) -> RankTest:
        return RankTest(
            self.deviation + other.deviation,
            self.variance + other.variance,
            self.pairs + other.pairs,
            self.draws + other.draws,
        )

    @property
    def p_value(self) -> float:
        """Two-sided; 1 where there was nothing to compare."""
        return math.erfc(abs(self.deviation) / math.sqrt(2 * self.variance)) if self.variance else 1.0

    def detectable(self, rate: float, power: float) -> float:
        """By how much the chance that a value of one sample exceeds one of the other must differ from a half, so that
        the p-value is below `rate` with probability `power`; 1 where no difference does."""
        if not self.variance:
            return 1.0
        normal = NormalDist()
        distance = normal.inv_cdf(1 - rate / 2) + normal.inv_cdf(power)
        return min(1.0, distance * math.sqrt(self.variance) / self.pairs)


def rank_test(one: Sequence[float], other: Sequence[float]) -> RankTest:
    """A test of whether one sample tends to larger values than the other; ties count half."""
    if not one or not other:
        return RankTest()
    ordered = sorted([(value, 0) for value in one] + [(value, 1) for value in other])
    total, ranks, tied = len(ordered), 0.0, 0.0
    at = 0
    for _, group in groupby(ordered, key=lambda entry: entry[0]):
        members = [side for _, side in group]
        ranks += (at + (len(members) + 1) / 2) * members.count(0)
        tied += len(members) ** 3 - len(members)
        at += len(members)
    pairs = len(one) * len(other)
    variance = pairs / 12 * (total + 1 - tied / (total * (total - 1)))
    return RankTest(ranks - len(one) * (total + 1) / 2, variance, pairs, total)


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
