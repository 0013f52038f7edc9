"""Planted biases are found and undone, and a draft whose word is true is left alone."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftkit.results.calibration import (
    ENOUGH,
    GRID,
    SaidRounds,
    calibration_error,
    fit_temperatures,
    judge,
    mean_over_prompts,
    scale,
    scaled_survival,
    sglang_calibration,
)

K = 4


def planted(
    prompts: int, temperatures: tuple[float, ...] = (1.0,) * K, seed: int = 0, rounds: int = 40, spread: float = 0.0
) -> SaidRounds:
    """Rounds of drafts that stand with known chances, of which is said σ(T · logit): dividing by T undoes it.

    `spread`: of the prompts' own logits, which nobody says.
    """
    generator = np.random.default_rng(seed)
    prompt = np.repeat(np.arange(prompts), rounds)
    logits = generator.normal(0.6, 1.5, (len(prompt), K))
    true = 1 / (1 + np.exp(-(logits + generator.normal(0, spread, prompts)[prompt][:, None])))
    accepted = (generator.random(true.shape) < true).cumprod(axis=1).sum(axis=1)
    return SaidRounds(1 / (1 + np.exp(-logits * np.array(temperatures))), accepted, true, prompt)


def test_a_true_word_is_called_so() -> None:
    judged = judge(planted(100))
    assert judged.gap.bounds is not None
    assert judged.gap.low < 0 < judged.gap.high
    assert all(at.chance > 0.01 for at in (*judged.cumulative, *judged.conditional))
    assert not scale(planted(100)).helps


@pytest.mark.parametrize("temperatures", [(2.0,) * K, (0.5,) * K, (3.0, 1.0, 2.0, 1.0)])
def test_planted_temperatures_are_recovered(temperatures: tuple[float, ...]) -> None:
    """Within the steps of the grid that so many rounds tell apart."""
    rounds = planted(200, temperatures)
    found = scale(rounds)
    assert found.helps
    assert found.written
    for one, wanted in zip(found.temperatures, temperatures, strict=True):
        assert abs(np.log(one / wanted)) < 0.25
    assert sum(found.scaled_error) < sum(found.error) / 2
    survival = scaled_survival(rounds.said, found.temperatures)
    np.testing.assert_allclose(survival.mean(axis=0), rounds.stands.mean(axis=0), atol=0.02)


def test_a_bias_of_one_position_is_seen_there() -> None:
    rounds = planted(200, (1.0, 1.0, 4.0, 1.0))
    conditional = judge(rounds).conditional
    assert [abs(at.gap.mean) > 0.01 for at in conditional] == [False, False, True, False]
    assert conditional[2].gap.above(0)
    assert conditional[2].chance == 0
    assert conditional[2].error > 3 * conditional[2].error_if_true
    assert all(at.chance > 0.01 for at in (conditional[0], conditional[1], conditional[3]))


def test_a_file_needs_enough_rounds() -> None:
    few = scale(planted(ENOUGH // 40 - 1, (3.0,) * K))
    assert few.helps
    assert not few.written
    assert few.missing == 40


def test_expected_acceptance_has_the_mean_of_the_coins() -> None:
    """It is the same quantity with less noise."""
    rounds = planted(400)
    coins = SaidRounds(rounds.said, rounds.accepted, None, rounds.prompt)
    np.testing.assert_allclose(rounds.stands.mean(0), coins.stands.mean(0), atol=0.01)
    noisy, quiet = judge(coins).conditional[0].gap, judge(rounds).conditional[0].gap
    assert noisy.low is not None
    assert quiet.low is not None
    assert quiet.mean - quiet.low < (noisy.mean - noisy.low) / 3


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=30))
@settings(max_examples=50)
def test_the_calibration_error_is_that_of_a_plain_loop(pairs: list[tuple[float, bool]]) -> None:
    bins: dict[int, list[tuple[float, bool]]] = {}
    for said, stood in pairs:
        clipped = min(max(said, 1e-8), 1 - 1e-8)
        bins.setdefault(min(int(clipped * 15), 14), []).append((said, stood))
    expected = sum(abs(sum(said - stood for said, stood in inside)) for inside in bins.values()) / len(pairs)
    said, stood = (np.array(column, dtype=float) for column in zip(*pairs, strict=True))
    assert calibration_error(said, stood) == pytest.approx(expected, abs=1e-12)


def test_temperatures_are_those_of_the_published_method() -> None:
    """From left to right, with what is found kept: written out once more, with plain loops."""
    rounds = planted(10, (2.0, 0.5, 1.0, 3.0))
    survival = [1.0] * len(rounds.accepted)
    for k, found in enumerate(fit_temperatures(rounds)):
        errors = {}
        for temperature in GRID:
            logits = np.log(rounds.said[:, k]) - np.log1p(-rounds.said[:, k])
            tried = np.array(survival) / (1 + np.exp(-logits / temperature))
            errors[float(temperature)] = calibration_error(tried, (rounds.accepted > k).astype(float))
        assert errors[found] == pytest.approx(min(errors.values()))
        logits = np.log(rounds.said[:, k]) - np.log1p(-rounds.said[:, k])
        survival = [s / (1 + np.exp(-z / found)) for s, z in zip(survival, logits, strict=True)]


def test_what_sglang_reads() -> None:
    """Its parser wants an object with temperatures above 0, one for each draft, a text, a count and lists of numbers
    (`srt/speculative/dspark_components/dspark_sts.py` of sglang 0.5.23)."""
    file = json.loads(json.dumps(sglang_calibration(scale(planted(60, (2.0,) * K)), "code")))
    assert set(file) == {"temperatures", "dataset", "num_samples", "ece_before", "ece_after"}
    assert len(file["temperatures"]) == K
    assert all(isinstance(one, float) and one > 0 for one in file["temperatures"])
    assert isinstance(file["dataset"], str)
    assert isinstance(file["num_samples"], int)
    assert all(isinstance(one, float) for one in (*file["ece_before"], *file["ece_after"]))


PARTS = "srt/speculative/dspark_components"


def sglang_module(file: str) -> ModuleType:
    """A file of SGLang's sources in the folder that DRAFTKIT_WHEELS names; it needs msgspec."""
    if "DRAFTKIT_WHEELS" not in os.environ or importlib.util.find_spec("msgspec") is None:
        pytest.skip("DRAFTKIT_WHEELS names no folder of sources, or there is no msgspec")
    path = next(Path(os.environ["DRAFTKIT_WHEELS"]).glob(f"**/sglang/{file}.py"))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sglang_itself_takes_the_file(tmp_path: Path) -> None:
    """Its own parser of temperatures."""
    scaling = scale(planted(60, (2.0,) * K))
    path = tmp_path / "sts.json"
    path.write_text(json.dumps(sglang_calibration(scaling, "code")))
    read = sglang_module(f"{PARTS}/dspark_sts").load_sts_calibration_from_path(str(path))
    assert tuple(read.temperatures) == scaling.temperatures
    assert read.num_samples == scaling.rounds


def test_temperatures_are_those_that_sglang_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = sglang_module(f"{PARTS}/dspark_sts")
    for name in ("sglang", "sglang.srt", "sglang.srt.speculative", "sglang.srt.speculative.dspark_components"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # without all that the package imports
    monkeypatch.setitem(sys.modules, "sglang.srt.speculative.dspark_components.dspark_sts", reads)
    theirs = sglang_module("benchmark/dspark_sts_fit")
    rounds = planted(30, (2.0, 0.5, 1.0, 3.0))
    said = torch.from_numpy(rounds.said)
    found = theirs.fit_sts_temperatures(
        logits=said.log() - (-said).log1p(),
        prefix_mask=torch.from_numpy(rounds.stood),
        grid=theirs.default_temperature_grid(),
    )
    assert fit_temperatures(rounds) == pytest.approx(found["temperatures"], rel=1e-6)
    assert scale(rounds).error == pytest.approx(found["ece_before"], abs=1e-9)


@pytest.mark.long
@pytest.mark.parametrize(("prompts", "least"), [(10, 0.92), (20, 0.94), (40, 0.94), (80, 0.94)])
def test_intervals_cover(prompts: int, least: float) -> None:
    """The gap of lengths, where prompts have different numbers of rounds and differ by more than is said of them: 4,000
    draws from a thousand such prompts."""
    whole = planted(1000, spread=0.7)
    gaps, generator = (whole.survival.sum(1) - whole.stands.sum(1)).reshape(1000, -1), np.random.default_rng(0)
    sizes = generator.integers(5, gaps.shape[1] + 1, 1000)
    counted = np.arange(gaps.shape[1]) < sizes[:, None]
    truth = gaps[counted].mean()
    covered = 0
    for _ in range(4000):
        drawn = generator.integers(0, 1000, prompts)
        inside = counted[drawn]
        of = np.broadcast_to(np.arange(prompts)[:, None], inside.shape)[inside]
        gap = mean_over_prompts(gaps[drawn][inside], of)
        assert gap.low is not None
        assert gap.high is not None
        covered += gap.low <= truth <= gap.high
    assert least <= covered / 4000 <= 0.96
