"""Acceptance statistics, derived from the record of rounds. Definitions are vLLM's, unless they say another tool's.

A round in which nothing was drafted (n-gram lookup without a match, a batch above the schedule) is no round to vLLM,
whose length tells how good a draft is where there is one. What a draft brings is told by all rounds; where none was
skipped, both are the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import atan, cos, exp, isnan, log, log1p, pi, sin, sqrt, tan
from statistics import fmean

from draftkit.results.cell import QUANTILES, Interval, PromptRecord, Times
from draftkit.runtime.records import Generation, Round

LOOPING = 0.5  # share of repeated pairs of tokens above which a text goes round in circles

Sums = Sequence[tuple[float, int]]  # of each prompt: accepted draft tokens, measured or expected, and rounds


def drafted_rounds(generations: Sequence[Generation]) -> list[Round]:
    """The rounds in which something was drafted."""
    return [r for g in generations for r in g.rounds if r.drafted]


@dataclass(frozen=True)
class Estimate:
    """A statistic over prompts, its standard error, and the degrees of freedom that the error is known with."""

    value: float
    error: float
    degrees: float

    def half(self, share: float = 0.95) -> float:
        """Half the interval that holds the true value in this share of all cases, by Student's t."""
        return student(self.degrees, share) * self.error

    def __sub__(self, other: Estimate) -> Estimate:
        """The difference of two that share no prompts (Welch 1947, Satterthwaite 1946)."""
        one, two = self.error**2, other.error**2
        degrees = self.degrees + other.degrees
        if one + two > 0:
            degrees = (one + two) ** 2 / (one**2 / self.degrees + two**2 / other.degrees)
        return Estimate(self.value - other.value, sqrt(one + two), degrees)


def jackknife(rows: Sequence[Sequence[float]], statistic: Callable[[Sequence[float]], float]) -> Estimate:
    """A statistic of the sums of the rows' columns, a row for each of at least two prompts.

    Its standard error is told by leaving out each prompt in turn (Tukey 1958). With Student's t it holds the true
    value as often as it says from 10 prompts on, which a percentile bootstrap does from some 80 on
    (`benchmarks/README.md`).
    """
    prompts, totals = len(rows), [sum(column) for column in zip(*rows, strict=True)]
    without = [statistic([total - own for total, own in zip(totals, row, strict=True)]) for row in rows]
    middle = fmean(without)
    variance = (prompts - 1) / prompts * sum((value - middle) ** 2 for value in without)
    return Estimate(statistic(totals), sqrt(variance), prompts - 1)


def acceptance_length(generations: Sequence[Generation]) -> Interval:
    """Mean acceptance length 1 + accepted / rounds, the target's own token counted, over all rounds.

    The interval is over prompts, not rounds, because the rounds of one answer resemble each other. NaN without any
    round.
    """
    return length_over_prompts([(sum(r.accepted for r in g.rounds), len(g.rounds)) for g in generations if g.rounds])


def drafted_acceptance_length(generations: Sequence[Generation]) -> Interval:
    """The acceptance length over the rounds in which something was drafted, as vLLM counts."""
    drafting = [[r.accepted for r in g.rounds if r.drafted] for g in generations]
    return length_over_prompts([(sum(accepted), len(accepted)) for accepted in drafting if accepted])


def expected_acceptance_length(generations: Sequence[Generation]) -> Interval:
    """The acceptance length that the target's and the draft's probabilities in the same forwards predict.

    Draft token k+1 counts with its probability of standing wherever the k before it stand: Σ_v min(p_v, q_v) where
    it was drawn from q, p of it where it was chosen. Its mean is that of the measured length, its variance smaller;
    a gap between the two beyond chance is a bug. Of drawn drafts under coupled verification it is what rejection would
    accept, a few points more. NaN without any round.
    """
    return length_over_prompts(expected_sums([g.rounds for g in generations if g.rounds]))


def length_over_prompts(sums: Sums) -> Interval:
    """The mean length with its interval, which a single prompt does not have; NaN of nothing."""
    drafting = [row for row in sums if row[1]]
    if len(drafting) < 2:
        return Interval(mean_length(sums), None, None, len(sums))
    found = log_length(drafting)
    mean, half = mean_length(sums), found.half()
    return Interval(mean, max(mean * exp(-half), min(mean, 1.0)), mean * exp(half), len(sums))


def log_length(sums: Sums) -> Estimate:
    """The logarithm of the mean length of at least two prompts with rounds, whose intervals are more even than those of
    the length."""
    return jackknife(sums, lambda totals: log1p(totals[0] / totals[1]))


def expected_sums(rounds: Sequence[Sequence[Round]]) -> Sums:
    """The sums of each prompt's rounds of which `expected_acceptance_length` is the mean."""
    return [(sum(map(_expected, of_prompt)), len(of_prompt)) for of_prompt in rounds]


def mean_length(sums: Sums) -> float:
    """The acceptance length; NaN without any round."""
    return _length([sum(accepted for accepted, _ in sums), sum(rounds for _, rounds in sums)])


def _length(totals: Sequence[float]) -> float:
    accepted, rounds = totals
    return 1 + accepted / rounds if rounds else float("nan")


def gain(before: Sums, after: Sums, comparisons: int = 1) -> Interval:
    """By how much the acceptance length grows, with an interval that holds for all of `comparisons` at 95 %.

    The prompts are the same ones on both sides; each of the comparisons gets its share of the 5 % (Bonferroni), so that
    among many changes that do nothing, none seems to help.
    """
    mean, prompts = mean_length(after) - mean_length(before), len(before)
    rows = [(*one, *other) for one, other in zip(before, after, strict=True)]
    if prompts < 2 or isnan(mean):
        return Interval(mean, None, None, prompts)
    found = jackknife(rows, lambda totals: _length(totals[2:]) - _length(totals[:2]))
    half = found.half(1 - 0.05 / max(comparisons, 1))
    return Interval(mean, *_around(mean, half), prompts)


def contrast(one: Sums, other: Sums) -> Interval:
    """How much longer the length of `one` is than that of `other`, of other prompts."""
    mean, fewest = mean_length(one) - mean_length(other), min(len(one), len(other))
    if fewest < 2:
        return Interval(mean, None, None, fewest)
    half = (jackknife(one, _length) - jackknife(other, _length)).half()
    return Interval(mean, *_around(mean, half), fewest)


def _around(mean: float, half: float) -> tuple[float | None, float | None]:
    """The bounds; none where leaving out a prompt leaves no round."""
    return (None, None) if isnan(half) else (mean - half, mean + half)


def speedup_over_prompts(prompts: Sequence[PromptRecord]) -> Interval | None:
    """How many times faster a token comes with the draft, by the times of each prompt; None without such times."""
    timed = [
        (p.seconds, p.tokens, p.plain_seconds, p.plain_tokens)
        for p in prompts
        if p.seconds and p.tokens and p.plain_seconds and p.plain_tokens
    ]
    if len(timed) < max(len(prompts), 2):
        return None
    return ratio_over_prompts(timed)


def ratio_over_prompts(rows: Sequence[tuple[float, float, float, float]]) -> Interval:
    """How many times as many tokens a second there are by the first two columns, seconds and tokens of each of at least
    two prompts, as by the last two."""

    def ratio(totals: Sequence[float]) -> float:
        seconds, tokens, other_seconds, other_tokens = totals
        return log((other_seconds / other_tokens) / (seconds / tokens))

    found = jackknife(rows, ratio)
    mean, half = exp(found.value), found.half()
    return Interval(mean, mean * exp(-half), mean * exp(half), len(rows))


@cache
def student(degrees: float, share: float = 0.95) -> float:
    """Student's t, two-sided: half the interval of a mean, in standard errors, that holds it in this share of cases."""
    low, high = 0.0, pi / 2
    for _ in range(60):  # halvings, of which a double has no use for more
        middle = (low + high) / 2
        low, high = (middle, high) if _share_between(middle, degrees) < share else (low, middle)
    return sqrt(degrees) * tan(low)


def student_below(value: float, degrees: float) -> float:
    """The probability that Student's t is below a value."""
    within = _share_between(atan(abs(value) / sqrt(degrees)), degrees)
    return (1 + within) / 2 if value > 0 else (1 - within) / 2


def _share_between(angle: float, degrees: float) -> float:
    """The share within ±√degrees · tan(angle); between whole degrees, where Welch's lie, a line."""
    whole = max(int(degrees), 1)
    part = degrees - whole
    share = _share_within(angle, whole)
    return share if part <= 0 else (1 - part) * share + part * _share_within(angle, whole + 1)


def _share_within(angle: float, degrees: int) -> float:
    """The share of Student's distribution within ±√degrees · tan(angle) (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    odd = degrees % 2
    term, total = cos(angle) if odd else 1.0, 0.0
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * cos(angle) ** 2
    share = sin(angle) * total
    return 2 / pi * (angle + share) if odd else share


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for all of them being looked at (Holm 1979), in the given order."""
    adjusted, least = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = least
    return adjusted


def known(interval: Interval) -> Interval | None:
    """The interval; None of nothing."""
    return None if isnan(interval.mean) else interval


def lengths_by_convention(generations: Sequence[Generation], categories: Sequence[str]) -> dict[str, float]:
    """The same rounds as other tools count them, and averaged otherwise. Empty without any round.

    - `vllm`: 1 + accepted / rounds with a draft. `eagle`: tokens emitted a round, as EAGLE's scripts.
    - `sglang`: output tokens, the one of the prefill with them, a round; what an end cuts off does not count.
    - `modelopt`: mean size of a request's chunks, its first token a chunk of one, averaged over requests.
    - `macro by prompt`, `macro by category`: vLLM's length of each, averaged; long answers do not count more.
    """
    drafting = [(g, c) for g, c in zip(generations, categories, strict=True) if any(r.drafted for r in g.rounds)]
    rounds = [r for g, _ in drafting for r in g.rounds]
    if not rounds:
        return {}
    by_category = {c: [g for g, other in drafting if other == c] for _, c in drafting}
    return {
        "vllm": acceptance_mean([g for g, _ in drafting]),
        "eagle": fmean(r.accepted + 1 for r in rounds),
        "sglang": sum(len(g.tokens) for g, _ in drafting) / len(rounds),
        "modelopt": fmean(len(g.tokens) / (1 + len(g.rounds)) for g, _ in drafting),
        "macro by prompt": fmean(acceptance_mean([g]) for g, _ in drafting),
        "macro by category": fmean(map(acceptance_mean, by_category.values())),
    }


def acceptance_mean(generations: Sequence[Generation]) -> float:
    """The mean acceptance length of generations with at least one round that drafted."""
    return 1 + fmean(r.accepted for r in drafted_rounds(generations))


def percentiles(seconds: Sequence[float]) -> Times | None:
    """Mean, median and 99th percentile in milliseconds; None of nothing."""
    if not seconds:
        return None
    at = quantiles(seconds)
    assert at is not None
    return Times(1000 * fmean(seconds), at[50], at[99])


def quantiles(seconds: Sequence[float]) -> tuple[float, ...] | None:
    """The 0th to the 100th percentile in milliseconds; None of nothing."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return tuple(1000 * ordered[round(percent / 100 * last)] for percent in range(QUANTILES))


def accepted_per_position(generations: Sequence[Generation], k: int) -> list[int]:
    """Entry i: in how many rounds draft token i+1 was accepted (vLLM's `num_accepted_tokens_per_pos`)."""
    accepted = [r.accepted for g in generations for r in g.rounds]
    return [sum(a > position for a in accepted) for position in range(k)]


def conditional_rates(accepted: Sequence[int], rounds: int) -> list[float]:
    """For each draft, the share that accepted it of the rounds that accepted the one before; 0 where there was none."""
    return [now / before if before else 0.0 for before, now in zip((rounds, *accepted), accepted, strict=False)]


def extended_rates(rates: Sequence[float], k: int) -> list[float]:
    """Unconditional rates of the first `k` positions; those beyond `rates` fall on as the last two did."""
    extended = list(rates[:k])
    while len(extended) < k and extended:
        fall = extended[-1] / extended[-2] if len(extended) > 1 and extended[-2] else extended[-1]
        extended.append(extended[-1] * fall)
    return extended


def is_looping(share: float) -> bool:
    """Whether a text of that `repetition` goes round in circles."""
    return share > LOOPING


def repetition(tokens: Sequence[object]) -> float:
    """The share of a text's pairs of neighboring tokens that it has had before; 0 of fewer than two pairs."""
    pairs = list(itertools.pairwise(tokens))
    return 1 - len(set(pairs)) / len(pairs) if len(pairs) > 1 else 0.0


def _expected(r: Round) -> float:
    return sum(r.expected[: r.accepted + 1])
