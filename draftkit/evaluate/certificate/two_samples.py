"""Whether two samples come from one distribution, where neither distribution is known: that of an engine, with a draft
and without.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import NormalDist

from draftkit.evaluate.certificate.goodness import MIN_EXPECTED, NOTHING, ChiSquare


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
    """That neither sample tends to larger values; ties count half."""
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
