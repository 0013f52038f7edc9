"""Evaluation: the zoo's drafts are as good as the zoo promises, and results have the documented fields."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from conftest import Command
from fixtures.checkpoints import pico
from fixtures.recorded_engine import RecordedEngine

import draftkit
from draftkit import zoo
from draftkit.checks.evidence import Asked, Evidence
from draftkit.checks.registry import findings
from draftkit.data.loss_mask import Renderer
from draftkit.data.regenerate import Dialogue
from draftkit.data.rows import read_rows
from draftkit.data.tokenizer import load_tokenizer
from draftkit.errors import DraftkitError
from draftkit.evaluate.engines.own import OwnEngine
from draftkit.evaluate.measure import Conversations, Lane, Report, Run
from draftkit.evaluate.near_ties import near_ties, own_attention
from draftkit.evaluate.options import parse_floats, parse_integers
from draftkit.evaluate.planning import plan_evaluation
from draftkit.evaluate.prompts import Prompt, encode_prompt, load_prompt_set, load_prompts, registry
from draftkit.evaluate.speed import RoundTimes, speed_model
from draftkit.hub.locate import locate
from draftkit.layout import digest
from draftkit.layout.digest import target_sha256
from draftkit.loading import OpenedTarget
from draftkit.requests import DraftSampling, Request, SamplingParameters
from draftkit.results.cell import Cell, Interval, Times
from draftkit.results.record import Result, read_result, result_from, result_json
from draftkit.results.saved import ResultFile
from draftkit.results.settings import Settings, Sweep, read_schedule
from draftkit.results.statistics import acceptance_length, accepted_per_position, lengths_by_convention
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.records import Generation, Round
from draftkit.targets.chat import token_ids

FIELDS = {
    "target", "draft", "method", "num_speculative_tokens", "temperature", "draft_sampling", "concurrency", "dataset",
    "num_prompts", "max_new_tokens", "output_tokens", "num_drafts", "num_draft_tokens", "num_accepted_tokens",
    "num_accepted_tokens_per_pos", "acceptance_length", "by_category", "tokens_per_second",
    "baseline_tokens_per_second", "matches_greedy", "num_matching_prompts", "expected_acceptance_length", "ttft_ms",
    "tpot_ms", "itl_ms", "top_k", "top_p", "min_p", "seed", "verification", "engine", "acceptance_per_pos",
    "conditional_acceptance_per_pos", "acceptance_length_by_convention", "runtime_s", "speedup", "baseline_ttft_ms",
    "baseline_output_tokens", "ttft_quantiles_ms", "tpot_quantiles_ms", "itl_quantiles_ms", "repetition", "samples",
    "memory", "target_sha256", "draft_sha256", "prompts_sha256", "template_sha256",
    "num_drafts_beyond", "near_ties", "num_rounds", "by_prompt",
}  # fmt: skip


class WithoutPlain(OwnEngine):
    """draftkit's own engine, where nothing is asked of plain decoding: a third of the time of a measurement."""

    without_plain = "nothing is compared with it"


def recorded(
    drafts: str | Sequence[str] = "zoo:eagle",
    asked: Settings | Sweep | None = None,
    *,
    target: str = "zoo:target",
    engine: RecordedEngine | None = None,
    **options: Any,
) -> Result:
    """A measurement of which only the bookkeeping counts."""
    return draftkit.evaluate_draft(target, drafts, asked or QUICK, engines=[engine or RecordedEngine()], **options)


@lru_cache
def zoo_result() -> Any:
    drafts = [f"zoo:{name}" for name in zoo.drafts()]
    return draftkit.evaluate_draft(
        "zoo:target", drafts, Settings(concurrency=16, limit=16, max_new_tokens=32, repeats=0)
    )


@pytest.mark.long
def test_zoo_drafts_reach_their_acceptance_length() -> None:
    measured = {c.draft: c.acceptance_length.mean for c in zoo_result().cells}
    assert measured["zoo:eagle"] >= 1.8
    assert measured["zoo:eagle3"] >= 1.8
    assert measured["zoo:draft-model"] >= 1.3
    for name in ("p-eagle", "pard", "mlp-speculator", "dflash", "dspark"):
        assert measured[f"zoo:{name}"] >= 1.5


@pytest.mark.slow
def test_output_equals_plain_greedy_decoding() -> None:
    assert all(cell.matches_greedy for cell in zoo_result().cells)


@pytest.mark.slow
def test_result_has_the_documented_fields() -> None:
    result = zoo_result()
    assert result.to_dict()["schema"] == 1
    for cell in result.cells:
        assert set(cell.to_dict()) == FIELDS
        assert cell.num_prompts == 16
        assert len(cell.by_category) == 8
        assert cell.num_accepted_tokens == sum(cell.num_accepted_tokens_per_pos)
        length = 1 + cell.num_accepted_tokens / cell.num_drafts
        assert math.isclose(cell.acceptance_length.mean, length)
        assert math.isclose(1 + sum(cell.acceptance_per_pos), length)
        rate = math.prod(cell.conditional_acceptance_per_pos)
        assert math.isclose(rate, cell.acceptance_per_pos[-1], abs_tol=1e-9)
    for name in ("date", "hardware", "dataset", "first_prompt_ids", "settings"):
        assert name in result.provenance


@pytest.mark.slow
def test_a_result_reads_back_as_it_was_made() -> None:
    result = zoo_result()
    stored = json.loads(result_json(result.to_dict()))
    named = stored["provenance"]  # the prompts' file without its folder
    assert result_from(stored, Path("result.json")) == replace(result, path="result.json", provenance=named)


@pytest.mark.slow
def test_samples_spell_the_output() -> None:
    cell = zoo_result().cells[0]
    for sample in cell.samples:
        for r in sample.rounds:
            stood = r.drafted[: min(r.accepted, len(r.emitted))]
            assert r.emitted[: len(stood)] == stood
            assert len(r.emitted) <= r.accepted + 1


def sampled_cell(engine: type[OwnEngine] = OwnEngine, **changes: Any) -> Any:
    sizes = {"concurrency": 80, "limit": 24, "max_new_tokens": 48, "repeats": 0}
    settings = Settings(sampling=SamplingParameters(temperature=1.0), **(sizes | changes))
    return draftkit.evaluate_draft("zoo:target", ["zoo:eagle"], settings, engines=[engine()]).cells[0]


@pytest.mark.slow
def test_expected_acceptance_agrees_with_the_measured_one() -> None:
    cell = sampled_cell(draft_sampling=DraftSampling("probabilistic"))
    measured, expected = cell.acceptance_length, cell.expected_acceptance_length
    assert measured.low - 0.05 <= expected.mean <= measured.high + 0.05
    assert expected.mean != measured.mean
    assert cell.draft_sampling == "probabilistic"
    assert cell.matches_greedy is cell.num_matching_prompts is None


@pytest.mark.long
def test_coupled_output_is_that_of_plain_decoding() -> None:
    cell = sampled_cell(verification="coupled", draft_sampling=DraftSampling("probabilistic"))
    assert cell.num_matching_prompts == cell.num_prompts
    assert cell.acceptance_length.mean > 1.2


@pytest.mark.slow
def test_latencies_are_consistent() -> None:
    """Gaps between chunks carry as many tokens as rounds emit, so their ratio to the time per token is about that."""
    cell = zoo_result().cells[0]
    ratio = cell.itl_ms.mean / cell.tpot_ms.mean
    assert ratio == pytest.approx(cell.acceptance_length.mean, rel=0.35)
    assert cell.ttft_ms.p50 <= cell.ttft_ms.p99


@pytest.mark.slow
def test_ngram_lookup_needs_no_checkpoint() -> None:
    settings = Settings(concurrency=4, limit=8, max_new_tokens=48, repeats=0)
    (cell,) = draftkit.evaluate_draft("zoo:target", ["ngram:2-3"], settings).cells
    assert (cell.method, cell.matches_greedy) == ("ngram", True)
    assert cell.num_draft_tokens < 4 * cell.num_drafts  # without a match nothing is drafted
    with pytest.raises(DraftkitError, match="ngram:MIN-MAX"):
        draftkit.evaluate_draft("zoo:target", ["ngram:x"], settings)


def test_options_written_as_text() -> None:
    assert parse_integers("num_speculative_tokens", "1-3,8") == (1, 2, 3, 8)
    assert parse_floats("temperature", "0,0.7") == (0.0, 0.7)
    assert read_schedule("4:6,16:3") == {4: 6, 16: 3}
    assert Settings(disable_above_batch=8).schedule == {8: 4}
    assert Settings().schedule is None
    for call in (
        lambda: parse_integers("num_speculative_tokens", "0-3"),
        lambda: parse_integers("num_speculative_tokens", "3-1"),
        lambda: parse_floats("temperature", "hot"),
        lambda: read_schedule("4"),
        lambda: Settings(k_by_batch={1: 1}, disable_above_batch=2),
    ):
        with pytest.raises(DraftkitError):
            call()


QUICK = Settings(concurrency=4, limit=6, max_new_tokens=24, repeats=0)


def test_a_sweep_varies_k_concurrency_and_temperature() -> None:
    engine, sweep = RecordedEngine(), QUICK.sweep(k=(1, 3), concurrency=(1, 4), temperature=(0.0, 1.0))
    cells = recorded(asked=sweep, engine=engine).cells
    settings = [(c.temperature, c.concurrency, c.num_speculative_tokens) for c in cells]
    assert settings == [(t, b, k) for t in (0.0, 1.0) for b in (1, 4) for k in (1, 3)]
    assert engine.ran == [(None, 0), ("zoo:eagle", 1), ("zoo:eagle", 3)] * 4  # plain decoding once for all K


@pytest.mark.long
def test_what_is_accepted_does_not_depend_on_the_batch() -> None:
    sweep = QUICK.sweep(k=(1, 3), concurrency=(1, 4))
    result = draftkit.evaluate_draft("zoo:target", ["zoo:eagle"], sweep, engines=[WithoutPlain()])
    greedy = {(c.concurrency, c.num_speculative_tokens): c for c in result.cells}
    for k in (1, 3):
        counts = {tuple(greedy[batch, k].num_accepted_tokens_per_pos) for batch in (1, 4)}
        assert len(counts) == 1


def test_an_interrupted_sweep_goes_on(tmp_path: Path) -> None:
    path, sweep = tmp_path / "result.json", QUICK.sweep(k=(1, 2))

    def stop_at_the_second(name: str, *_: object) -> None:
        if "K=2" in name:
            raise KeyboardInterrupt

    saved = ResultFile(path, resume=False)
    with pytest.raises(KeyboardInterrupt):
        recorded(asked=sweep, on_progress=stop_at_the_second, saved=saved)
    (kept,) = json.loads(path.read_text())["cells"]
    ran = []
    saved = ResultFile(path, resume=True)
    recorded(asked=sweep, on_progress=lambda name, *_: ran.append(name), saved=saved)
    result = json.loads(path.read_text())
    assert set(ran) == {f"cell 1 of 1: {what}, batch 4, T=0" for what in ("no draft", "zoo:eagle, K=2")}
    assert result["cells"][0] == kept
    assert [c["num_speculative_tokens"] for c in result["cells"]] == [1, 2]
    with pytest.raises(DraftkitError, match="exists"):
        ResultFile(path, resume=False)
    with pytest.raises(DraftkitError, match="other settings"):
        recorded(asked=replace(QUICK, max_new_tokens=16).sweep(k=(1, 2)), saved=ResultFile(path, resume=True))
    path.write_text(path.read_text()[:100])
    with pytest.raises(DraftkitError, match="not the result"):
        ResultFile(path, resume=True)


def test_figures_of_other_weights_are_measured_again(tmp_path: Path) -> None:
    """Weights of the same size and date, written over the old ones: of the draft, then of the target."""
    draft = str(draftkit.convert_checkpoint("zoo:eagle", tmp_path / "draft"))
    target = str(shutil.copytree(zoo.path("target"), tmp_path / "target"))
    settings, engine = Settings(concurrency=2, limit=2, max_new_tokens=16, repeats=0), RecordedEngine()

    def run() -> Result:
        saved = ResultFile(tmp_path / "result.json", resume=True)
        return recorded(draft, settings.sweep(k=(2, 3)), target=target, engine=engine, saved=saved)

    before = run()
    assert "measured-again" not in {w.name for w in run().warnings}
    for folder, changed in ((draft, "draft"), (target, "target")):
        weights = max(Path(folder).glob("*.safetensors"), key=lambda path: path.stat().st_size)
        stat, data = weights.stat(), bytearray(weights.read_bytes())
        data[-64:] = bytes(64)  # the last rows of the last tensor, to zero
        weights.write_bytes(data)
        os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        after = run()
        assert [c.num_speculative_tokens for c in after.cells] == [2, 3]
        said = [w.message for w in after.warnings if w.name == "measured-again"]
        assert len(said) == 2
        assert all(f"{changed} changed since" in message for message in said)
        assert (
            json.loads((tmp_path / "result.json").read_text())["cells"]
            == json.loads(result_json(after.to_dict()))["cells"]
        )
        for new, old in zip(after.cells, before.cells, strict=True):
            assert new.digests[f"{changed}_sha256"] != old.digests[f"{changed}_sha256"]
            assert new.runtime_s != old.runtime_s
        before = after


def test_weights_are_digested_while_they_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, load = Event(), OpenedTarget.load

    def digested(folder: Path, given_up: Event) -> str:
        begun.set()
        return target_sha256(folder, given_up)

    def loaded(opened: OpenedTarget, **where: Any) -> Any:
        assert begun.wait(60)
        return load(opened, **where)

    monkeypatch.setattr(digest, "target_sha256", digested)
    monkeypatch.setattr(OpenedTarget, "load", loaded)
    saved = ResultFile(tmp_path / "result.json", resume=False)
    settings = Settings(limit=1, max_new_tokens=8, num_speculative_tokens=2)
    result = draftkit.evaluate_draft("zoo:target", ["zoo:eagle3"], settings, saved=saved)
    assert result.cells[0].target_sha256 == target_sha256(locate("zoo:target").path)


def test_a_digest_that_is_given_up_ends() -> None:
    given_up = Event()
    given_up.set()
    with pytest.raises(CancelledError):
        target_sha256(locate("zoo:target").path, given_up)
    begun = digest.TargetDigest(locate("zoo:target").path)
    begun.stop()
    with suppress(CancelledError):  # it may be done already
        assert begun.result() == target_sha256(locate("zoo:target").path)


@pytest.mark.slow
def test_statistics_follow_from_the_records_of_rounds(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    result = draftkit.evaluate_draft("zoo:target", ["zoo:eagle"], QUICK, engines=[WithoutPlain()], records=path)
    (cell,) = result.cells
    rounds = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rounds) == cell.num_drafts
    assert sum(r["accepted"] for r in rounds) == cell.num_accepted_tokens
    assert sum(r["finished"] is not None for r in rounds) == cell.num_prompts
    assert all(len(r["proposal"]) == r["drafted"] == 4 for r in rounds)


def test_a_result_without_numbers_is_still_json() -> None:
    assert json.loads(result_json({"mean": float("nan"), "all": [1.0, float("inf")]})) == {
        "mean": None,
        "all": [1.0, None],
    }


@pytest.mark.slow
def test_all_turns_are_asked_after_the_answers_before_them(tmp_path: Path) -> None:
    path = tmp_path / "turns.jsonl"
    path.write_text('{"id": "a", "turns": ["def add(a, b):", "Now subtract."]}\n{"id": "b", "turns": ["import os"]}\n')
    settings = Settings(prompts=str(path), turns="all", max_new_tokens=12)
    result = draftkit.evaluate_draft("zoo:target", ["zoo:eagle"], settings)
    (cell,) = result.cells
    assert (cell.num_prompts, cell.matches_greedy) == (3, True)
    second = next(s for s in cell.samples or () if s.id == "a/2")
    first = next(s for s in cell.samples or () if s.id == "a")
    answer = first.first + "".join(text for r in first.rounds for text in r.emitted)
    assert answer.strip() in second.prompt
    assert "Now subtract." in second.prompt
    only_first = recorded(asked=replace(settings, turns="first"))
    assert "first-turn-only" in {w.name for w in only_first.warnings}
    assert "first-turn-only" not in {w.name for w in result.warnings}


@pytest.mark.long
def test_advice_agrees_with_its_own_measurements() -> None:
    sweep = replace(QUICK, repeats=1).sweep(concurrency=(1, 2))
    result = draftkit.evaluate_draft("zoo:target", ["zoo:eagle"], sweep, advise=True)
    (model,) = result.speed_models
    assert [(m.concurrency, m.num_speculative_tokens) for m in model.measured] == [(1, 4), (2, 4)]
    assert {p.concurrency for p in model.predicted} == {1, 2}
    assert (model.schedule is None) == (model.best_k is None) == (model.withheld is not None)


def speed_cell() -> Cell:
    times = Times(0.0, 0.0, 0.0)
    return Cell(
        target="t", draft="d", num_speculative_tokens=2, concurrency=1, temperature=0.0, acceptance_length=None,
        acceptance_per_pos=(0.8, 0.4), ttft_ms=times, baseline_ttft_ms=times, output_tokens=1000, num_prompts=1,
        speedup=2.0, speedup_interval=Interval(2.0, 1.8, 2.2, 8),
    )  # fmt: skip


def test_speed_up_of_long_answers_is_length_times_step_over_round() -> None:
    times = RoundTimes({(1, 0): 10.0, (1, 1): 11.0, (1, 3): 13.0, (4, 0): 10.0, (4, 1): 40.0, (4, 3): 80.0})
    model = speed_model("draft", [speed_cell()], times)
    predicted = {(p.concurrency, p.num_speculative_tokens): p for p in model.predicted}
    assert predicted[1, 2].speedup == pytest.approx(2.2 * 10 / 12)  # the round between K = 1 and 3
    assert predicted[1, 3].speedup == pytest.approx((2.2 + 0.2) * 10 / 13)  # the third falls as the second did
    # K = 3 would be as good, but was not drafted: what is extrapolated is not advised.
    assert (model.drafted, model.best_k, model.schedule, model.stop_above) == (2, 2, ((1, 1, 2), (2, 4, 0)), 1)
    assert model.mean_error == pytest.approx(1 - 2.2 * 10 / 12 / 2)


@pytest.mark.parametrize(
    ("interval", "reason"),
    [
        (Interval(2.0, 1.8, 2.2, 8), None),
        (Interval(2.0, 1.95, 2.05, 8), "batch 1 K=2: 1.83 predicted, 1.95 to 2.05 measured"),
        (Interval(2.0, 1.0, 4.0, 8), "known well enough"),
        (Interval(2.0, None, None, 1), "known well enough"),
        (None, "known well enough"),
    ],
)
def test_advice_that_misses_what_was_measured_is_withheld(interval: Interval | None, reason: str | None) -> None:
    times = RoundTimes({(1, 0): 10.0, (1, 1): 11.0, (1, 3): 13.0})
    model = speed_model("draft", [replace(speed_cell(), speedup_interval=interval)], times)
    if reason is None:
        assert (model.withheld, model.schedule) == (None, ((1, 1, 2),))
    else:
        assert reason in model.withheld
        assert "--k 1,2,3" in model.withheld
        assert model.schedule is model.best_k is model.stop_above is None


def test_advice_needs_a_measurement_at_each_batch() -> None:
    times = RoundTimes({(b, k): ms for b in (1, 4) for k, ms in ((0, 10.0), (1, 11.0), (3, 13.0))})
    cells = [speed_cell(), replace(speed_cell(), concurrency=4, speedup_interval=Interval(1.5, 0.9, 2.2, 8))]
    assert "no measured speed-up at batch 4 is known well enough" in (speed_model("draft", cells, times).withheld or "")


def test_advice_is_not_held_against_what_its_run_doubts() -> None:
    """However narrow its interval is."""
    times = RoundTimes({(1, 0): 10.0, (1, 1): 11.0, (1, 3): 13.0})
    model = speed_model("draft", [replace(speed_cell(), pace_error=0.16, passes=3)], times)
    assert "known well enough" in (model.withheld or "")


def doubts(**measured: Any) -> list[str]:
    return [finding.name for finding in findings(Evidence(settings=QUICK, **measured), "measurement")]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"repetition": 0.9}, "loops"),
        ({"itl_ms": Times(9.0, 9.0, 9.0)}, "latency-disagrees"),
        ({"ttft_quantiles_ms": (*[1.0] * 100, 50.0)}, "no-warm-up"),
        ({"baseline_output_tokens": 80}, "unequal-baseline"),
        ({"baseline_ttft_ms": Times(800.0, 800.0, 800.0)}, "mostly-prompts"),
        ({"baseline_ttft_ms": Times(400.0, 400.0, 400.0)}, None),
        ({}, None),
    ],
)
def test_usual_mistakes_are_noticed(changes: dict[str, Any], name: str | None) -> None:
    sound = Cell(
        target="t", draft="d", num_speculative_tokens=4, concurrency=1, temperature=0.0, repetition=0.1,
        acceptance_length=None, itl_ms=Times(3.0, 3.0, 3.0), tpot_ms=Times(1.0, 1.0, 1.0),
        acceptance_length_by_convention={"eagle": 3.0}, ttft_quantiles_ms=(1.0,) * 101, num_prompts=8,
        output_tokens=100, baseline_output_tokens=100, baseline_tokens_per_second=12.5,
    )  # fmt: skip
    assert doubts(cell=replace(sound, **changes)) == ([name] if name else [])


def test_what_no_draft_brings_sooner_is_told_apart() -> None:
    """Of requests of a second with 11 tokens, 0.9 s pass before the first; the others come in 8 ms instead of 10."""
    times = {"baseline_ttft_ms": Times(900.0, 900.0, 900.0), "tpot_ms": Times(8.0, 8.0, 8.0)}
    cell = replace(speed_cell(), num_prompts=4, baseline_output_tokens=44, baseline_tokens_per_second=11.0, **times)
    (finding,) = (f for f in findings(Evidence(cell=cell, settings=QUICK), "measurement") if f.name == "mostly-prompts")
    assert "90% of plain decoding's time" in finding.message
    assert "1.25 × as fast with the draft" in finding.message


def test_two_beginnings_are_noticed() -> None:
    assert doubts(asked=Asked("zoo", [1, 1], 0, (1, 1, 5), 1)) == ["double-bos"]
    assert doubts(asked=Asked("zoo", [1, 1], 0, (1, 5, 1), 1)) == []


def test_a_draft_that_was_made_for_another_target_is_said_so(tmp_path: Path) -> None:
    config = draftkit.convert_checkpoint("zoo:eagle", tmp_path / "draft", target="zoo:target") / "config.json"
    stated = json.loads(config.read_text())
    stated["draftkit"]["provenance"]["target"] = "org/tuned"
    config.write_text(json.dumps(stated))
    drafts = [str(tmp_path / "draft"), "zoo:dspark"]
    quick = Settings(limit=1, max_new_tokens=2, num_speculative_tokens=1, repeats=0)
    result = recorded(drafts, quick, target=str(zoo.path("target")))
    (warning,) = (warning for warning in result.warnings if warning.name == "other-target")
    assert warning.message.endswith("draft says that it was converted for org/tuned; this target is zoo:target")


@pytest.mark.slow
def test_confidences_are_settings_of_one_sweep(draftkit: Command, tmp_path: Path) -> None:
    """Each value is a cell of its own, which drafts no more than that of a smaller one."""
    asked = ("eval", "--target", "zoo:target", "--draft", "zoo:dspark", "--limit", 2, "--max-new-tokens", 12)
    asked = (*asked, "--set", "repeats=0", "--out", tmp_path / "r.json")
    assert draftkit(*asked, "--set", "draft_confidence=0,0.5").code == 0
    ran = draftkit(*asked, "--set", "draft_confidence=0,0.5,0.9", "--resume")
    assert ran.code == 0
    assert "draft confidence" in " ".join(ran.out.split())
    result = read_result(tmp_path / "r.json")
    assert [cell.min_confidence for cell in result.cells] == [None, 0.5, 0.9]
    drafted = [cell.num_draft_tokens for cell in result.cells]
    assert drafted == sorted(drafted, reverse=True)
    assert drafted[0] > drafted[-1]
    assert all(cell.num_matching_prompts == 2 for cell in result.cells)


def test_conventions_count_the_same_rounds() -> None:
    """Two answers: rounds of 3 and 1 tokens; and a miss of n-gram lookup between rounds of 2."""
    first = Generation(Request("a", (1,), 9), [0] * 5, [Round(1, 2, 2, 3), Round(4, 2, 0, 1)])
    second = Generation(Request("b", (1,), 9), [0] * 6, [Round(1, 2, 1, 2), Round(3, 0, 0, 1), Round(4, 2, 1, 2)])
    assert lengths_by_convention([first, second], ["x", "y"]) == pytest.approx(
        {
            "vllm": 1 + 4 / 4, "eagle": 9 / 5, "sglang": 11 / 5, "modelopt": (5 / 3 + 6 / 4) / 2,
            "macro by prompt": 2.0, "macro by category": 2.0,
        }
    )  # fmt: skip
    assert lengths_by_convention([], []) == {}


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


@pytest.mark.slow
def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """Rounds of one prompt share their acceptance rate, so an interval over rounds would be far too narrow."""
    generator = random.Random(0)
    covered = 0
    for _ in range(60):
        sample = []
        for _prompt in range(40):
            rate = generator.random()
            sample.append(generation(*(int(generator.random() < rate) for _ in range(30))))
        interval = acceptance_length(sample)
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


REAL = Path(__file__).parents[3] / "shared" / "data"


@pytest.mark.skipif(not REAL.exists(), reason="published prompt files are not part of the repository")
@pytest.mark.parametrize(
    ("file", "size", "turns"),
    [("mt_bench", 80, 2), ("gsm8k_80", 80, 1), ("humaneval_80", 80, 1), ("spec_bench", 480, 2), ("math_500_20", 20, 1)],
)
def test_files_that_others_publish(file: str, size: int, turns: int) -> None:
    prompts = load_prompts(str(REAL / f"{file}.jsonl"))
    assert len(prompts) == size
    assert max(len(p.turns) for p in prompts) == turns


class FakeHub:
    """What `datasets` and the Hub give for one dataset."""

    def __init__(self, rows: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch):
        datasets = pytest.importorskip("datasets")
        self.asked: list[object] = []

        def load_dataset(*names: object, **options: object) -> list[dict[str, object]]:
            self.asked += [*names, options]
            return rows

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        commit = type("Info", (), {"sha": "c0ffee"})()
        monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: commit)


def test_named_sets_are_read_by_their_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub([{"prompt": ["one", "two"], "prompt_id": 7, "category": "math"}], monkeypatch)
    found = load_prompt_set("mt-bench")
    assert found.prompts == [Prompt("7", "math", ("one", "two"))]
    assert (found.source, found.revision, found.split) == ("HuggingFaceH4/mt_bench_prompts", "c0ffee", "train")
    assert hub.asked == ["HuggingFaceH4/mt_bench_prompts", None, {"split": "train", "revision": "c0ffee"}]
    FakeHub([{"prompt": "def f():", "task_id": "HumanEval/0"}], monkeypatch)
    (prompt,) = load_prompt_set("humaneval").prompts
    assert prompt == Prompt("HumanEval/0", "all", ("Complete the code I provided.\n\ndef f():",))


def test_masked_rows_are_left_out_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    masked = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    FakeHub([{"question_id": "1", "turns": [masked]}, {"question_id": "2", "turns": ["real"]}], monkeypatch)
    found = load_prompt_set("speed-bench")
    assert ([p.text for p in found.prompts], found.masked) == (["real"], 1)
    assert doubts(asked=Asked(found.source, [1], found.masked, (1,), None)) == ["masked-prompts"]


def test_both_sources_of_mt_bench_have_names_of_their_own() -> None:
    hubs = {name: described.get("hub") for name, described in registry().items() if name.startswith("mt-bench")}
    assert len(set(hubs.values())) == len(hubs) == 2


def test_thinking_reaches_the_template() -> None:
    """Templates that know no thinking ignore it; the result says what was asked for."""
    result = recorded(asked=replace(QUICK, limit=2, thinking=False))
    assert result.provenance["dataset"]["thinking"] is False


def test_bundled_prompts_are_eight_categories_of_ten() -> None:
    prompts = load_prompts("zoo")
    categories = [p.category for p in prompts]
    assert len(prompts) == 80
    assert {categories.count(c) for c in categories} == {10}


def test_limit_keeps_every_category() -> None:
    assert len({p.category for p in load_prompts("zoo", limit=8)}) == 8


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"cells": [], "provenance": []}', '{"cells": {}, "provenance": {}}', '{"cells": [1], "provenance": {}}',
     '{"cells": [{}], "provenance": {}}', "[" * 10_000 + "]" * 10_000,
     '{"cells": ' + "[" * 10_000 + "]" * 10_000 + "}"],
)  # fmt: skip
def test_what_is_no_result_does_not_go_on(text: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(DraftkitError, match=str(path)):
        ResultFile(path, resume=True)
    assert path.read_text() == text
    for resume in (False, True):
        with pytest.raises(DraftkitError, match="a folder"):
            ResultFile(tmp_path, resume=resume)


@pytest.mark.parametrize("option", ["--out", "--records"])
def test_a_place_that_cannot_be_written_is_found_before_the_first_cell(
    option: str, tmp_path: Path, draftkit: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "blocks").write_text("")
    monkeypatch.setattr(OwnEngine, "lane", lambda *_: pytest.fail("it was measured first"))
    arguments = ("--target", "zoo:target", "--draft", "zoo:eagle", "--limit", 1)
    ran = draftkit("eval", *arguments, option, tmp_path / "blocks" / "file")
    assert ran.code == 1
    assert "cannot be written" in ran.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blocks"]


SAME_QUESTION = {
    "prompt": {"prompt": "def f"},
    "question": {"question": "def f"},
    "turns": {"turns": ["def f"]},
    "messages": {"messages": [{"role": "user", "content": "def f"}]},
    "ShareGPT": {"conversations": [{"from": "human", "value": "def f"}, {"from": "gpt", "value": "x"}]},
    "list": {"prompt": [{"role": "user", "content": "def f"}]},
    "system": {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "def f"}]},
    "text": {"text": "def f"},
    "line": "def f",
    "JSON": [{"prompt": "def f"}],
}


@pytest.mark.slow
@pytest.mark.parametrize("template", [None, True, False])
@pytest.mark.parametrize("shape", SAME_QUESTION)
def test_prompts_have_the_same_shapes_in_eval_and_in_regenerate(
    shape: str, template: bool | None, tmp_path: Path
) -> None:
    row = SAME_QUESTION[shape]
    path = tmp_path / f"prompts.{ {str: 'txt', list: 'json'}.get(type(row), 'jsonl') }"
    path.write_text(row if isinstance(row, str) else json.dumps(row))
    target = load_tokenizer("zoo:target")
    (prompt,) = load_prompts(str(path))
    asked = encode_prompt(prompt, target.tokenizer, template=template)
    (source,) = read_rows(str(path))
    assert Dialogue.of(source).ask(Renderer(target, template=template)) == (asked, None)
    plain = token_ids(target.tokenizer, "Be brief.\ndef f" if shape == "system" else "def f")
    assert (list(asked) == plain) is (template is False or (template is None and shape == "text"))


def test_every_turn_of_a_conversation_follows_its_system_message(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    roles = ("system", "user", "assistant", "user")
    path.write_text(json.dumps({"messages": [{"role": role, "content": f"{role}'s text"} for role in roles]}))
    result = recorded("ngram", Settings(prompts=str(path), turns="all", max_new_tokens=4))
    asked = [sample.prompt for sample in result.cells[0].samples or ()]
    assert len(asked) == 2
    assert all(text.count("system's text") == 1 for text in asked)


def test_a_result_says_whether_the_template_was_applied() -> None:
    settings = Settings(limit=1, max_new_tokens=4, template=False)
    result = recorded("ngram", settings)
    assert (result.cells[0].template_sha256, result.provenance["settings"]["template"]) == (None, False)
    assert [sample.prompt.count("<|start_header|>") for sample in result.cells[0].samples or ()] == [0]


# Output that is not greedy


@pytest.mark.slow
def test_output_that_is_not_greedy_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lane = OwnEngine.lane

    @contextmanager
    def spoiled(self: OwnEngine, source: str | None, asked: Conversations, report: Report) -> Iterator[Lane]:
        with lane(self, source, asked, report) as sound:

            def run(requests: Sequence[Request]) -> Run:
                found = sound(requests)
                if source is not None:
                    found.generations[0].tokens[2] += -1 if found.generations[0].tokens[2] else 1
                return found

            yield run

    monkeypatch.setattr(OwnEngine, "lane", spoiled)
    saved = ResultFile(tmp_path / "result.json", resume=False)
    with pytest.raises(
        DraftkitError, match=r"output token 2 is \d+ \(log-probability -[\d.]+\) and without it \d+ \(-"
    ):
        draftkit.evaluate_draft("zoo:target", ["ngram"], QUICK, saved=saved)
    assert not saved.cells
    sampled = replace(QUICK, sampling=SamplingParameters(temperature=1.0))
    assert draftkit.evaluate_draft("zoo:target", ["ngram"], sampled).cells


@pytest.mark.parametrize(("by", "tie"), [(0.0, True), (1e-6, True), (1e-2, False), (float("nan"), False)])
def test_a_near_tie_may_fall_either_way(by: float, tie: bool) -> None:
    """After the prompt the logit of token 5 is 20 and the largest, but for token 6, where it is larger by a share."""
    model = pico.llama(num_hidden_layers=2, attn_implementation=ATTENTION)
    with own_attention(model):
        state = model.model(input_ids=torch.tensor([[7]])).last_hidden_state[0, -1]
    model.lm_head.weight[5] = 20 * state / state.square().sum()
    model.lm_head.weight[6] = model.lm_head.weight[5] * (1 + by)
    one, other = (Generation(Request("a", (7,), 2), [token, 9]) for token in (5, 6))
    if tie:
        (found,) = near_ties(model, [one], [other], "draft")
        assert found.position == 0
        assert found.margin == pytest.approx(20 * by, abs=1e-5)
    else:
        with pytest.raises(DraftkitError, match=r"output token 0 is 5 .* and without it 6 .* explains a margin of"):
            near_ties(model, [one], [other], "draft")


def test_an_output_that_ends_early_is_no_tie() -> None:
    model = pico.llama(num_hidden_layers=2, attn_implementation=ATTENTION)
    short, whole = (Generation(Request("a", (7,), 2), tokens) for tokens in ([5], [5, 6]))
    with pytest.raises(DraftkitError, match=r"output token 1 is None \(log-probability -inf\)"):
        near_ties(model, [short], [whole], "draft")
    assert near_ties(model, [whole], [whole], "draft") == []


@pytest.mark.slow
@pytest.mark.parametrize("plan", [draftkit.evaluate_draft, plan_evaluation])
def test_prompts_beyond_the_positions_are_refused_before_anything_is_loaded(plan: Any, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        json.dumps({"id": "short", "turns": ["x"]}) + "\n" + json.dumps({"id": "endless", "turns": ["x = 1\n" * 10**5]})
    )
    with pytest.raises(
        DraftkitError, match=r"prompt endless: \d+ tokens and up to 8 new ones; the target has \d+ positions"
    ):
        plan("zoo:target", ["zoo:eagle"], Settings(prompts=str(path), max_new_tokens=8))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [{"k_by_batch": {1: 4, 4: 2}}, {"disable_above_batch": 4}], ids=str)
def test_a_result_is_not_continued_with_another_k_for_a_batch(schedule: dict[str, Any], tmp_path: Path) -> None:
    """The cells of both would have the same name."""
    given = Settings(limit=1, max_new_tokens=2, repeats=0, **schedule)
    out = tmp_path / "result.json"

    def measure(settings: Settings) -> Result:
        saved = ResultFile(out, resume=out.exists())
        return draftkit.evaluate_draft("zoo:target", "ngram", settings, saved=saved)

    (cell,) = measure(given).cells
    assert measure(given).cells[0].to_dict() == cell.to_dict()
    with pytest.raises(DraftkitError, match="begun with other settings"):
        measure(replace(given, **dict.fromkeys(schedule)))
