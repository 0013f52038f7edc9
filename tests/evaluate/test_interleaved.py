"""Baseline and draft by turns: what disturbs the machine meets both, and the speed-up says how well it is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf, log
from statistics import fmean

import pytest
import torch

import draftkit
from draftkit.evaluate.measure import NARROW, block_sizes, interleaved, pace_error, speedup_interval
from draftkit.requests import SamplingParameters
from draftkit.results.cell import PromptRecord
from draftkit.results.settings import Settings
from draftkit.results.statistics import student


@dataclass(frozen=True)
class Run:
    pace: float
    block: int


def lanes(noise: float, seed: int = 0) -> tuple[list[str], Callable[[int], Run], Callable[[int], Run]]:
    """A round costs twice a plain step; the machine adds noise of its own. And the order in which they ran."""
    generator, order = random.Random(seed), []

    def lane(name: str, pace: float) -> Callable[[int], Run]:
        def run(block: int) -> Run:
            order.append(f"{name} {block}")
            return Run(pace * (1 + noise * generator.random()), block)

        return run

    return order, lane("plain", 1.0), lane("draft", 2.0)


def test_blocks_alternate_and_neither_side_is_always_second() -> None:
    order, plain, drafting = lanes(noise=0.0)
    passes, error = interleaved([0, 1, 2], plain, drafting, 3)
    assert order == ["plain 0", "draft 0", "draft 1", "plain 1", "plain 2", "draft 2"]
    assert error == 0.0
    assert all(a.block == b.block for a, b in passes[0])


@pytest.mark.parametrize(("noise", "passes"), [(0.01, 1), (1.0, 3)])
def test_a_noisy_machine_is_measured_again_up_to_a_limit(noise: float, passes: int) -> None:
    _, plain, drafting = lanes(noise)
    found, error = interleaved([0, 1, 2, 3], plain, drafting, 3)
    assert len(found) == passes
    assert (error <= NARROW) == (passes == 1)


def test_a_single_pair_tells_nothing() -> None:
    assert pace_error([(Run(1.0, 0), Run(2.0, 0))]) == inf


def test_the_interval_of_paces_covers_the_truth_about_as_often_as_it_says() -> None:
    covered = 0
    for seed in range(200):
        generator = random.Random(seed)
        pairs = [(Run(generator.lognormvariate(0, 0.2), 0), Run(generator.lognormvariate(0, 0.2), 0)) for _ in range(4)]
        covered += abs(fmean(log(a.pace / b.pace) for a, b in pairs)) <= pace_error(pairs)
    assert 180 <= covered <= 199


@pytest.mark.parametrize("pairs", [2, 4, 18, 24])  # 18, 24: three passes over 6 and 8 blocks
def test_the_interval_of_paces_has_the_width_of_its_number_of_pairs(pairs: int) -> None:
    """95 of 100 hold the truth where noise is normal, to a standard error of 0.2."""
    draws = torch.randn(12_000, pairs, generator=torch.Generator().manual_seed(pairs), dtype=torch.float64)
    covered = (draws.mean(1).abs() <= student(pairs - 1) * draws.std(1) / pairs**0.5).double().mean()
    assert 0.944 <= float(covered) <= 0.956
    width = float(student(pairs - 1) * draws[0].std() / pairs**0.5)
    assert math.isclose(pace_error([(Run(ratio, 0), Run(1.0, 0)) for ratio in draws[0].exp().tolist()]), width)


def test_students_t() -> None:
    """As the tables have it."""
    tables = {1: 12.706, 2: 4.303, 15: 2.131, 16: 2.120, 23: 2.069, 30: 2.042, 120: 1.980, 10_000: 1.960}
    assert {degrees: round(student(degrees), 3) for degrees in tables} == tables


@pytest.mark.parametrize(
    ("prompts", "concurrency", "sizes"),
    [(80, 1, [10] * 8), (80, 16, [40, 40]), (7, 4, [7]), (5, 1, [3, 2]), (1, 1, [1])],
)
def test_blocks_are_of_many_prompts(prompts: int, concurrency: int, sizes: list[int]) -> None:
    assert block_sizes(prompts, concurrency) == sizes


def test_a_speed_up_varies_with_the_prompts_and_with_the_machine() -> None:
    prompts = [PromptRecord(str(i), 10, 10, 20, 1.0, 20, 1.5 + 0.2 * (i % 3)) for i in range(12)]
    quiet, disturbed = (speedup_interval(1.7, prompts, error, 1) for error in (0.0, 0.3))
    assert quiet is not None
    assert disturbed is not None
    assert disturbed.low < quiet.low < 1.7 < quiet.high < disturbed.high
    assert disturbed.low < 1.7 * 0.75
    of_pairs = speedup_interval(1.7, prompts, 0.3, 6)  # half of what slows a pair is in its two prompts already
    assert of_pairs is not None
    assert disturbed.low < of_pairs.low < quiet.low
    assert speedup_interval(1.7, prompts, inf, 1) is speedup_interval(1.7, prompts[:1], 0.0, 1) is None


@pytest.mark.slow
def test_a_measurement_by_turns_gives_the_tokens_of_one_at_once() -> None:
    """At a temperature, where a request's tokens hang on its own seed; in blocks of two prompts, twice over."""
    settings = Settings(limit=4, max_new_tokens=12, sampling=SamplingParameters(temperature=1.0, seed=5), repeats=2)
    (turns,) = draftkit.evaluate_draft("zoo:target", ["zoo:eagle"], settings).cells
    (once,) = draftkit.evaluate_draft("zoo:target", ["zoo:eagle"], replace(settings, repeats=0)).cells
    assert (once.passes, once.pace_error, once.speedup_interval) == (None, None, None)
    assert turns.passes in (1, 2)
    assert turns.pace_error is not None
    assert turns.speedup_interval is not None
    assert turns.speedup_interval.low < turns.speedup < turns.speedup_interval.high
    assert turns.num_accepted_tokens_per_pos == once.num_accepted_tokens_per_pos
    assert turns.acceptance_length == once.acceptance_length
    counted = [
        [(p.id, p.rounds, p.accepted, p.tokens, p.plain_tokens) for p in cell.by_prompt] for cell in (turns, once)
    ]
    assert counted[0] == counted[1]
