"""Acceptance statistics, derived from the record of rounds. Definitions are vLLM's, unless they say another tool's.

A round in which nothing was drafted (n-gram lookup without a match, a batch above the schedule) is no round to vLLM,
whose length tells how good a draft is where there is one. What a draft brings is told by all rounds; where none was
skipped, both are the same.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from functools import cache
from math import cos, isnan, pi, sin, sqrt, tan
from statistics import fmean

from draftkit.results.cell import QUANTILES, Interval, PromptRecord, Times
from draftkit.runtime.records import Generation, Round

RESAMPLES = 2000
PAIRED_RESAMPLES = 10_000  # tails that many comparisons share are thin
LOOPING = 0.5  # share of repeated pairs of tokens above which a text goes round in circles

Sums = Sequence[tuple[float, int]]  # of each prompt: accepted draft tokens, measured or expected, and rounds


def drafted_rounds(generations: Sequence[Generation]) -> list[Round]:
    """The rounds in which something was drafted."""
    return [r for g in generations for r in g.rounds if r.drafted]


def acceptance_length(generations: Sequence[Generation], seed: int = 0) -> Interval:
    """Mean acceptance length 1 + accepted / rounds, the target's own token counted, over all rounds.

    Prompts are resampled, not rounds, because the rounds of one answer resemble each other. NaN without any round.
    """
    return bootstrap_length([(sum(r.accepted for r in g.rounds), len(g.rounds)) for g in generations if g.rounds], seed)


def drafted_acceptance_length(generations: Sequence[Generation], seed: int = 0) -> Interval:
    """The same over the rounds in which something was drafted, as vLLM counts."""
    drafting = [[r.accepted for r in g.rounds if r.drafted] for g in generations]
    return bootstrap_length([(sum(accepted), len(accepted)) for accepted in drafting if accepted], seed)


def expected_acceptance_length(generations: Sequence[Generation], seed: int = 0) -> Interval:
    """The acceptance length that the target's and the draft's probabilities in the same forwards predict.

    Draft token k+1 counts with its probability of standing wherever the k before it stand: Σ_v min(p_v, q_v) where
    it was drawn from q, p of it where it was chosen. Its mean is that of the measured length, its variance smaller;
    a gap between the two beyond chance is a bug. Of drawn drafts under coupled verification it is what rejection would
    accept, a few points more. NaN without any round.
    """
    return bootstrap_length(expected_sums([g.rounds for g in generations if g.rounds]), seed)


def bootstrap_length(sums: Sums, seed: int = 0) -> Interval:
    """The mean length with its interval, which a single prompt does not have; NaN of nothing."""
    if len(sums) < 2:
        return Interval(mean_length(sums), None, None, len(sums))
    generator = random.Random(seed)
    means = sorted(mean_length(generator.choices(sums, k=len(sums))) for _ in range(RESAMPLES))
    return Interval(mean_length(sums), means[RESAMPLES * 25 // 1000], means[RESAMPLES * 975 // 1000], len(sums))


def expected_sums(rounds: Sequence[Sequence[Round]]) -> Sums:
    """What `expected_acceptance_length` is the mean of, from the rounds of each prompt."""
    return [(sum(map(_expected, of_prompt)), len(of_prompt)) for of_prompt in rounds]


def mean_length(sums: Sums) -> float:
    """The acceptance length; NaN without any round."""
    rounds = sum(rounds for _, rounds in sums)
    return 1 + sum(accepted for accepted, _ in sums) / rounds if rounds else float("nan")


def gain(before: Sums, after: Sums, comparisons: int, seed: int = 0) -> Interval:
    """By how much the acceptance length grows, with an interval that holds for all of `comparisons` at 95 %.

    Prompts are resampled, the same ones on both sides (a paired bootstrap); each of the comparisons gets its share of
    the 5 % (Bonferroni), so that among many changes that do nothing, none seems to help.
    """
    import torch  # which reading a result does without

    prompts = len(before)
    if prompts < 2:
        return Interval(mean_length(after) - mean_length(before), None, None, prompts)
    drawn = torch.randint(prompts, (PAIRED_RESAMPLES, prompts), generator=torch.Generator().manual_seed(seed))
    ones = torch.ones_like(drawn, dtype=torch.float64)
    counts = torch.zeros_like(ones).scatter_add_(1, drawn, ones)  # of each prompt in each resample

    def lengths(sums: Sums) -> torch.Tensor:
        accepted, rounds = torch.tensor(sums, dtype=torch.float64).T
        return 1 + (counts @ accepted) / (counts @ rounds)

    differences = (lengths(after) - lengths(before)).nan_to_num()  # a sample without any round
    tail = 0.025 / max(comparisons, 1)
    low, high = differences.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return Interval(mean_length(after) - mean_length(before), low, high, prompts)


def contrast(one: Sums, other: Sums, seed: int = 0) -> Interval:
    """How much longer the length of `one` is than that of `other`, of other prompts; both are resampled."""
    generator = random.Random(seed)
    mean, fewest = mean_length(one) - mean_length(other), min(len(one), len(other))
    if fewest < 2:
        return Interval(mean, None, None, fewest)

    def drawn(sums: Sums) -> float:
        return mean_length(generator.choices(sums, k=len(sums)))

    found = sorted(drawn(one) - drawn(other) for _ in range(RESAMPLES))
    return Interval(mean, found[RESAMPLES * 25 // 1000], found[RESAMPLES * 975 // 1000], fewest)


def bootstrap_ratio(prompts: Sequence[PromptRecord], seed: int = 0) -> Interval | None:
    """How many times faster a token comes with the draft, by the times of each prompt; None without such times."""
    timed = [
        (p.seconds, p.tokens, p.plain_seconds, p.plain_tokens)
        for p in prompts
        if p.seconds and p.tokens and p.plain_seconds and p.plain_tokens
    ]
    if len(timed) < max(len(prompts), 2):
        return None

    def ratio(rows: Sequence[tuple[float, int, float, int]]) -> float:
        seconds, tokens, plain_seconds, plain_tokens = map(sum, zip(*rows, strict=True))
        return (plain_seconds / plain_tokens) / (seconds / tokens)

    generator = random.Random(seed)
    found = sorted(ratio(generator.choices(timed, k=len(timed))) for _ in range(RESAMPLES))
    return Interval(ratio(timed), found[RESAMPLES * 25 // 1000], found[RESAMPLES * 975 // 1000], len(timed))


@cache
def student(degrees: int) -> float:
    """Student's t for a two-sided 95 %: half the interval of a mean, in standard errors."""
    low, high = 0.0, pi / 2
    for _ in range(60):  # halvings, of which a double has no use for more
        middle = (low + high) / 2
        low, high = (middle, high) if _share_within(middle, degrees) < 0.95 else (low, middle)
    return sqrt(degrees) * tan(low)


def _share_within(angle: float, degrees: int) -> float:
    """The share of Student's distribution within ±√degrees · tan(angle) (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    odd = degrees % 2
    term, total = cos(angle) if odd else 1.0, 0.0
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * cos(angle) ** 2
    share = sin(angle) * total
    return 2 / pi * (angle + share) if odd else share


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
