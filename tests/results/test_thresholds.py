"""What thresholds and budgets are predicted to gain, against plain loops over a few rounds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftkit.results.calibration import SaidRounds
from draftkit.results.record import SpeedModel
from draftkit.results.round_times import RoundTimes
from draftkit.results.thresholds import THRESHOLDS, Gain, best_fixed, best_threshold, gains, sglang_costs

K = 3
TIMES = RoundTimes(
    {(batch, k): 4.0 + 0.5 * batch * (k + 1) for batch in (1, 2) for k in range(K + 1)},
    {(batch, kept): 5.0 + 0.5 * batch * (kept + 1) for batch in (1, 2) for kept in range(K + 1)},
    K,
)


def rounds_of(seed: int, prompts: int = 4, each: int = 3) -> SaidRounds:
    generator = np.random.default_rng(seed)
    said = generator.random((prompts * each, K))
    accepted = generator.integers(0, K + 1, prompts * each)
    return SaidRounds(said, accepted, generator.random(said.shape), np.repeat(np.arange(prompts), each))


def by_name(found: list[Gain]) -> dict[tuple[str, float | None], Gain]:
    return {(one.rule, one.value): one for one in found}


@given(st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_one_lane_is_a_plain_loop(seed: int) -> None:
    rounds = rounds_of(seed)
    found = by_name(gains(rounds, TIMES, 1))
    for k in range(K + 1):
        tokens = sum(1 + sum(stands[:k]) for stands in rounds.stands)
        assert found["fixed", k].tokens_per_second == pytest.approx(tokens / (len(rounds.said) * TIMES.ms[1, k]) * 1e3)
    for floor in THRESHOLDS:
        tokens = ms = 0.0
        for said, stands in zip(rounds.said, rounds.stands, strict=True):
            kept = len(list(itertools.takewhile(lambda chance, floor=floor: chance >= floor, said)))
            tokens += 1 + sum(stands[:kept])
            ms += TIMES.verified[1, kept]
        assert found["threshold", floor].tokens_per_second == pytest.approx(tokens / ms * 1000)


@given(st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_a_budget_is_the_best_of_all(seed: int) -> None:
    """vLLM's rule in two lanes: of every number of drafts, by what was said a round before."""
    rounds = rounds_of(seed)
    lanes = [np.r_[0:3, 6:9], np.r_[3:6, 9:12]]  # of equal prompts, in turn
    tokens = ms = 0.0
    for step in range(6):
        fresh = step % 3 == 0
        before = [1.0] * (2 * K) if fresh else [s for lane in lanes for s in rounds.survival[lane[step - 1]]]
        likeliest = sorted(before, reverse=True)
        rates = [(2 + sum(likeliest[:b])) / TIMES.of_verified(2, K, b / 2) for b in range(2 * K + 1)]
        budget = int(np.argmax(rates))
        now = sorted(((-s, lane, k) for lane in (0, 1) for k, s in enumerate(rounds.survival[lanes[lane][step]])))
        chosen = {(lane, k) for _, lane, k in now[:budget]}
        tokens += 2 + sum(rounds.stands[lanes[lane][step], k] for lane, k in chosen)
        ms += TIMES.of_verified(2, K, budget / 2)
    found = by_name(gains(rounds, TIMES, 2))
    assert found["vllm", None].tokens_per_second == pytest.approx(tokens / ms * 1000)


def test_a_threshold_that_knows_gains_and_one_that_does_not_loses() -> None:
    """Half the rounds stand whole, half not at all: whoever knows which saves the half."""
    generator = np.random.default_rng(0)
    stands = np.repeat(generator.random(400) < 0.5, K).reshape(-1, K)
    accepted, prompt = np.where(stands[:, 0], K, 0), np.repeat(np.arange(20), 20)
    ms = {(1, k): 3.0 + k for k in range(K + 1)}
    times = RoundTimes(ms, ms, K)
    for said, gain in ((np.where(stands, 0.9, 0.01), 6 / 4.5), (np.full(stands.shape, 0.5), 1.0)):
        found = gains(SaidRounds(said, accepted, stands.astype(float), prompt), times, 1)
        best = best_threshold(found)
        assert best is not None
        assert best.over_fixed.mean == pytest.approx(gain, rel=0.05)
        assert best.over_fixed.above(1) == (gain > 1)
        fixed = best_fixed(found)
        assert fixed is not None
        assert fixed.over_fixed.mean == pytest.approx(1)
        assert fixed.over_fixed.low == pytest.approx(1)


def test_fewer_requests_than_lanes_tell_nothing() -> None:
    assert gains(rounds_of(0, prompts=1), TIMES, 2) == []


def test_round_times_survive_a_result() -> None:
    whole, cut = TIMES.to_records()
    again = RoundTimes.of_model(SpeedModel("d", rounds_ms=whole, verified_ms=cut))
    assert again == TIMES
    assert again.of_verified(2, K + 1, 2) == again.of(2, 2)  # another K was not cut
    assert RoundTimes.of_model(SpeedModel("d", rounds_ms=whole)).of_verified(1, K, 1.5) == pytest.approx(5.25)


def test_the_table_of_costs_rises() -> None:
    table = sglang_costs(TIMES, K)
    assert table["sample_batch_tokens"] == [1, 2, 3, 4, 8]
    assert table["max_batch_tokens"] == 8
    assert table["sample_steps_per_sec"][-1] == pytest.approx(1000 / 9)  # type: ignore[index]
