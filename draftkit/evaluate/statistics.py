"""Acceptance statistics, derived from the record of rounds. Definitions are vLLM's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from draftkit.runtime.records import Generation

RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """A mean with the 95 % interval of a bootstrap over prompts."""

    mean: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def acceptance_length(generations: Sequence[Generation], seed: int = 0) -> Interval:
    """Mean acceptance length 1 + accepted / rounds, the target's own token counted, over all rounds.

    Prompts are resampled, not rounds, because the rounds of one answer resemble each other. NaN without any round.
    """
    return bootstrap_length([(sum(r.accepted for r in g.rounds), len(g.rounds)) for g in generations if g.rounds], seed)


def bootstrap_length(sums: Sequence[tuple[float, int]], seed: int = 0) -> Interval:
    """The mean length of (accepted, rounds) for each prompt, with its interval; NaN of nothing."""
    if not sums:
        return Interval(float("nan"), float("nan"), float("nan"))
    generator = random.Random(seed)
    means = sorted(_length(generator.choices(sums, k=len(sums))) for _ in range(RESAMPLES))
    return Interval(_length(sums), means[RESAMPLES * 25 // 1000], means[RESAMPLES * 975 // 1000])


def expected_acceptance_length(generations: Sequence[Generation], seed: int = 0) -> Interval:
    """The acceptance length that the target's and the draft's probabilities in the same forwards predict.

    Draft token k+1 counts with its probability of standing wherever the k before it stand: Σ_v min(p_v, q_v) where
    it was drawn from q, p of it where it was chosen. Its mean is that of the measured length, its variance smaller;
    a gap between the two is a bug. NaN without any round.
    """
    sums = [(sum(sum(r.expected[: r.accepted + 1]) for r in g.rounds), len(g.rounds)) for g in generations if g.rounds]
    return bootstrap_length(sums, seed)


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean, median and 99th percentile in milliseconds; None of nothing."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    p50, p99 = (ordered[round(share * (len(ordered) - 1))] for share in (0.5, 0.99))
    return {"mean": 1000 * sum(ordered) / len(ordered), "p50": 1000 * p50, "p99": 1000 * p99}


def accepted_per_position(generations: Sequence[Generation], k: int) -> list[int]:
    """Entry i: in how many rounds draft token i+1 was accepted (vLLM's `num_accepted_tokens_per_pos`)."""
    accepted = [r.accepted for g in generations for r in g.rounds]
    return [sum(a > position for a in accepted) for position in range(k)]


def _length(sums: Sequence[tuple[float, int]]) -> float:
    return 1 + sum(accepted for accepted, _ in sums) / sum(rounds for _, rounds in sums)
