"""What rounds cost by arithmetic, against figures worked out by hand, and against what a fake GPU has counted."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from conftest import Command
from transformers import LlamaConfig, Qwen3MoeConfig

from draftkit.evaluate.round_cost import H100, Device, Forward, PlannedRound, RoundCost, plan_time
from draftkit.hub.locate import locate
from draftkit.loading import open_draft, open_target
from draftkit.report.terminal.tables import plan_answer
from draftkit.runtime.drafters import family_of
from draftkit.runtime.memory_plan import GIB, MemoryPlan
from draftkit.targets.cost import read_cost
from scripts.bench import roofline

ROOT = Path(__file__).parents[2]
LLAMA_8B = LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128256, max_position_embeddings=8192,
)  # fmt: skip


def test_the_longer_of_reading_and_computing_counts_and_the_gaps() -> None:
    device = Device("a device", bandwidth=1e9, speed=1e12, launch_gap=1e-6)
    forward = Forward(numbers=1e6, weights=2e6, cached=100, kernels=50)
    assert forward.seconds(device, 1, 1, 1000) == pytest.approx((2e6 + 100 * 1000) / 1e9)
    assert forward.seconds(device, 64, 100, 0) == pytest.approx(2 * 64 * 100 * 1e6 / 1e12)
    assert RoundCost(forward).seconds(device, 1, 0) == pytest.approx(2e-3 + 50e-6)
    chain, at_once = (RoundCost(forward, forward, k=4, passes=passes) for passes in (4, 1))
    assert chain.bytes_read(1, 0) == pytest.approx(5 * 2e6)
    assert at_once.bytes_read(1, 0) == pytest.approx(2 * 2e6)


def test_kernels_are_about_those_that_were_counted() -> None:
    known = json.loads((ROOT / "benchmarks/data/launches.json").read_text(encoding="utf-8"))
    for _, own, name in roofline.OWN:
        assert own.kernels == pytest.approx(known[name], rel=0.02)
    assert RoundCost(roofline.LLAMA_8B).kernels == known["a plain round, greedy"]


def planned(folder: Path, draft: str, k: int, **sizes: int) -> PlannedRound:
    with open_draft(draft, str(folder)) as opened:
        (found,) = plan_time(
            open_target(str(folder)), {"draft": opened}, ks=[k], devices=[H100], dtype=torch.bfloat16,
            batches=[sizes.get("batch", 1)], contexts=[1024],
        )["draft"]  # fmt: skip
    return found


def test_a_plan_reads_what_the_table_does(tmp_path: Path) -> None:
    LLAMA_8B.save_pretrained(tmp_path)
    found = planned(tmp_path, "ngram", 4)
    drafted = RoundCost(roofline.LLAMA_8B, k=4)
    assert found.kernels == drafted.kernels
    assert found.bytes_read == pytest.approx(drafted.bytes_read(1, 1024), rel=1e-4)  # norms are not in the table
    assert found.ms == pytest.approx(1e3 * drafted.seconds(H100, 1, 1024), rel=1e-4)
    assert found.pays_from == pytest.approx(1)


def test_of_experts_rows_read_those_they_are_sent_to(tmp_path: Path) -> None:
    Qwen3MoeConfig(
        hidden_size=64, moe_intermediate_size=32, num_hidden_layers=2, vocab_size=100, num_experts=8,
        num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    ).save_pretrained(tmp_path)  # fmt: skip
    cost = read_cost(tmp_path)
    one, many = (planned(tmp_path, "ngram", 1, batch=batch) for batch in (1, 64))
    cached = 2 * 2 * 2 * 2 * 16 * 1024  # layers, keys and values, bytes, heads, their width, positions
    twice = 1 - (1 - 2 / 8) ** 2  # of two rows
    assert one.bytes_read - cached == pytest.approx(2 * (cost.per_token + (twice - 2 / 8) * cost.experts))
    unread = cost.parameters - 100 * 64  # but for the embedding
    assert many.bytes_read - 64 * cached == pytest.approx(2 * unread, rel=1e-6)


@pytest.mark.parametrize(
    ("draft", "tables", "passes"),
    [("zoo:eagle3", "embed_tokens", 3), ("zoo:mlp-speculator", ".emb.", 3), ("zoo:p-eagle", "embed_tokens", 1)],
)
def test_a_draft_reads_its_weights_in_every_pass(draft: str, tables: str, passes: int) -> None:
    target = locate("zoo:target").path
    drafted, plain = (planned(target, source, 3) for source in (draft, "ngram"))
    with open_draft(draft, "zoo:target") as opened:
        shapes = [t.shape for name, t in opened.tensors.items() if len(t.shape) > 1 and tables not in name]
        cached = family_of(opened).slot_bytes(opened, torch.bfloat16)(1024, 1)
    read = 2 * sum(map(math.prod, shapes))
    assert drafted.bytes_read - plain.bytes_read == passes * (read + cached)


@pytest.mark.slow
def test_plan_time(draftkit: Command) -> None:
    asked = "eval", "--dry-run", "--target", "zoo:target", "--draft", "zoo:eagle3", "--draft", "ngram", "--limit", 2
    shown = draftkit(*asked)
    assert shown.code == 0
    assert "H100" in shown.out
    found = json.loads(draftkit(*asked, "--k", "2,4", "--concurrency", "1,8", "--json").out)["rounds"]
    assert found.keys() == {"zoo:eagle3", "ngram"}
    h100 = [one for one in found["zoo:eagle3"] if one["device"] == "H100"]
    assert [(one["batch"], one["num_speculative_tokens"]) for one in h100] == [(1, 2), (1, 4), (8, 2), (8, 4)]
    assert all(one["ms"] > one["plain_ms"] > 0 and one["pays_from"] > 1 for one in h100)


@pytest.mark.slow
def test_the_answer_of_a_plan_comes_first(draftkit: Command) -> None:
    pair = "--target", "zoo:target", "--draft", "zoo:eagle3"
    shown = draftkit("eval", "--dry-run", *pair, "--limit", 2, "--k", "1-4", "--concurrency", "1,8")
    answer, table = shown.out.split(".\n", 1)
    told = " ".join(answer.split())
    assert re.search(r"zoo:eagle3: \d+ sequences together take [\d.]+ GiB, [\d.]+ are free", told)
    assert told.count("at batch") == 2
    assert table.count("H100") == 2  # a row for each batch, whatever the Ks


def test_what_cannot_be_planned_is_refused(draftkit: Command) -> None:
    pair = "eval", "--dry-run", "--target", "zoo:target", "--draft", "zoo:eagle3"
    for more in (("--tree", "best:nodes=8"), ("--engine", "vllm"), ("--server", "http://localhost:1")):
        refused = draftkit(*pair, *more)
        assert (refused.code, refused.out) == (2, "")
        assert "leave out --tree and the engine" in " ".join(refused.err.split())


def test_where_a_draft_pays() -> None:
    def planned(batch: int, k: int, ms: float, device: str = "this") -> PlannedRound:
        return PlannedRound(device, batch, 100, k, bytes_read=0, kernels=0, ms=ms, plain_ms=1)

    rounds = [planned(1, 1, 1.3), planned(1, 4, 1.2), planned(8, 1, 2.1), planned(8, 2, 3), planned(8, 1, 1, "that")]
    room = MemoryPlan({"weights": 3 * GIB}, {}, num_slots=1, capacity=1, available=2 * GIB)
    answer = plan_answer("a draft", room, rounds)
    assert "one sequence would need 3.00 GiB, 2.00 are free" in answer
    assert answer.endswith("1.20 with K = 4 at batch 1, context 100; none at batch 8, context 100.")
