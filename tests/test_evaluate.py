"""Evaluation: the zoo's drafts are as good as the zoo promises, and results have the documented fields."""

from __future__ import annotations

import math
import random
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

import draftkit
from draftkit import zoo
from draftkit.errors import DraftkitError
from draftkit.evaluate.evaluate import Settings
from draftkit.evaluate.options import parse_rates, parse_schedule
from draftkit.evaluate.prompts import load_prompts
from draftkit.evaluate.statistics import acceptance_length, accepted_per_position
from draftkit.runtime.records import Generation, Request, Round
from draftkit.runtime.sampling.parameters import DraftSampling, SamplingParameters

FIELDS = {
    "target", "draft", "method", "num_speculative_tokens", "temperature", "draft_sampling", "concurrency", "dataset",
    "num_prompts", "max_new_tokens", "output_tokens", "num_drafts", "num_draft_tokens", "num_accepted_tokens",
    "num_accepted_tokens_per_pos", "acceptance_length", "by_category", "tokens_per_second",
    "baseline_tokens_per_second", "matches_greedy", "num_matching_prompts", "expected_acceptance_length", "ttft_ms",
    "tpot_ms", "itl_ms", "top_k", "top_p", "min_p", "seed", "verification",
}  # fmt: skip


@lru_cache
def zoo_result() -> dict[str, Any]:
    drafts = [f"zoo:{name}" for name in zoo.names() if name != "target"]
    return draftkit.evaluate_draft("zoo:target", drafts, Settings(concurrency=16, limit=40, max_new_tokens=64))


def test_zoo_drafts_reach_their_acceptance_length() -> None:
    measured = {c["draft"]: c["acceptance_length"]["mean"] for c in zoo_result()["cells"]}
    assert measured["zoo:eagle"] >= 1.8
    assert measured["zoo:eagle3"] >= 1.8
    assert measured["zoo:eagle-bias"] >= 1.5
    assert measured["zoo:draft-model"] >= 1.3
    for name in ("p-eagle", "pard", "mlp-speculator"):
        assert measured[f"zoo:{name}"] >= 1.5


def test_output_equals_plain_greedy_decoding() -> None:
    assert all(cell["matches_greedy"] for cell in zoo_result()["cells"])


def test_result_has_the_documented_fields() -> None:
    result = zoo_result()
    assert result["schema"] == 1
    for cell in result["cells"]:
        assert set(cell) == FIELDS
        assert cell["num_prompts"] == 40
        assert len(cell["by_category"]) == 8
        assert cell["num_accepted_tokens"] == sum(cell["num_accepted_tokens_per_pos"])
        length = 1 + cell["num_accepted_tokens"] / cell["num_drafts"]
        assert math.isclose(cell["acceptance_length"]["mean"], length)


def sampled_cell(**changes: Any) -> dict[str, Any]:
    settings = Settings(
        concurrency=8, limit=24, max_new_tokens=48, sampling=SamplingParameters(temperature=1.0), **changes
    )
    return draftkit.evaluate_draft("zoo:target", ["zoo:eagle"], settings)["cells"][0]  # type: ignore[index]


def test_expected_acceptance_agrees_with_the_measured_one() -> None:
    cell = sampled_cell(draft_sampling=DraftSampling("probabilistic"))
    measured, expected = cell["acceptance_length"], cell["expected_acceptance_length"]
    assert measured["low"] - 0.05 <= expected["mean"] <= measured["high"] + 0.05
    assert expected["mean"] != measured["mean"]
    assert cell["draft_sampling"] == "probabilistic"
    assert cell["matches_greedy"] is cell["num_matching_prompts"] is None


def test_coupled_output_is_that_of_plain_decoding() -> None:
    cell = sampled_cell(verification="coupled", draft_sampling=DraftSampling("probabilistic"))
    assert cell["num_matching_prompts"] == cell["num_prompts"]
    assert cell["acceptance_length"]["mean"] > 1.2


def test_synthetic_acceptance_has_the_length_asked_for() -> None:
    cell = sampled_cell(verification="synthetic", acceptance_rates=parse_rates("3.5", 4))
    assert cell["acceptance_length"]["mean"] == pytest.approx(3.5, abs=0.05)


def test_latencies_are_consistent() -> None:
    """Gaps between chunks carry as many tokens as rounds emit, so their ratio to the time per token is about that."""
    cell = zoo_result()["cells"][0]
    ratio = cell["itl_ms"]["mean"] / cell["tpot_ms"]["mean"]
    assert ratio == pytest.approx(cell["acceptance_length"]["mean"], rel=0.35)
    assert cell["ttft_ms"]["p50"] <= cell["ttft_ms"]["p99"]


def test_ngram_lookup_needs_no_checkpoint() -> None:
    settings = Settings(concurrency=4, limit=8, max_new_tokens=48)
    (cell,) = draftkit.evaluate_draft("zoo:target", ["ngram:2-3"], settings)["cells"]  # type: ignore[misc]
    assert (cell["method"], cell["matches_greedy"]) == ("ngram", True)
    assert cell["num_draft_tokens"] < 4 * cell["num_drafts"]  # without a match nothing is drafted
    with pytest.raises(DraftkitError, match="ngram:MIN-MAX"):
        draftkit.evaluate_draft("zoo:target", ["ngram:x"], settings)


def test_options_written_as_text() -> None:
    assert parse_rates("0.8,0.5", 2) == (0.8, 0.5)
    assert parse_rates("2.5", 4) == (1.0, 0.5, 0.0, 0.0)
    assert parse_rates(None, 4) is None
    assert parse_schedule("4:6,16:3", None, 6) == {4: 6, 16: 3}
    assert parse_schedule(None, 8, 4) == {8: 4}
    assert parse_schedule(None, None, 4) is None
    for call in (
        lambda: parse_rates("much", 4),
        lambda: parse_schedule("4", None, 4),
        lambda: parse_schedule("1:1", 2, 4),
    ):
        with pytest.raises(DraftkitError):
            call()


def generation(*accepted: int) -> Generation:
    rounds = [Round(position=10, drafted=4, accepted=a, emitted=a + 1) for a in accepted]
    return Generation(Request("x", (1,), 8), rounds=rounds)


def test_acceptance_length_is_over_rounds() -> None:
    interval = acceptance_length([generation(4, 0), generation(2)])
    assert interval.mean == 1 + 6 / 3
    assert interval.low <= interval.mean <= interval.high


def test_no_rounds_give_no_number() -> None:
    assert math.isnan(acceptance_length([generation()]).mean)


def test_positions_are_unconditional() -> None:
    assert accepted_per_position([generation(4, 0), generation(2)], 4) == [2, 2, 1, 1]


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """Rounds of one prompt share their acceptance rate, so an interval over rounds would be far too narrow."""
    generator = random.Random(0)
    covered = 0
    for trial in range(60):
        sample = []
        for _ in range(40):
            rate = generator.random()
            sample.append(generation(*(int(generator.random() < rate) for _ in range(30))))
        interval = acceptance_length(sample, seed=trial)
        covered += interval.low <= 1.5 <= interval.high
    assert covered >= 50


@pytest.mark.parametrize(
    "line",
    ['{"question_id": 7, "category": "c", "turns": ["hello", "more"]}', '{"id": 7, "category": "c", "prompt": "hello"}',
     '{"id": 7, "category": "c", "messages": [{"role": "system"}, {"role": "user", "content": "hello"}]}'],
)  # fmt: skip
def test_prompt_schemas(line: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line + "\n\n")
    (prompt,) = load_prompts(str(path))
    assert (prompt.id, prompt.category, prompt.text) == ("7", "c", "hello")


def test_bundled_prompts_are_eight_categories_of_ten() -> None:
    prompts = load_prompts("zoo")
    categories = [p.category for p in prompts]
    assert len(prompts) == 80
    assert {categories.count(c) for c in categories} == {10}


def test_limit_keeps_every_category() -> None:
    assert len({p.category for p in load_prompts("zoo", limit=8)}) == 8
