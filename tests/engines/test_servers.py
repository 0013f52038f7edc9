"""`eval --server`: what servers of each kind are asked, and what their own counts become."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import count
from math import inf
from pathlib import Path
from typing import Any

import pytest
from conftest import Command
from fixtures.engines.fake_vllm.simulation import per_position
from fixtures.servers.hostile_servers import HostileServer, Spoil, metric, put, text
from fixtures.servers.speaking import Dialect, SpeakingServer, simulated
from fixtures.servers.vllm_server import VllmTestServer
from hypothesis import given
from hypothesis import strategies as st

from draftkit.engines.records import DraftCounts
from draftkit.engines.servers.server import kinds_of_servers, server_at
from draftkit.errors import DraftkitError
from draftkit.evaluate.engines import server as lane
from draftkit.evaluate.engines.server import ServerEngine
from draftkit.evaluate.evaluate import evaluate_draft
from draftkit.evaluate.options import ServerSettings
from draftkit.requests import Request, SamplingParameters
from draftkit.results.cell import Cell
from draftkit.results.record import Result
from draftkit.results.settings import Settings

K = 3
SETTINGS = Settings(num_speculative_tokens=K, max_new_tokens=20, concurrency=2, limit=4, repeats=1)
COUNTING: list[Dialect] = ["vllm", "sglang", "sglang incremental", "llamacpp", "tensorrt_llm"]
DIALECTS: list[Dialect] = [*COUNTING, "openai", "openai without logprobs"]


def evaluate_server(servers: ServerSettings, settings: Settings, target: str | None = None) -> Result:
    return evaluate_draft(target, [], settings, engines=[ServerEngine(servers)])


def measured(dialect: Dialect, target: str | None = "zoo:target", settings: Settings = SETTINGS) -> Result:
    with SpeakingServer(dialect, simulated(K), K) as drafting, SpeakingServer(dialect, simulated(0)) as plain:
        return evaluate_server(ServerSettings(f"{drafting.url}/v1/", plain.url), settings, target=target)


def accepted_by(result: Result, prompts: list[tuple[int, ...]]) -> list[int]:
    cell = result.cells[0]
    assert cell.num_prompts == len(prompts)
    return [n for p in prompts for n in [len(c) - 1 for c in simulated(K)(_asked(p)).chunks[1:]]]


def _asked(prompt: tuple[int, ...]) -> Any:
    from fixtures.servers.speaking import Question

    return Question(prompt, SETTINGS.max_new_tokens, 0.0, 1.0, 0, 0)


def zoo_prompts() -> list[tuple[int, ...]]:
    from draftkit.evaluate.measure import Conversations
    from draftkit.evaluate.prompts import load_prompt_set
    from draftkit.loading import open_target

    prompts = load_prompt_set("zoo", SETTINGS.limit).prompts
    return [r.prompt for r in Conversations(prompts, open_target("zoo:target").tokenizer, SETTINGS).first_requests]


@pytest.mark.slow
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
    assert cell.num_draft_tokens == (K * len(accepted) if dialect in COUNTING[:4] else None)
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


TURNS = '{"id": "a", "turns": ["def add(a, b):", "Now subtract."]}\n{"id": "b", "turns": ["import os"]}\n'


@pytest.mark.parametrize(("dialect", "target"), [("vllm", "zoo:target"), ("sglang", "zoo:target"), ("openai", None)])
def test_further_turns_follow_the_server_s_own_answers(dialect: Dialect, target: str | None, tmp_path: Path) -> None:
    (tmp_path / "turns.jsonl").write_text(TURNS)
    settings = Settings(K, 12, prompts=str(tmp_path / "turns.jsonl"), turns="all", repeats=0)
    with SpeakingServer(dialect, simulated(K), K) as drafting:
        (cell,) = evaluate_server(ServerSettings(drafting.url), settings, target).cells
    assert (cell.num_prompts, cell.output_tokens) == (3, 36)
    assert [record.id for record in cell.by_prompt or ()] == ["a", "b", "a/2"]
    last = drafting.bodies[-1]
    if target is None:
        roles = [message["role"] for message in last["messages"]]
        assert roles == ["user", "assistant", "user"]
        assert last["messages"][1]["content"]
    else:
        asked = last["input_ids"] if dialect == "sglang" else last["prompt"]
        assert len(asked) > len(zoo_turns(tmp_path / "turns.jsonl")[0]) + settings.max_new_tokens


def zoo_turns(path: Path) -> list[tuple[int, ...]]:
    """The ids of the first turns."""
    from draftkit.evaluate.measure import Conversations
    from draftkit.evaluate.prompts import load_prompt_set
    from draftkit.loading import open_target

    prompts = load_prompt_set(str(path)).prompts
    return [r.prompt for r in Conversations(prompts, open_target("zoo:target").tokenizer, SETTINGS).first_requests]


def test_a_server_that_tells_no_text_is_asked_no_further_turn(tmp_path: Path) -> None:
    (tmp_path / "turns.jsonl").write_text(TURNS)
    settings = Settings(K, 12, prompts=str(tmp_path / "turns.jsonl"), turns="all", repeats=0)
    with (
        SpeakingServer("sglang", simulated(K), K) as drafting,
        pytest.raises(DraftkitError, match=r"needs the text of the answer(.|\n)*pass --target"),
    ):
        evaluate_server(ServerSettings(drafting.url), settings)


def test_a_server_s_result_goes_on_where_it_stopped(tmp_path: Path, draftkit: Command) -> None:
    """What `--out` holds is not measured again, and it is said that a server's weights cannot be compared."""
    out = tmp_path / "result.json"
    with SpeakingServer("vllm", simulated(K), K) as drafting, SpeakingServer("vllm", simulated(0)) as plain:
        measure = (
            "eval", "--server", drafting.url, "--server-baseline", plain.url, "--target", "zoo:target", "--limit", 2,
            "--max-new-tokens", 8, "--set", "repeats=0", "--out", out,
        )  # fmt: skip
        assert draftkit(*measure).code == 0
        (first,) = json.loads(out.read_text())["cells"]
        drafting.bodies.clear()
        ran = draftkit(*measure, "--concurrency", "1,2", "--resume")
        assert ran.code == 0, ran.err
    cells = json.loads(out.read_text())["cells"]
    assert cells[0] == first
    assert [cell["concurrency"] for cell in cells] == [1, 2]
    warnings = {warning["name"] for warning in json.loads(out.read_text())["warnings"]}
    assert "server-resumed" in warnings
    assert len(drafting.bodies) < 2 * 3 + 4  # the second cell's warm-up and answers, and no other cell's


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
    if not dialect.startswith(("openai", "llamacpp")):
        assert (said["stop_token_ids"], said["ignore_eos"]) == ([1, 8], True)
    if not dialect.startswith("openai"):
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


@pytest.mark.slow
def test_eval_server(draftkit: Command, tmp_path: Path) -> None:
    with SpeakingServer("sglang", simulated(K), K) as server:
        ran = draftkit(
            "eval", "--server", server.url, "--target", "zoo:target", "--limit", "4", "--concurrency", "1,2",
            "--max-new-tokens", "20", "--out", tmp_path / "result.json",
        )  # fmt: skip
        assert ran.code == 0, ran.err
        assert ran.out.startswith("org/draft at K = 3 has an acceptance length of ")
        assert "next: for a speed-up, --server-baseline URL of the same target without a draft\n" in ran.err
        cells = json.loads((tmp_path / "result.json").read_text())["cells"]
        assert [cell["concurrency"] for cell in cells] == [1, 2]
        refused = draftkit(
            "eval", "--server", server.url, "--dataset", "zoo", "--advise", "--records", tmp_path / "r.jsonl"
        )
        assert (refused.code, "next: leave out --advise, --records" in refused.err) == (1, True)
    assert "give --server URL, the one with the draft" in draftkit("eval", "--server-baseline", server.url).err
    assert draftkit("eval", "--draft", "ngram").code == 2


@pytest.mark.slow
def test_what_would_tell_an_interval_is_named_and_tells_it(draftkit: Command) -> None:
    """Of a server that tells totals only."""
    with VllmTestServer() as server:
        measure = ("eval", "--server", server.url, "--target", "zoo:target", "--limit", 4, "--max-new-tokens", 12)
        totals, single = (draftkit(*measure, *more) for more in ((), ("--set", "one_by_one=true")))
    assert "summary, or --set one_by_one=true, which asks one request at a time; for a speed-up" in totals.err
    assert "one_by_one" not in single.err
    lengths = [re.search(r"acceptance length of \S+( \[)?", ran.out) for ran in (totals, single)]
    assert [found and bool(found[1]) for found in lengths] == [False, True]


def test_cells_of_servers_have_what_other_engines_have() -> None:
    (cell,) = measured("tensorrt_llm").cells
    assert isinstance(cell, Cell)
    assert {"engine_version", "interval_known"} <= cell.to_dict().keys()
    assert cell.engine_version == "1-test"


TOLD = ("metrics", "speculative_decoding")
LIES: list[tuple[Dialect, Spoil, str]] = [
    ("vllm", metric("vllm:spec_decode_num_drafts_total", "NaN"), "num_drafts is nan, and no whole number"),
    ("vllm", metric("vllm:spec_decode_num_accepted_tokens_total", "+Inf"), "num_accepted_tokens is inf"),
    ("vllm", metric("vllm:spec_decode_num_draft_tokens_total", "-5"), "num_draft_tokens is -5"),
    ("vllm", metric("vllm:spec_decode_num_drafts_total", "2.5"), "num_drafts is 2.5"),
    ("vllm", text("/metrics", lambda page: page.replace('position="1"', 'position="x"')), "position of .* is x"),
    ("vllm", text("/metrics", lambda page: page.replace('position="1"', 'place="1"')), "position of .* is , and"),
    ("vllm", text("/metrics", lambda page: page.replace('position="1"', 'position="1000000000000"')), "is 10{12}"),
    ("vllm", put("/v1/", [-1, 2], *TOLD, "acceptance_histogram"), "histogram is -1"),
    ("vllm", put("/v1/", [0] * 10**4, *TOLD, "acceptance_histogram"), "10,000 entries"),
    (
        "vllm",
        put("/v1/", [0, 0, 0, 50], *TOLD, "acceptance_histogram"),
        "accepted, in 50 steps",
    ),
    ("vllm", put("/v1/", [50, 1], *TOLD, "acceptance_histogram"), "51 steps accepted 1 "),
    ("vllm", put("/v1/", 1, *TOLD, "num_draft_tokens"), "of 1 draft tokens were accepted"),
    ("vllm", put("/v1/", -7, "choices", 0, "token_ids", 0), "-7 is no token"),
    ("vllm", put("/v1/", lambda ids: ids * 50, "choices", 0, "token_ids"), "tokens, where 8 were asked for"),
    ("sglang", put("/generate", 10**12, "meta_info", "spec_num_proposed_drafts"), "spec_num_proposed_drafts is"),
    ("sglang", put("/generate", [1, -1], "meta_info", "spec_correct_drafts_histogram"), "histogram is -1"),
    (
        "tensorrt_llm",
        put("/v1/", inf, "choices", 0, "avg_decoded_tokens_per_iter"),
        "tokens_per_iter is inf",
    ),
    ("llamacpp", put("/completion", 10**6, "timings", "draft_n_accepted"), "draft_n_accepted is 1000000"),
    ("llamacpp", metric("llamacpp:spec_decode_num_drafts_total", "NaN"), "num_drafts is nan"),
    ("openai", put("/v1/", 10**12, "usage", "completion_tokens"), "1,000,000,000,000 tokens, where 8"),
    ("openai", put("/v1/", {"content": [7]}, "choices", 0, "logprobs"), "cannot be read: TypeError"),
    ("openai", put("/v1/models", "\x1b[2J", "data", 0, "id"), "lists no models"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("dialect", "spoil", "words"), LIES)
def test_what_cannot_be_is_not_believed(dialect: Dialect, spoil: Spoil, words: str) -> None:
    with SpeakingServer(dialect, simulated(K), K) as honest, HostileServer(honest.url, spoil) as server:
        measuring = ServerSettings(server.url)
        with pytest.raises(DraftkitError, match=words):
            evaluate_server(measuring, SETTINGS, target="zoo:target")


@pytest.mark.parametrize("name", ["spec_decode_num_accepted_tokens", "request_success", "generation_tokens"])
def test_counters_that_fall_are_not_believed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "SETTLING", 0.1)
    values = count(10**6, -1000)

    def falling(page: str) -> str:
        return re.sub(rf"(?m)^(vllm:{name}_total ).*", rf"\g<1>{next(values)}", page)

    spoil = text("/metrics", falling)
    with SpeakingServer("vllm", simulated(K), K) as honest, HostileServer(honest.url, spoil) as server:
        measuring = ServerSettings(server.url)
        with pytest.raises(DraftkitError, match="reset during the measurement"):
            evaluate_server(measuring, SETTINGS, target="zoo:target")


def test_counters_that_lack_answers_are_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of one of several servers behind an address."""
    monkeypatch.setattr(lane, "SETTLING", 0.1)
    missed = "".join(f"vllm:{name}_total 0\n" for name in ("request_success", "generation_tokens"))
    with SpeakingServer("vllm", simulated(K), K) as honest:
        spoil = text("/metrics", lambda page: missed + "".join(x + "\n" for x in page.split("\n") if "spec" in x))
        with HostileServer(honest.url, spoil) as server:
            result = evaluate_server(ServerSettings(server.url), SETTINGS, target="zoo:target")
    (warning,) = [w for w in result.warnings if w.name == "other-traffic"]
    assert "lack 4 requests, 80 output tokens of its answers" in warning.message


@given(st.lists(st.integers(0, K), min_size=1), st.data())
def test_honest_counts_are_possible(accepted: list[int], data: st.DataObject) -> None:
    """An answer's end cuts off some of what its last step accepted."""
    cut = data.draw(st.integers(0, accepted[-1]))
    tokens = 1 + sum(accepted) + len(accepted) - cut
    steps = [accepted.count(number) for number in range(K + 1)]
    for counts in (DraftCounts.of_histogram(steps, K * len(accepted)), DraftCounts.of_histogram(steps, None)):
        assert counts.impossible(tokens) is None
        assert replace(counts, num_accepted_tokens_per_pos=()).impossible(tokens) is None
        assert DraftCounts.total([counts] * 3).impossible(3 * tokens, 3) is None
