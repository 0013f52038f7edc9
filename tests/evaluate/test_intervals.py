"""Intervals and rounds: what a length is over, and when there is an interval to state."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, stdev

import pytest

import draftkit
from draftkit.engines.records import Answer, DraftCounts
from draftkit.evaluate.cell import cell_of
from draftkit.evaluate.measure import Run
from draftkit.evaluate.speed import RoundTimes, speed_model
from draftkit.requests import Request
from draftkit.results.cell import Cell, Heading, Interval, Times
from draftkit.results.metrics import length
from draftkit.results.record import Result, result_from, result_json
from draftkit.results.settings import Settings
from draftkit.results.statistics import (
    acceptance_length,
    contrast,
    drafted_acceptance_length,
    gain,
    jackknife,
    length_over_prompts,
    student,
    student_below,
)
from draftkit.runtime.records import Generation, Round
from scripts.check.intervals import INTERVALS, coverage, made_up


def generation(*rounds: tuple[int, int]) -> Generation:
    """One answer; of each round what was drafted and what of it was accepted."""
    made = [Round(10, drafted, accepted, accepted + 1) for drafted, accepted in rounds]
    return Generation(Request("x", (1,), 8), rounds=made)


def test_rounds_without_a_draft_count_for_what_a_draft_brings() -> None:
    answers = [generation((4, 4), (0, 0), (0, 0)), generation((0, 0), (4, 2))]
    assert acceptance_length(answers).mean == 1 + 6 / 5
    assert drafted_acceptance_length(answers).mean == 1 + 6 / 2


@pytest.mark.slow
def test_ngram_lookup_is_headed_by_all_of_its_rounds() -> None:
    """The length is what a round brings: with each prompt's first token, it makes up the output but for cut ends."""
    settings = Settings(concurrency=4, limit=8, max_new_tokens=32, repeats=0)
    (cell,) = draftkit.evaluate_draft("zoo:target", ["ngram"], settings).cells
    assert cell.num_rounds > cell.num_drafts > 0
    assert cell.acceptance_length.mean == 1 + cell.num_accepted_tokens / cell.num_rounds
    assert cell.drafted_acceptance_length.mean == 1 + cell.num_accepted_tokens / cell.num_drafts
    made = cell.num_prompts + cell.num_rounds * cell.acceptance_length.mean
    assert cell.output_tokens <= made <= cell.output_tokens + 4 * cell.num_prompts
    assert 1 + sum(cell.accepted_at) == pytest.approx(cell.acceptance_length.mean)


def test_advice_counts_the_rounds_that_a_drafter_skips() -> None:
    """A draft in a tenth of the rounds, all of it accepted: hardly any round is saved."""
    times = Times(0.0, 0.0, 0.0)
    cell = Cell(
        target="t", draft="ngram", num_speculative_tokens=1, concurrency=1, temperature=0.0, acceptance_length=None,
        num_rounds=100, num_drafts=10, num_accepted_tokens_per_pos=(10,), acceptance_per_pos=(1.0,), ttft_ms=times,
        baseline_ttft_ms=times, output_tokens=1000, num_prompts=1,
    )  # fmt: skip
    (predicted,) = speed_model("ngram", [cell], RoundTimes({(1, 0): 10.0, (1, 1): 10.0})).predicted
    assert predicted.speedup == pytest.approx(1.1)


def test_vllms_skipped_steps_are_told_from_its_tokens() -> None:
    """9 tokens: the prefill's, 3 + 2 of two drafts, and 3 of steps without one."""
    answers = tuple(Answer(tuple(range(9)), None, None, drafts=DraftCounts(2, 4, 3, (2, 1))) for _ in range(2))
    heading = Heading(target="t", draft="ngram", num_speculative_tokens=2, temperature=0.0, concurrency=1)
    cell = cell_of(heading, Run(answers, 1.0), None, Settings())
    assert (cell.num_rounds, cell.num_drafts) == (10, 4)
    assert cell.acceptance_length == Interval(1 + 6 / 10, 1.6, 1.6, 2)
    assert cell.drafted_acceptance_length.mean == 1 + 6 / 4


def test_one_prompt_has_no_interval() -> None:
    alone = length_over_prompts([(5, 4)])
    assert (alone.mean, alone.low, alone.high, alone.prompts) == (2.25, None, None, 1)
    assert (alone.bounds, alone.above(0), alone.below(9)) == (None, False, False)
    assert gain([(5, 4)], [(6, 4)], 1) == Interval(0.25, None, None, 1)
    assert contrast([(5, 4)], [(6, 4), (3, 2)]).bounds is None
    assert length_over_prompts([(5, 4), (1, 4)]).prompts == 2


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        (Interval(2.5, None, None, 1), "2.50 (1)"),
        (Interval(2.5, 2.0, 3.0, 8), "2.50 [2.00, 3.00] (8)"),
        (Interval(2.5, 2.0, 3.0), "2.50 [2.00, 3.00]"),
        (Interval(float("nan"), None, None, 0), "–"),
        (None, "–"),
    ],
)
def test_an_interval_is_written_as_far_as_there_is_one(interval: Interval | None, text: str) -> None:
    assert length(interval, count=True) == text


def test_a_result_without_an_interval_reads_back() -> None:
    cell = Cell(
        target="t", draft="d", num_speculative_tokens=1, concurrency=1, temperature=0.0,
        acceptance_length=Interval(1.5, None, None, 1), by_category={"a": Interval(1.5, None, None, 1)},
    )  # fmt: skip
    result = Result((cell,), {"dtype": "float32", "device": "cpu"}, path="r.json")
    assert result_from(json.loads(result_json(result.to_dict())), Path("r.json")) == result


@pytest.mark.parametrize("what", ["acceptance length", "difference of a change", "slice against the others"])
def test_an_interval_holds_the_truth_about_as_often_as_it_says(what: str) -> None:
    """A percentile bootstrap did so in 86 % of these cases; `python -m scripts.check.intervals` is the long table."""
    assert 0.91 <= coverage(made_up(300), what, 10, 600) <= 0.98


@pytest.mark.long
@pytest.mark.parametrize("what", INTERVALS)
@pytest.mark.parametrize(("prompts", "least"), [(10, 0.92), (20, 0.93), (40, 0.93)])
def test_every_printed_interval_holds_the_truth_as_often_as_it_says(what: str, prompts: int, least: float) -> None:
    """Four standard errors of 4,000 samples are 1.4 %."""
    assert least <= coverage(made_up(2000), what, prompts, 4000) <= 0.975


def test_leaving_out_prompts_tells_the_error_of_a_mean() -> None:
    """Of a mean, it is the standard error of any textbook."""
    values = [3.0, 1.0, 4.0, 1.0, 5.0]
    found = jackknife([(value, 1) for value in values], lambda totals: totals[0] / totals[1])
    assert found.value == pytest.approx(fmean(values))
    assert found.error == pytest.approx(stdev(values) / 5**0.5)
    assert found.degrees == 4


def test_student_of_a_table() -> None:
    """Abramowitz and Stegun, table 26.10."""
    assert [student(n) for n in (1, 9, 30)] == pytest.approx([12.706, 2.262, 2.042], abs=1e-3)
    assert [student(n, 0.90) for n in (1, 9, 30)] == pytest.approx([6.314, 1.833, 1.697], abs=1e-3)
    assert student_below(1.833, 9) == pytest.approx(0.95, abs=1e-4)
    assert student_below(-1.833, 9) == pytest.approx(0.05, abs=1e-4)
    assert student(9) > student(9.5) > student(10)
