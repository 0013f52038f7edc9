"""Evaluation: the zoo's drafts are as good as the zoo promises, and results have the documented fields."""

from __future__ import annotations

import math
import random
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

import draftkit
from draftkit.evaluate.evaluate import Settings
from draftkit.evaluate.prompts import load_prompts
from draftkit.evaluate.statistics import acceptance_length, accepted_per_position
from draftkit.runtime.records import Generation, Request, Round

FIELDS = {
    "target", "draft", "method", "num_speculative_tokens", "temperature", "draft_sampling", "concurrency", "dataset",
    "num_prompts", "max_new_tokens", "output_tokens", "num_drafts", "num_draft_tokens", "num_accepted_tokens",
    "num_accepted_tokens_per_pos", "acceptance_length", "by_category", "tokens_per_second",
    "baseline_tokens_per_second", "matches_greedy", "num_matching_prompts",
}  # fmt: skip


@lru_cache
def zoo_result() -> dict[str, Any]:
    drafts = ["zoo:eagle", "zoo:eagle-bias", "zoo:eagle3", "zoo:draft-model"]
    return draftkit.evaluate_draft("zoo:target", drafts, Settings(concurrency=16, max_new_tokens=64))


def test_zoo_drafts_reach_their_acceptance_length() -> None:
    measured = {c["draft"]: c["acceptance_length"]["mean"] for c in zoo_result()["cells"]}
    assert measured["zoo:eagle"] >= 1.8
    assert measured["zoo:eagle3"] >= 1.8
    assert measured["zoo:eagle-bias"] >= 1.5
    assert measured["zoo:draft-model"] >= 1.3


def test_output_equals_plain_greedy_decoding() -> None:
    assert all(cell["matches_greedy"] for cell in zoo_result()["cells"])


def test_result_has_the_documented_fields() -> None:
    result = zoo_result()
    assert result["schema"] == 1
    for cell in result["cells"]:
        assert set(cell) == FIELDS
        assert cell["num_prompts"] == 80
        assert len(cell["by_category"]) == 8
        assert cell["num_accepted_tokens"] == sum(cell["num_accepted_tokens_per_pos"])
        length = 1 + cell["num_accepted_tokens"] / cell["num_drafts"]
        assert math.isclose(cell["acceptance_length"]["mean"], length)


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
