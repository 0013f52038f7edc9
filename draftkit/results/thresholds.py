"""What leaving drafts out by the draft's own word would gain, told from recorded rounds and timed ones.

B lanes take the recorded requests one after another, a round each at a time. A rule says how many of its drafts each
round gives to the target; those that stand among them are the recorded ones, as `stands` has them, and the round
takes what rounds of that size were timed to take. Rounds would begin elsewhere if the rule were in force, so that what
follows is predicted, not measured. T steps, K draft tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftkit.results.calibration import Floats, SaidRounds
from draftkit.results.cell import Interval
from draftkit.results.round_times import RoundTimes
from draftkit.results.statistics import ratio_over_prompts

THRESHOLDS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)

Kept = NDArray[np.int64]  # [T, B]: the drafts of each round that go to the target


@dataclass(frozen=True)
class Gain:
    """A rule at a batch size. `rule`: fixed, threshold, vllm or sglang; `value`: its K, 0 for no draft, or threshold.
    `kept`: drafts that a round gives to the target. `over_fixed`: the speed as a multiple of the best fixed K's, with
    its interval."""

    rule: str
    value: float | None
    concurrency: int
    kept: float
    length: float
    tokens_per_second: float
    over_fixed: Interval


@dataclass(frozen=True)
class _Lanes:
    """The recorded rounds as B lanes run them: `index` int64 [T, B] of the rounds."""

    rounds: SaidRounds
    index: NDArray[np.int64]
    times: RoundTimes

    @classmethod
    def of(cls, rounds: SaidRounds, times: RoundTimes, batch: int) -> _Lanes:
        """As many steps as all lanes have work; the lane with the least work gets the next request."""
        lanes: list[list[int]] = [[] for _ in range(batch)]
        for prompt in np.unique(rounds.prompt):
            min(lanes, key=len).extend(np.flatnonzero(rounds.prompt == prompt).tolist())
        steps = min(map(len, lanes))
        return cls(rounds, np.array([lane[:steps] for lane in lanes], dtype=np.int64).T, times)

    @property
    def batch(self) -> int:
        return self.index.shape[1]

    @property
    def k(self) -> int:
        return self.rounds.said.shape[1]

    def survival(self, lag: int) -> Floats:
        """[T, B, K]: what was said `lag` rounds before of surviving; 1 where that was another request's round."""
        own = self.rounds.survival[self.index]
        if not lag:
            return own
        before = np.ones_like(own)
        before[lag:] = own[:-lag]
        prompt = self.rounds.prompt[self.index]
        other = np.ones(self.index.shape, dtype=bool)
        other[lag:] = prompt[lag:] != prompt[:-lag]
        before[other] = 1.0
        return before

    def seconds(self, kept: Floats) -> Floats:
        """What rounds take that give the target `kept` drafts a lane in the mean; any shape."""
        at, inverse = np.unique(kept, return_inverse=True)
        ms = np.array([self.times.of_verified(self.batch, self.k, float(value)) for value in at])
        return ms[inverse].reshape(kept.shape) / 1000


def gains(rounds: SaidRounds, times: RoundTimes, batch: int) -> list[Gain]:
    """Every fixed K, 0 among them, threshold and engine's rule at a batch size; nothing where there are fewer requests
    than lanes."""
    lanes = _Lanes.of(rounds, times, batch)
    if not len(lanes.index):
        return []
    spent: dict[tuple[str, float | None], _Spent] = {}
    for k in range(lanes.k + 1):
        taken = np.full(len(lanes.index), times.of(batch, k) / 1000)
        spent["fixed", float(k)] = _Spent.of(lanes, np.full(lanes.index.shape, k), taken)
    for floor in THRESHOLDS:
        kept = _above(lanes, floor)
        # draftkit's own rounds have the same number of rows in all lanes
        spent["threshold", floor] = _Spent.of(lanes, kept, lanes.seconds(kept.max(axis=1).astype(float)))
    for name, rule in ADAPTIVE.items():
        kept = _budgeted(lanes, rule)
        spent[name, None] = _Spent.of(lanes, kept, lanes.seconds(kept.mean(axis=1)))
    best = max((one for (rule, _), one in spent.items() if rule == "fixed"), key=lambda one: one.speed)
    return [
        Gain(rule, value, batch, one.kept, one.length, one.speed, one.over(best))
        for (rule, value), one in spent.items()
    ]


def best_threshold(found: Sequence[Gain]) -> Gain | None:
    """The fastest of the thresholds; None where there is none."""
    return max((one for one in found if one.rule == "threshold"), key=lambda one: one.tokens_per_second, default=None)


def best_fixed(found: Sequence[Gain]) -> Gain | None:
    """The fastest fixed K; 0 where no draft is faster."""
    return max((one for one in found if one.rule == "fixed"), key=lambda one: one.tokens_per_second, default=None)


def _above(lanes: _Lanes, floor: float) -> Kept:
    """The drafts before the first whose chance is below the floor."""
    return np.asarray((lanes.rounds.said[lanes.index] >= floor).cumprod(axis=2).sum(axis=2))


def _budgeted(lanes: _Lanes, rule: AdaptiveRule) -> Kept:
    """The likeliest drafts of all lanes, as many as the rule has a budget for: of all b, that with the most tokens a
    second, B + the b largest chances of surviving over what a step of so many rows takes."""
    steps, batch, k = len(lanes.index), lanes.batch, lanes.k
    before = np.sort(lanes.survival(rule.lag).reshape(steps, -1), axis=1)[:, ::-1]
    counted = np.where(before >= rule.least_survival, before, 0.0)
    tokens = batch + np.concatenate((np.zeros((steps, 1)), counted.cumsum(axis=1)), axis=1)
    budget = (tokens / rule.step_seconds(lanes)).argmax(axis=1)
    own = lanes.survival(0).reshape(steps, -1)
    rank = (-own).argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
    return np.asarray((rank < budget[:, None]).reshape(steps, batch, k).sum(axis=2))


def _as_timed(lanes: _Lanes) -> Floats:
    return lanes.seconds(np.arange(lanes.batch * lanes.k + 1) / lanes.batch)


def _by_sglang_table(lanes: _Lanes) -> Floats:
    """Steps between two rows of the table cost what the smaller one does."""
    table = sglang_costs(lanes.times, lanes.k)
    probes, rates = np.array(table["sample_batch_tokens"]), np.array(table["sample_steps_per_sec"])
    rows = lanes.batch + np.arange(lanes.batch * lanes.k + 1)
    at = np.searchsorted(probes, rows, side="right") - 1
    return np.asarray(1 / rates[np.clip(at, 0, len(probes) - 1)])


class AdaptiveRule(NamedTuple):
    """How an engine makes a budget of drafts. The chances that it counts are `lag` rounds old; a draft whose chance is
    below `least_survival` is left out of account; `step_seconds`: what it believes that a step takes with each budget,
    float64 [B · K + 1]."""

    lag: int
    least_survival: float
    step_seconds: Callable[[_Lanes], Floats]


ADAPTIVE = {"vllm": AdaptiveRule(1, 0.0, _as_timed), "sglang": AdaptiveRule(2, 1e-6, _by_sglang_table)}


def sglang_costs(times: RoundTimes, k: int) -> dict[str, list[float] | list[int] | int]:
    """What SGLang reads from `--speculative-dspark-sps-table-path`: steps a second by the rows of a step, of rounds
    that draft `k` tokens: of the smallest batch with each number of drafts verified, of larger ones with all."""
    smallest = times.batches[0]
    probes = {smallest * (kept + 1): times.of_verified(smallest, k, kept) for kept in range(k + 1)}
    for batch in times.batches[1:]:
        if batch * (k + 1) > max(probes):
            probes[batch * (k + 1)] = times.of_verified(batch, k, k)
    rows = sorted(probes)
    return {
        "sample_batch_tokens": rows,
        "sample_steps_per_sec": [1000 / probes[at] for at in rows],
        "max_batch_tokens": rows[-1],
    }


@dataclass(frozen=True)
class _Spent:
    """What a rule brings and takes, by prompt: `tokens` and `seconds` float64 [P]."""

    tokens: Floats
    seconds: Floats
    rounds: int
    kept: float

    @classmethod
    def of(cls, lanes: _Lanes, kept: Kept, seconds: Floats) -> _Spent:
        """`seconds` [T] of the steps, of which each lane has its share."""
        stands = lanes.rounds.stands[lanes.index]
        tokens = 1 + np.where(np.arange(lanes.k) < kept[..., None], stands, 0.0).sum(axis=2)
        share = np.broadcast_to((seconds / lanes.batch)[:, None], tokens.shape)
        _, prompt = np.unique(lanes.rounds.prompt[lanes.index], return_inverse=True)
        flat = prompt.reshape(-1)
        brought, taken = (np.bincount(flat, part.reshape(-1)).astype(float) for part in (tokens, share))
        return cls(brought, taken, tokens.size, float(kept.mean()))

    @property
    def speed(self) -> float:
        return float(self.tokens.sum() / self.seconds.sum())

    @property
    def length(self) -> float:
        return float(self.tokens.sum()) / self.rounds

    def over(self, other: _Spent) -> Interval:
        """The ratio of the speeds, with its interval over prompts."""
        prompts = len(self.tokens)
        if prompts < 2:
            return Interval(self.speed / other.speed, None, None, prompts)
        columns = self.seconds, self.tokens, other.seconds, other.tokens
        return ratio_over_prompts(list(zip(*(column.tolist() for column in columns), strict=True)))
