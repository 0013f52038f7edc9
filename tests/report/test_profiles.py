"""Acceptance for programs that only simulate it, in the forms that they read."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Command
from fixtures.report_results import full_result

from draftkit.report.profiles import (
    FILES,
    conditional_rates_of,
    histogram,
    marginal_rates,
    profile_files,
)
from draftkit.results.cell import Cell, Interval, PromptRecord
from draftkit.results.record import Result


def cell(k: int = 3, **changes: Any) -> Cell:
    """100 rounds with a draft, of 120."""
    counts = (60, 30, 15, 6)[:k]
    made = Cell(
        target="/home/me/models/org/target", draft="org/draft", method="eagle3", num_speculative_tokens=k,
        temperature=0.0, concurrency=1, acceptance_length=Interval(1.8, 1.7, 1.9, 2), num_rounds=120, num_drafts=100,
        num_accepted_tokens=sum(counts), num_accepted_tokens_per_pos=counts, dataset="zoo", num_prompts=2,
        by_prompt=(PromptRecord("a", 50, 50, 100), PromptRecord("b", 70, 55, 125)),
    )  # fmt: skip
    return replace(made, **changes)


RESULT = Result((cell(2), cell(3), cell(3, concurrency=8, num_drafts=99)), {"draftkit": "0.1.0"})


def files() -> dict[str, str]:
    found = profile_files(RESULT)
    assert found.keys() == {f"org--draft-T0/{name}" for name in FILES}
    return {name.partition("/")[2]: text for name, text in found.items()}


def test_marginal_and_conditional_rates_are_told_apart() -> None:
    marginal = marginal_rates(cell())
    assert marginal == [0.6, 0.3, 0.15]
    assert conditional_rates_of(marginal) == pytest.approx([0.6, 0.5, 0.5])
    assert conditional_rates_of([0.5, 0.0, 0.0]) == [0.5, 0.0, 0.0]
    assert histogram(cell()) == {1: 40, 2: 30, 3: 15, 4: 15}


def test_the_profile_has_the_fields_of_modelopt() -> None:
    profile = json.loads(files()["speculation_profile.json"])
    assert (profile["schema_version"], profile["measured"], profile["num_speculative_tokens"]) == ("1.0", True, 3)
    assert profile["marginal_accept_rates"] == [0.6, 0.3, 0.15]
    assert profile["conditional_accept_rates"] == [0.6, 0.5, 0.5]
    assert profile["mean_accept_length"] == 2.05
    assert profile["accept_length_by_k"] == {"2": 1.9, "3": 2.05}
    assert profile["mean_accept_length_per_request"] == pytest.approx((2 + 1 + 55 / 70) / 2, abs=1e-6)
    assert profile["validation"]["mean_consistency"]["passed"] is True
    steps = profile["acceptance_length_histogram"]
    assert sum(int(length) * count for length, count in steps.items()) / sum(steps.values()) == 2.05
    assert profile["target_model"]["name"] == "org/target"  # and no path of this machine
    assert "/home" not in files()["speculation_profile.json"]


def test_vllm_takes_the_rates() -> None:
    """The rules of its `_resolve_synthetic_acceptance_rates`: K of them, in [0, 1], and none above the one before."""
    for k, config in json.loads(files()["vllm.json"]).items():
        rates = config["synthetic_acceptance_rates"]
        assert config["num_speculative_tokens"] == len(rates) == int(k)
        assert all(0 <= rate <= 1 for rate in rates)
        assert rates == sorted(rates, reverse=True)
        assert config["rejection_sample_method"] == "synthetic"


def test_dynamo_sglang_and_golden_lengths() -> None:
    assert "--aic-nextn 3 --aic-nextn-accept-rates 0.600000,0.500000,0.500000\n" in files()["dynamo.sh"]
    assert re.findall(r"ACC_LEN=(\S+) .*match-expected  # with --speculative-num-steps (\d)", files()["sglang.sh"]) == [
        ("1.900000", "2"), ("2.050000", "3"),
    ]  # fmt: skip
    assert yaml.safe_load(files()["golden_length.yaml"]) == {"org/target": {"temperature_0": {2: 1.9, 3: 2.05}}}


def test_nothing_is_given_on_of_cells_without_drafts() -> None:
    assert profile_files(Result((cell(num_drafts=0),), {})) == {}


@pytest.mark.slow
def test_the_command_writes_them(draftkit: Command, tmp_path: Path) -> None:
    source, out = tmp_path / "result.json", tmp_path / "profiles"
    source.write_text(json.dumps(full_result()))
    arguments = ("report", source, "--out", tmp_path / "report.html", "--profiles", out)
    assert draftkit(*arguments).code == 0
    assert {path.name for path in out.glob("*/*")} == FILES
    assert draftkit(*arguments).code == 0  # its own
    (out / "mine.txt").write_text("mine")
    assert draftkit(*arguments, "--force").code == 1
    assert (out / "mine.txt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a\0b", "../../x", "a\nb: 1", "a" * 5000, "C:\\x", "ü" * 300])
def test_names_of_any_text(name: str, draftkit: Command, tmp_path: Path) -> None:
    source, out = tmp_path / "result.json", tmp_path / "profiles"
    written = full_result()
    for cell in written["cells"]:
        cell |= {"draft": name, "engine": name, "dataset": name}
    source.write_text(json.dumps(written))
    outcome = draftkit("report", source, "--out", tmp_path / "report.html", "--profiles", out)
    assert outcome.code == 0, outcome.err
    assert {path.name for path in out.glob("*/*")} == FILES
    assert sorted(path.name for path in tmp_path.iterdir()) == ["profiles", "report.html", "result.json"]
    assert all(len(yaml.safe_load(path.read_text())) == 1 for path in out.glob("*/golden_length.yaml"))
