"""`eval --engine vllm`: what vLLM and a server of it are asked, and what their counts become. No vLLM is needed."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import Command
from fixtures.engines.fake_vllm.simulation import Simulated, histogram, per_position, simulate
from fixtures.servers.vllm_server import CHUNK_SECONDS, Fault, VllmTestServer
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from transformers import CONFIG_MAPPING

import draftkit
from draftkit import loading
from draftkit.convert.unified import write_draft
from draftkit.doctor.patient import changed
from draftkit.engines.prometheus import MetricSample, parse_samples, total
from draftkit.engines.records import DraftCounts
from draftkit.engines.vllm.client import SERVER_DEFAULTS, draft_counts
from draftkit.engines.vllm.process import visible_devices
from draftkit.engines.vllm.settings import VllmSettings
from draftkit.errors import DraftkitError, FormatError, UnsupportedTarget
from draftkit.evaluate.certificate import certify_draft
from draftkit.evaluate.engine import BaseEngine
from draftkit.evaluate.engines.own import OwnEngine
from draftkit.evaluate.engines.server import ServerEngine
from draftkit.evaluate.engines.vllm import VllmEngine
from draftkit.evaluate.job import Job
from draftkit.evaluate.measure import Conversations, Run
from draftkit.evaluate.options import ServerSettings
from draftkit.evaluate.prompts import Prompt, load_prompt_set
from draftkit.layout.families.eagle import EagleSpec
from draftkit.loading import open_draft, open_target
from draftkit.report.terminal.engines import counts_agree, engine_pairs, engines_table
from draftkit.requests import DraftSampling, Request, SamplingParameters
from draftkit.results.cell import Cell, Interval
from draftkit.results.record import Result
from draftkit.results.settings import Settings, Sweep

FAKE = Path(__file__).parents[1] / "fixtures/engines/fake_vllm"
K = 4
SETTINGS = Settings(
    num_speculative_tokens=K, max_new_tokens=20, concurrency=2, limit=5, template=False, device="cpu", repeats=0
)


@cache
def prompts() -> list[Prompt]:
    return load_prompt_set(SETTINGS.prompts, SETTINGS.limit).prompts


@cache
def requests() -> list[Request]:
    return Conversations(prompts(), open_target("zoo:target").tokenizer, SETTINGS).first_requests


def expected(k: int = K) -> list[Simulated]:
    return [simulate(request.prompt, request.max_new_tokens, k) for request in requests()]


def all_accepted() -> list[int]:
    return [accepted for done in expected() for accepted in done.accepted]


def counts_of(cell: Cell) -> tuple[int, int, int, tuple[int, ...]]:
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")
    return tuple(getattr(cell, name) for name in names)  # type: ignore[return-value]


def expected_counts() -> tuple[int, int, int, tuple[int, ...]]:
    accepted = all_accepted()
    return len(accepted), K * len(accepted), sum(accepted), tuple(per_position(accepted, K))


class Journal:
    """What the fake vLLM was asked."""

    def __init__(self, path: Path):
        self.path = path

    def entries(self, key: str) -> list[Any]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [entry[key] for entry in map(json.loads, lines) if key in entry]


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Journal:
    """The fake vLLM in this interpreter's environment."""
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    monkeypatch.setenv("FAKE_VLLM_JOURNAL", str(tmp_path / "journal"))
    return Journal(tmp_path / "journal")


VLLM = VllmSettings(python=sys.executable)


def measured(
    draft: str = "zoo:eagle", settings: Settings = SETTINGS, engine: BaseEngine | None = None, on_progress: Any = None
) -> Any:
    (cell,) = result(draft, settings, engine, on_progress).cells
    return cell


def result(
    draft: str = "zoo:eagle", settings: Settings = SETTINGS, engine: BaseEngine | None = None, on_progress: Any = None
) -> Result:
    return draftkit.evaluate_draft(
        "zoo:target", [draft], settings, on_progress or quiet, engines=[engine or VllmEngine(VLLM)]
    )


def quiet(*_: object) -> None:
    """No progress."""


def server(url: str, baseline: str | None = None) -> ServerEngine:
    return ServerEngine(ServerSettings(url, baseline))


def run_by_vllm(asked: list[Request]) -> Run:
    """Requests as they are, through a lane with a draft."""
    with ExitStack() as stack:
        job, engine = Job(open_target("zoo:target"), ["zoo:eagle"], Sweep.of(SETTINGS), stack), VllmEngine(VLLM)
        engine.check(job)
        engine.open(quiet)
        conversations = job.conversations(SETTINGS)
        conversations.first_requests = asked
        with engine.lane("zoo:eagle", conversations, quiet) as lane:
            return lane(asked)


def test_the_offline_engine_counts_the_measured_requests_only(journal: Journal) -> None:
    cell = measured()
    assert counts_of(cell) == expected_counts()
    accepted = all_accepted()
    assert cell.acceptance_length.mean == pytest.approx(1 + sum(accepted) / len(accepted))
    assert cell.acceptance_length.bounds is not None
    first = prompts()[0].category
    in_a = [n for done, p in zip(expected(), prompts(), strict=True) if p.category == first for n in done.accepted]
    assert cell.by_category[first].mean == pytest.approx(1 + sum(in_a) / len(in_a))
    assert (cell.engine, cell.engine_version, cell.method) == ("vllm", "0.0-fake", "eagle")
    assert cell.output_tokens == cell.baseline_output_tokens == 20 * len(requests())
    assert cell.matches_greedy is True
    assert cell.interval_known is True
    assert cell.ttft_ms.p50 == pytest.approx(500)
    assert cell.tpot_ms.p50 == pytest.approx(250)
    assert cell.itl_ms is None
    assert len(cell.ttft_quantiles_ms) == 101


def test_prompts_run_after_a_warm_up_as_draftkit_would_draw_them(journal: Journal) -> None:
    drawing = SamplingParameters(0.9, 5, 0.8, seed=2**63)
    request = replace(requests()[0], stop_token_ids=frozenset({7}), sampling=drawing)
    run_by_vllm([request, *requests()])
    warm_up, asked = journal.entries("prompts")
    assert asked == [{"prompt_token_ids": list(r.prompt)} for r in (request, *requests())]
    assert warm_up == asked[: SETTINGS.concurrency]
    warming, (drawn, greedy, *_) = journal.entries("sampling")
    assert {sampling["max_tokens"] for sampling in warming} == {2 * (K + 1)}
    assert (drawn["temperature"], drawn["top_k"], drawn["top_p"], drawn["seed"]) == (0.9, 5, 0.8, 0)
    assert (greedy["temperature"], greedy["top_k"], greedy["seed"]) == (0, -1, None)
    assert drawn.keys() >= set(SERVER_DEFAULTS)
    assert set(drawn["stop_token_ids"]) == {7, *greedy["stop_token_ids"]}
    assert greedy["stop_token_ids"]  # the target's end of text
    assert not any(sampling["detokenize"] for sampling in (*warming, drawn, greedy))


def test_both_engines_run_by_turns(journal: Journal) -> None:
    """Each of them warm, then block by block: without the draft and with it, then the other way round."""
    settings = replace(SETTINGS, concurrency=1, repeats=1)
    cell = measured(settings=settings)
    assert counts_of(cell) == expected_counts()
    assert (cell.passes, cell.num_prompts, cell.output_tokens) == (1, len(requests()), 20 * len(requests()))
    assert [p.rounds for p in cell.by_prompt] == [len(done.accepted) for done in expected()]
    sizes = [len(prompts) for prompts in journal.entries("prompts")]
    assert sizes == [1, 1, 3, 3, 2, 2]
    assert cell.matches_greedy is True


@pytest.fixture
def falcon(running_target: Path, tmp_path: Path) -> Path:
    """A target that draftkit's own runtime does not run."""
    target = shutil.copytree(running_target, tmp_path / "falcon")
    (target / "config.json").write_text(json.dumps(CONFIG_MAPPING["falcon"]().to_dict()))
    (target / "generation_config.json").unlink(missing_ok=True)
    return target


def test_targets_that_draftkit_cannot_run_are_measured_through_vllm(falcon: Path, journal: Journal) -> None:
    settings = replace(SETTINGS, limit=3)
    with pytest.raises(UnsupportedTarget, match="--engine vllm --vllm-python"):
        draftkit.evaluate_draft(str(falcon), ["ngram"], settings)
    result = draftkit.evaluate_draft(str(falcon), ["ngram"], settings, engines=[OwnEngine(), VllmEngine(VLLM)])
    assert [cell.engine for cell in result.cells] == ["vllm"]
    assert "vllm-only" in {warning.name for warning in result.warnings}
    assert {arguments["trust_remote_code"] for arguments in journal.entries("arguments")} == {False}


@pytest.mark.slow
def test_eval_falls_back_to_a_vllm_that_is_there(
    falcon: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch, draftkit: Command, tmp_path: Path
) -> None:
    measure = (
        "eval",
        "--target",
        falcon,
        "--draft",
        "ngram",
        "--dataset",
        "zoo",
        "--limit",
        3,
        "--max-new-tokens",
        20,
        "--device",
        "cpu",
    )
    refused = draftkit(*measure)
    assert refused.code == 1
    assert "FalconForCausalLM does not attend" in refused.err
    assert "next: --engine vllm --vllm-python ENV/bin/python" in refused.err
    monkeypatch.syspath_prepend(FAKE)
    done = draftkit(*measure, "--json")
    assert [cell["engine"] for cell in json.loads(done.out)["cells"]] == ["vllm"]
    (said,) = (w["message"] for w in json.loads(done.out)["warnings"] if w["name"] == "vllm-only")
    assert said.startswith("draftkit's own engine does not run this pair: FalconForCausalLM does not attend")
    assert draftkit(*measure, "--engine", "draftkit").code == 1
    for option in ("--advise", ("--records", tmp_path / "records")):
        refused = draftkit(*measure, *([option] if isinstance(option, str) else option))
        assert refused.code == 1
        assert "next: leave out" in refused.err
    for asked in (("certify",), ("eval", "--dry-run")):
        refused = draftkit(*asked, "--target", falcon, "--draft", "ngram", "--dataset", "zoo")
        assert refused.code == 1
        assert re.search(r"next: (--engine vllm --vllm-python|vLLM plans its memory itself)", refused.err)


@pytest.mark.slow
def test_options_of_vllm_ask_for_it(journal: Journal, draftkit: Command) -> None:
    measure = ("eval", "--target", "zoo:target", "--draft", "ngram", "--limit", 1, "--max-new-tokens", 8)
    with_vllm = draftkit(*measure, "--device", "cpu", "--vllm-python", sys.executable, "--json")
    assert {cell["engine"] for cell in json.loads(with_vllm.out)["cells"]} == {"draftkit", "vllm"}
    refused = draftkit(*measure, "--vllm-python", sys.executable, "--engine", "draftkit")
    assert refused.code == 2
    assert "--vllm-python of vllm with the engine draftkit: leave out one of them" in refused.err


@pytest.mark.slow
@pytest.mark.parametrize("planted", ["", "errs"])
def test_vllm_is_certified_as_it_is_measured(
    planted: str, falcon: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch, draftkit: Command
) -> None:
    """At the most draft tokens, greedily, with log-probabilities."""
    monkeypatch.setenv("FAKE_VLLM", planted)
    ran = draftkit(
        "certify", "--target", falcon, "--draft", "ngram", "--dataset", "zoo", "--k", "2,4",
        "--limit", 3, "--max-new-tokens", 20, "--device", "cpu", "--vllm-python", sys.executable, "--json",
    )  # fmt: skip
    (found,) = json.loads(ran.out)["certificates"]
    assert (ran.code, found["verdict"]) == ((3, "bug") if planted else (0, "no difference seen")), ran.err
    assert ("vllm is not lossless with ngram: request" in ran.err) is bool(planted)
    assert (found["engine"], found["draft"], found["requests"]) == ("vllm", "ngram", 3)
    asked = [[sampling["logprobs"] for sampling in run] for run in journal.entries("sampling")]
    assert asked[-3:] == [[5] * 3, asked[-2], [5] * 3]  # the second engine's warm-up between
    drafting = [a["speculative_config"] for a in journal.entries("arguments") if "speculative_config" in a]
    assert drafting[-1]["num_speculative_tokens"] == 4
    if planted:
        assert [(d["position"], d["margin"]) for d in found["divergences"]] == [(1, pytest.approx(2.9))] * 3


def test_a_certificate_needs_a_server_without_a_draft() -> None:
    with (
        VllmTestServer() as drafting,
        pytest.raises(DraftkitError, match="without a draft: add --server-baseline URL"),
    ):
        certify_draft("zoo:target", [], SETTINGS, engines=[server(drafting.url)])


@pytest.mark.parametrize(("device", "gpus"), [("cuda:1", "1,2"), ("cuda", None), (None, None)])
def test_a_numbered_device_is_where_vllm_runs(
    device: str | None, gpus: str | None, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("draftkit.evaluate.engines.vllm.device_named", lambda _: "cuda:1")
    monkeypatch.setattr("draftkit.targets.devices.device_named", lambda _: "cpu")  # where it says that it ran
    measured(settings=replace(SETTINGS, device=device), engine=VllmEngine(replace(VLLM, tensor_parallel_size=2)))
    assert set(journal.entries("gpus")) == {gpus}


def test_devices_are_counted_among_those_seen_here() -> None:
    assert visible_devices("cuda:1", 2, {"CUDA_VISIBLE_DEVICES": "4,GPU-a,6"}) == {"CUDA_VISIBLE_DEVICES": "GPU-a,6"}
    assert visible_devices("cpu", 1, {}) == {}
    with pytest.raises(DraftkitError, match="2 GPUs from cuda:1 on"):
        visible_devices("cuda:1", 2, {"CUDA_VISIBLE_DEVICES": "4,5"})


def test_a_request_that_ignores_ends_has_no_stop_tokens(journal: Journal) -> None:
    run_by_vllm([replace(requests()[0], ignore_eos=True)])
    assert [s["stop_token_ids"] for call in journal.entries("sampling") for s in call] == [[]] * 2  # a warm-up, and it


def test_engine_arguments_are_passed_through(journal: Journal) -> None:
    further = {"pipeline_parallel_size": 2, "dtype": "float16", "speculative_config": {"draft_tensor_parallel_size": 1}}
    vllm = replace(VLLM, tensor_parallel_size=2, gpu_memory_utilization=0.5, engine_arguments=further)
    measured(engine=VllmEngine(vllm))
    plain, drafting = journal.entries("arguments")
    speculative = drafting["speculative_config"]
    assert "speculative_config" not in plain
    assert (speculative["method"], speculative["num_speculative_tokens"]) == ("eagle", K)
    assert speculative["draft_tensor_parallel_size"] == 1
    for arguments in (plain, drafting):
        assert arguments["tensor_parallel_size"] == arguments["pipeline_parallel_size"] == 2
        assert (arguments["gpu_memory_utilization"], arguments["dtype"]) == (0.5, "float16")
        assert arguments["max_num_seqs"] == SETTINGS.concurrency
        assert arguments["max_model_len"] >= max(request.max_length for request in requests()) + K


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draft", "speculative"),
    [
        ("zoo:p-eagle", {"method": "eagle3", "parallel_drafting": True}),
        ("zoo:pard", {"method": "draft_model", "parallel_drafting": True}),
        ("zoo:dflash", {"method": "dflash"}),
        ("zoo:dspark", {"method": "dspark"}),
        ("ngram", {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}),
        ("ngram:1-3", {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}),
        ("suffix", {"method": "suffix", "suffix_decoding_max_cached_requests": 0}),
    ],
)
def test_every_kind_of_draft_is_converted_for_vllm(draft: str, speculative: dict[str, Any], journal: Journal) -> None:
    assert counts_of(measured(draft)) == expected_counts()
    _, drafting = journal.entries("arguments")
    assert drafting["speculative_config"].items() >= speculative.items()


def test_a_bias_that_vllm_drops_is_folded(journal: Journal, tmp_path: Path) -> None:
    with open_draft("zoo:eagle", "zoo:target") as draft:
        biased = replace(draft.spec.architecture.expect(EagleSpec), fusion_bias=True)
        write_draft(tmp_path / "biased", changed(draft, biased))
    assert measured(str(tmp_path / "biased")).method == "eagle"
    _, drafting = journal.entries("arguments")
    assert drafting["speculative_config"]["method"] == "eagle"


@pytest.mark.parametrize(
    ("draft", "changes", "reason"),
    [
        ("zoo:mlp-speculator", {}, "no proposer for mlp-speculator drafts"),
        ("ngram:4", {}, "ngram:MIN-MAX"),
        ("suffix:4", {}, "suffix, which has no settings"),
        ("zoo:eagle", {"verification": "coupled"}, "coupled verification"),
        ("zoo:eagle", {"k_by_batch": {4: 2}}, "k_by_batch {4: 2} for vLLM"),
        ("zoo:eagle", {"draft_sampling": DraftSampling(temperature=0.5)}, "draft_temperature 0.5 for vLLM"),
    ],
)
def test_what_vllm_cannot_do_is_said_before_anything_starts(
    draft: str, changes: dict[str, Any], reason: str, journal: Journal
) -> None:
    with pytest.raises(DraftkitError, match=reason):
        measured(draft, settings=replace(SETTINGS, **changes))
    assert not journal.path.exists()


TURNS = (
    '{"id": "a", "turns": ["def add(a, b):", "Now subtract."]}\n{"id": "b", "category": "c", "turns": ["import os"]}\n'
)


def test_vllm_is_asked_further_turns_and_in_slices(journal: Journal, tmp_path: Path) -> None:
    (tmp_path / "turns.jsonl").write_text(TURNS)
    asked = replace(SETTINGS, prompts=str(tmp_path / "turns.jsonl"), limit=None, turns="all", slices=("category",))
    cell = measured(settings=replace(asked, repeats=0))
    assert [record.id for record in cell.by_prompt] == ["a", "b", "a/2"]
    assert {one.name: one.prompts for one in cell.slices} == {"category=all": 2, "category=c": 1}
    first, second = ([prompt["prompt_token_ids"] for prompt in run] for run in journal.entries("prompts")[-2:])
    said = simulate(first[0], SETTINGS.max_new_tokens, K).tokens
    tokenizer = open_target("zoo:target").tokenizer
    text = tokenizer.decode(second[0])
    assert tokenizer.decode(said, skip_special_tokens=True).strip() in text
    assert text.index("def add") < text.index("Now subtract.")
    longest = journal.entries("arguments")[-1]["max_model_len"]
    assert longest >= len(second[0]) + SETTINGS.max_new_tokens  # the engine holds the last turn too


def test_how_drafts_are_drawn_reaches_vllm(journal: Journal) -> None:
    settings = replace(SETTINGS, sampling=SamplingParameters(temperature=1.0), verification="block")
    cell = measured(settings=settings)
    speculative = journal.entries("arguments")[1]["speculative_config"]
    assert speculative["draft_sample_method"] == "probabilistic"
    assert speculative["rejection_sample_method"] == "block"
    assert cell.matches_greedy is None
    assert cell.num_matching_prompts is None


def test_a_vllm_without_counts_by_request_gives_no_interval(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM", "old")
    cell = measured()
    assert counts_of(cell) == expected_counts()
    length = cell.acceptance_length
    assert length.bounds is None
    assert cell.interval_known is False
    assert cell.by_category == {}
    assert set(cell.acceptance_length_by_convention) == {"vllm", "sglang"}


def test_an_output_that_a_draft_changes_is_seen(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM", "errs")
    cell = measured()
    assert (cell.matches_greedy, cell.num_matching_prompts) == (False, 0)


@pytest.mark.parametrize(
    ("behavior", "words"), [("dies", "no memory is left for the cache"), ("vanishes", "INFO loading the model")]
)
def test_a_vllm_that_fails_is_quoted(
    behavior: str, words: str, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", behavior)
    with pytest.raises(DraftkitError, match=words):
        measured()


def test_no_vllm_is_one_clear_error(journal: Journal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(DraftkitError, match="--vllm-python ENV/bin/python"):
        measured(engine=VllmEngine(VllmSettings()))
    with pytest.raises(DraftkitError, match="cannot be run"):
        measured(engine=VllmEngine(VllmSettings(python=str(tmp_path / "nothing"))))
    monkeypatch.delenv("PYTHONPATH")
    with pytest.raises(DraftkitError, match="has no vLLM"):
        measured()


def test_an_interrupt_ends_vllm(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM", "sleeps")

    def interrupt(name: str, finished: int, of: int, length: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured(on_progress=interrupt)
    (process,) = journal.entries("pid")
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_progress_ends_with_all_answers_and_the_acceptance_length(journal: Journal) -> None:
    seen: list[tuple[str, int, int, float]] = []
    cell = measured(on_progress=lambda *now: seen.append(now))
    whole = [(done, total) for _, done, total, _ in seen]
    assert sorted(whole) == whole
    assert {name for name, *_ in seen} == {
        "cell 1 of 1: no draft, batch 2, T=0",
        "cell 1 of 1: zoo:eagle, K=4, batch 2, T=0",
    }
    _, done, total, length = seen[-1]
    assert (done, length) == (total, cell.acceptance_length.mean)


@pytest.mark.slow
def test_cells_have_the_keys_of_draftkits_own(journal: Journal) -> None:
    result = draftkit.evaluate_draft("zoo:target", ["zoo:eagle"], Settings(limit=1, max_new_tokens=4, repeats=0))
    (own,) = result.cells
    assert own.to_dict().keys() - measured().to_dict().keys() == {
        "num_drafts_beyond", "samples", "memory", "near_ties",
    }  # fmt: skip


# A running server.


@pytest.mark.parametrize("by_request", [True, False])
def test_a_server_is_measured_by_the_difference_of_its_counters(by_request: bool) -> None:
    with VllmTestServer(by_request=by_request) as running:
        cell = measured(engine=server(f"{running.url}/v1/"))
    assert counts_of(cell) == expected_counts()
    assert cell.interval_known is by_request
    assert bool(cell.by_category) is by_request
    assert (cell.method, cell.engine_version) == ("served", "0.0-server")
    assert cell.draft_sampling is cell.verification is None
    assert cell.baseline_tokens_per_second is cell.matches_greedy is None
    warm_up, asked = running.bodies[: SETTINGS.concurrency], running.bodies[SETTINGS.concurrency :]
    assert {body["max_tokens"] for body in warm_up} == {2 * (K + 1)}
    assert sorted(body["prompt"] for body in asked) == sorted(list(request.prompt) for request in requests())
    assert {body["model"] for body in asked} == {"served"}
    assert all(body.keys() >= set(SERVER_DEFAULTS) for body in (*warm_up, *asked))
    neutral = ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_p")
    assert {tuple(body[name] for name in neutral) for body in asked} == {(1.0, 0.0, 0.0, 0.0)}
    assert running.most_at_once == SETTINGS.concurrency


def test_times_are_those_of_the_client() -> None:
    with VllmTestServer() as running:
        cell = measured(engine=server(running.url))
    assert cell.itl_ms.p50 >= 1000 * CHUNK_SECONDS
    assert cell.itl_ms.mean > cell.tpot_ms.mean > 0  # a chunk has several tokens
    assert 0 < cell.ttft_ms.p50 < 1000 * cell.runtime_s


def test_a_second_server_is_the_baseline() -> None:
    with VllmTestServer() as drafting, VllmTestServer(k=0) as plain:
        cell = measured(engine=server(drafting.url, plain.url))
    assert cell.matches_greedy is True
    assert cell.speedup == pytest.approx(cell.tokens_per_second / cell.baseline_tokens_per_second)


def test_counts_that_follow_the_answers_late_are_waited_for() -> None:
    with VllmTestServer(lag=0.2) as running:
        assert counts_of(measured(engine=server(running.url))) == expected_counts()


def test_other_traffic_is_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    with VllmTestServer(others=30) as running:
        found = result(engine=server(running.url))
        (concern,) = (warning.message for warning in found.warnings if warning.name == "other-traffic")
    # How much of it is counted depends on when the counters were read: others' requests may stand for late own ones.
    assert re.search(r"[1-9]\d* requests, [1-9]\d* output tokens", concern)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("no metrics", "404.*\n.*metrics"),
        ("web page", "not a line of Prometheus"),
        ("no token ids", "returns no token ids"),
        ("busy", "no room for another request"),
        ("error event", "the engine is dead"),
        ("other prompt", "other prompt tokens"),
        ("reset", "counters were reset"),
        ("hangs up", "gone away"),
    ],
)
def test_what_goes_wrong_with_a_server_is_one_clear_error(
    fault: Fault, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with VllmTestServer(fault=fault) as running, pytest.raises(DraftkitError, match=words):
        measured(engine=server(running.url))


def test_servers_that_do_not_fit_are_refused() -> None:
    with VllmTestServer(k=0) as plain, VllmTestServer() as drafting:
        with pytest.raises(DraftkitError, match="without speculative decoding"):
            measured(engine=server(plain.url))
        with pytest.raises(DraftkitError, match="with speculative decoding"):
            measured(engine=server(drafting.url, drafting.url))
    with pytest.raises(DraftkitError, match=r"does not answer: .*refused"):
        measured(engine=server(plain.url))
    with pytest.raises(DraftkitError, match="http://HOST:PORT"):
        measured(engine=server("localhost:8000"))


# Counters.

labels = st.dictionaries(st.text("ab_", min_size=1, max_size=3), st.text(max_size=8), max_size=3)
samples = st.tuples(st.text("ab_:", min_size=1, max_size=3), labels, st.integers(0, 10**9))


@given(st.lists(samples, max_size=3))
def test_prometheus_text_is_read_back(written: list[tuple[str, dict[str, str], int]]) -> None:
    def escaped(text: str) -> str:
        return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    lines = []
    for name, labels, value in written:
        inside = ",".join(f'{key}="{escaped(text)}"' for key, text in labels.items())
        lines.append(f"{name}{{{inside}}} {value}.0" if labels else f"{name} {value} 1700000000")
    page = "\n".join(("# HELP vllm:x {} of all", *lines, ""))
    assert parse_samples(page) == [MetricSample(name, labels, float(value)) for name, labels, value in written]


def test_counters_are_summed_over_engines_and_ordered_by_position() -> None:
    name = "vllm:spec_decode_num"
    page = [f'{name}_{n}_total{{engine="{e}"}} {v}' for n, v in (("drafts", 3), ("draft_tokens", 9)) for e in "01"]
    page += [f'{name}_accepted_tokens_total{{engine="{e}"}} 5.0' for e in "01"]
    page += [f'{name}_accepted_tokens_per_pos_total{{position="{p}",engine="{e}"}} {p}' for e in "01" for p in (10, 2)]
    samples = parse_samples("\n".join(page))
    assert draft_counts(samples) == DraftCounts(6, 18, 10, (0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 20))
    assert total(samples, "vllm:request_success") is None
    assert draft_counts([]) is None


@pytest.mark.parametrize(
    "line", ["<html>", "name{a=1} 2", "name1", 'name{a="1" b="2"} 2', "name", 'name{a="b} 2', "name two"]
)
def test_what_is_no_prometheus_text_is_refused(line: str) -> None:
    with pytest.raises(FormatError, match="Prometheus"):
        parse_samples(line)


@given(st.lists(st.integers(0, K)), st.lists(st.integers(0, K)))
def test_counts_of_histograms_are_those_of_the_steps(earlier: list[int], later: list[int]) -> None:
    def counts(accepted: list[int]) -> DraftCounts:
        return DraftCounts.of_histogram(histogram(accepted, K), K * len(accepted))

    both = counts(earlier + later)
    assert both == DraftCounts(
        len(earlier + later), K * len(earlier + later), sum(earlier + later), tuple(per_position(earlier + later, K))
    )
    assert DraftCounts.total([counts(earlier), counts(later)]) == both
    assert both - counts(earlier) == counts(later)
    assert not counts(later).fell
    assert (counts(earlier) - both).fell is bool(later)


# Side by side.


def cell(engine: str, **changes: Any) -> Cell:
    made = Cell(
        engine=engine,
        target="zoo:target",
        draft="zoo:eagle",
        num_speculative_tokens=2,
        temperature=0.0,
        concurrency=1,
        num_drafts=10,
        num_draft_tokens=20,
        num_accepted_tokens_per_pos=(6, 3),
        acceptance_length=Interval(1.9, 1.5, 2.25),
        tokens_per_second=30.0,
        baseline_tokens_per_second=20.0,
    )
    return replace(made, **changes)


def rendered(*cells: Cell) -> str:
    console = Console(width=140, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(engines_table(cells))
    return console.export_text()


def test_engines_stand_side_by_side() -> None:
    text = rendered(cell("draftkit"), cell("vllm", baseline_tokens_per_second=None, interval_known=False))
    assert "equal" in text.splitlines()[3]
    assert "1.900 [1.50, 2.25]" in text
    assert "30.0 (1.50×)" in text
    assert text.count("6 3") == 2


def test_differing_counts_show() -> None:
    ours, theirs = cell("draftkit"), cell("vllm", num_accepted_tokens_per_pos=(6, 2))
    assert counts_agree(ours, theirs) is False
    assert "differ" in rendered(ours, theirs)
    assert counts_agree(replace(ours, temperature=1.0), replace(theirs, temperature=1.0)) is None


def test_cells_of_other_settings_are_no_pair() -> None:
    pairs = list(engine_pairs([cell("draftkit"), cell("vllm", concurrency=8)]))
    assert [(ours is None, theirs is None) for ours, theirs in pairs] == [(False, True), (True, False)]
    assert "–" in rendered(cell("vllm"))


def test_a_foreign_draft_is_converted_once_whatever_the_number_of_cells(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted: list[object] = []
    plan = loading.plan_conversion
    monkeypatch.setattr(loading, "plan_conversion", lambda *a, **k: converted.append(a[0].name) or plan(*a, **k))
    sweep = replace(SETTINGS, limit=2).sweep(k=(1, 2), concurrency=(1, 2))
    found = draftkit.evaluate_draft("zoo:target", ["zoo:eagle3"], sweep, engines=[VllmEngine(VLLM)])
    assert len(found.cells) == 4
    assert converted == ["zoo:eagle3"]
