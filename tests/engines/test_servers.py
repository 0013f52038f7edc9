"""`eval --server`: what servers of each kind are asked, and what their own counts become."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Command
from fixtures.fake_vllm.simulation import per_position
from fixtures.servers import Dialect, SpeakingServer, simulated

from draftkit.engines.servers.connect import kinds_of_servers, server_at
from draftkit.errors import DraftkitError
from draftkit.evaluate.server import ServerSettings, evaluate_server
from draftkit.requests import Request, SamplingParameters
from draftkit.results.record import Cell, Result
from draftkit.results.settings import Settings

K = 3
SETTINGS = Settings(num_speculative_tokens=K, max_new_tokens=20, concurrency=2, limit=4, repeats=1)
COUNTING: list[Dialect] = ["vllm", "sglang", "sglang incremental", "tensorrt_llm"]
DIALECTS: list[Dialect] = [*COUNTING, "openai", "openai without logprobs"]


def measured(dialect: Dialect, target: str | None = "zoo:target", settings: Settings = SETTINGS) -> Result:
    with SpeakingServer(dialect, simulated(K), K) as drafting, SpeakingServer(dialect, simulated(0)) as plain:
        return evaluate_server(ServerSettings(f"{drafting.url}/v1/", plain.url), settings, target=target)


def accepted_by(result: Result, prompts: list[tuple[int, ...]]) -> list[int]:
    cell = result.cells[0]
    assert cell.num_prompts == len(prompts)
    return [n for p in prompts for n in [len(c) - 1 for c in simulated(K)(_asked(p)).chunks[1:]]]


def _asked(prompt: tuple[int, ...]) -> Any:
    from fixtures.servers import Question

    return Question(prompt, SETTINGS.max_new_tokens, 0.0, 1.0, 0, 0)


def zoo_prompts() -> list[tuple[int, ...]]:
    from draftkit.evaluate.datasets import load_prompt_set
    from draftkit.evaluate.measure import Conversations
    from draftkit.loading import load_target_tokenizer

    prompts = load_prompt_set("zoo", SETTINGS.limit).prompts
    return [r.prompt for r in Conversations(prompts, load_target_tokenizer("zoo:target"), SETTINGS).first_requests]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_a_server_says_it_accepted_is_what_it_accepted(dialect: Dialect) -> None:
    """By its own counts, or by its chunks: each request's, so that there is an interval."""
    result = measured(dialect)
    (cell,) = result.cells
    accepted = accepted_by(result, zoo_prompts())
    assert cell.acceptance_length is not None
    assert cell.acceptance_length.mean == pytest.approx(1 + sum(accepted) / len(accepted))
    assert cell.acceptance_length.bounds is not None
    assert (cell.num_drafts, cell.num_accepted_tokens) == (len(accepted), sum(accepted))
    assert cell.num_speculative_tokens == K
    if dialect == "openai without logprobs":
        assert cell.num_accepted_tokens_per_pos is None
    else:
        assert cell.num_accepted_tokens_per_pos == tuple(per_position(accepted, K))
    assert cell.num_draft_tokens == (K * len(accepted) if dialect in COUNTING[:3] else None)
    assert cell.matches_greedy is True
    assert cell.speedup is not None
    assert cell.output_tokens == SETTINGS.max_new_tokens * cell.num_prompts
    names = {"acceptance-estimated"} & {warning.name for warning in result.warnings}
    assert bool(names) is bool(cell.estimated) is (dialect not in COUNTING)
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["cells"][0]["engine"] == cell.engine


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "tensorrt_llm", "openai"])
def test_messages_need_no_tokenizer_here(dialect: Dialect, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(
        "\n".join(json.dumps({"id": n, "category": f"c{n % 2}", "turns": [f"{n} questions"]}) for n in range(4))
    )
    settings = Settings(K, 20, prompts=str(tmp_path / "prompts.jsonl"), repeats=0)
    (cell,) = measured(dialect, None, settings).cells
    prompts = [tuple(map(ord, f"{n} questions")) for n in range(4)]
    accepted = [len(c) - 1 for p in prompts for c in simulated(K)(_asked(p)).chunks[1:]]
    assert (cell.num_drafts, cell.num_accepted_tokens) == (len(accepted), sum(accepted))
    assert set(cell.by_category) == {"c0", "c1"}
    assert cell.target == "served"
    assert cell.draft == ("org/draft" if dialect == "sglang" else "served")
    assert cell.matches_greedy is True


def test_plain_text_is_sent_as_ids_only(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"text": "Once"}\n')
    with pytest.raises(DraftkitError, match="pass --target"):
        measured("openai", None, Settings(prompts=str(tmp_path / "prompts.jsonl")))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_how_a_request_is_drawn_reaches_the_server(dialect: Dialect) -> None:
    drawn = Request("0", (5, 6), 9, SamplingParameters(0.7, 11, 0.9, seed=4), frozenset({8}), alternatives=2)
    with SpeakingServer(dialect, simulated(K), K) as server:
        answer = server_at(server.url).complete(drawn, frozenset({1}))
    (body,) = server.bodies
    said = body.get("sampling_params", body)
    assert (said["temperature"], said["top_p"], said["top_k"]) == (0.7, 0.9, 11)
    assert 4 in (said.get("seed"), said.get("sampling_seed"))
    if not dialect.startswith("openai"):
        assert (said["stop_token_ids"], said["ignore_eos"]) == ([1, 8], True)
        assert answer.tokens == tuple(simulated(K)(_asked((5, 6))).tokens[:9])
    if dialect != "openai without logprobs":
        assert answer.logprobs == (-0.5,) * 9
        assert answer.alternatives is not None
        assert len(answer.alternatives) == 9
        assert all(set(found.values()) == {-0.5, -1.5} for found in answer.alternatives)


def test_a_server_without_a_draft_is_refused_and_so_is_a_baseline_with_one() -> None:
    for dialect in ("vllm", "sglang"):
        with SpeakingServer(dialect, simulated(0)) as plain, SpeakingServer(dialect, simulated(K), K) as drafting:
            with pytest.raises(DraftkitError, match="without speculative decoding"):
                evaluate_server(ServerSettings(plain.url), SETTINGS, target="zoo:target")
            with pytest.raises(DraftkitError, match="with speculative decoding"):
                evaluate_server(ServerSettings(drafting.url, drafting.url), SETTINGS, target="zoo:target")


def test_kinds_are_found_by_being_there() -> None:
    found = {kind.owner: kind.engine for kind in kinds_of_servers()}
    assert found.items() >= {"vllm": "vllm", "sglang": "sglang", "tensorrt_llm": "tensorrt-llm"}.items()


def test_eval_server(draftkit: Command, tmp_path: Path) -> None:
    with SpeakingServer("sglang", simulated(K), K) as server:
        ran = draftkit(
            "eval", "--server", server.url, "--target", "zoo:target", "--limit", "4", "--concurrency", "1,2",
            "--max-new-tokens", "20", "--out", tmp_path / "result.json",
        )  # fmt: skip
        assert ran.code == 0, ran.err
        assert ran.out.startswith("org/draft at K = 3 accepts most")
        cells = json.loads((tmp_path / "result.json").read_text())["cells"]
        assert [cell["concurrency"] for cell in cells] == [1, 2]
        refused = draftkit("eval", "--server", server.url, "--advise", "--records", tmp_path / "r.jsonl")
        assert (refused.code, "--advise, --records with --server" in refused.err) == (2, True)
    assert "without --server" in draftkit("eval", "--server-baseline", server.url).err
    assert draftkit("eval", "--draft", "ngram").code == 2


def test_cells_of_servers_have_what_other_engines_have() -> None:
    (cell,) = measured("tensorrt_llm").cells
    assert isinstance(cell, Cell)
    assert {"engine_version", "interval_known"} <= cell.to_dict().keys()
    assert cell.engine_version == "1-test"
