"""Memory is planned as it is then used, and what cannot fit fails before anything is allocated."""

from __future__ import annotations

import json
from typing import Any
from weakref import ref

import pytest
import torch
from conftest import Command
from fixtures.checkpoints.zoo_models import zoo_drafter, zoo_target
from fixtures.engines.drafter_cases import Case, target

from draftkit.errors import DraftkitError
from draftkit.requests import DraftSampling, Request, SamplingParameters
from draftkit.runtime import engine as engine_module
from draftkit.runtime.batch import Batch
from draftkit.runtime.cache import SlotCache
from draftkit.runtime.engine import Engine
from draftkit.runtime.graphs import GraphedRounds, Replay
from draftkit.runtime.memory import partial_bytes, working_memory
from draftkit.runtime.memory_plan import MemoryPlan
from draftkit.runtime.prefill import PREFILL_CHUNK
from draftkit.runtime.rounds import Rounds, SlotState
from draftkit.targets.target import Target

psutil = pytest.importorskip("psutil")  # which a day on a GPU does without


def pool_bytes(cache: SlotCache) -> int:
    return sum(pool.nbytes for pools in cache.layers.values() for pool in pools)


@pytest.mark.slow
@pytest.mark.few(10)
def test_caches_take_what_was_planned(case: Case) -> None:
    drafter = case.drafter
    engine = Engine(Target(target(), drafter.aux_layers), drafter, num_speculative_tokens=3, num_slots=2)
    engine.generate([[5, 6, 7]], max_new_tokens=6)
    capacity = 3 + 6 + 3 + 1
    assert pool_bytes(engine._cache) == 2 * engine.target.slot_bytes(capacity, 3) > 0
    kept = getattr(drafter, "cache", SlotCache(0, 0))
    assert drafter.slot_bytes is not None
    assert pool_bytes(kept) == 2 * drafter.slot_bytes(capacity, 3)


def test_the_largest_batch_is_the_largest() -> None:
    plan = MemoryPlan({"weights": 100}, {"cache": 7, "logits": 3}, num_slots=5, capacity=8, available=149)
    assert (plan.total, plan.largest_batch) == (150, 4)
    with pytest.raises(DraftkitError, match=r"decode at most 4 together \(--concurrency 4\)"):
        plan.require()
    MemoryPlan(plan.fixed, plan.per_slot, 4, 8, 149).require()


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found = psutil.virtual_memory()._replace(available=40 << 20)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: found)


@pytest.mark.usefixtures("little_memory")
def test_what_cannot_fit_fails_first() -> None:
    drafter = zoo_drafter("eagle3")
    engine = Engine(Target(zoo_target(), drafter.aux_layers), drafter, num_speculative_tokens=4, num_slots=4096)
    with pytest.raises(DraftkitError, match=r"4096 sequences need .* GiB of memory, 0.04 GiB are free") as error:
        engine.generate([[5, 6, 7]], max_new_tokens=64)
    most = int(str(error.value).rsplit(" ", 1)[1].rstrip(")"))
    Engine(engine.target, drafter, num_speculative_tokens=4, num_slots=most).reserve(3 + 64)
    with pytest.raises(DraftkitError):
        Engine(engine.target, drafter, num_speculative_tokens=4, num_slots=most + 1).reserve(3 + 64)


@pytest.mark.slow
def test_an_engine_that_grows_asks_without_what_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = zoo_drafter("eagle3")
    engine = Engine(Target(zoo_target(), drafter.aux_layers), drafter, num_speculative_tokens=4, num_slots=2)
    engine.generate([[5, 6, 7]], max_new_tokens=4)
    held = [ref(pool) for cache in (engine._cache, drafter.cache) for pools in cache.layers.values() for pool in pools]
    held.append(ref(engine._rounds))
    assert all(there() is not None for there in held)
    alive: list[object] = []

    def asked(*_: object, **__: object) -> None:
        alive.extend(there() for there in held if there() is not None)

    monkeypatch.setattr(engine_module, "require_memory", asked)
    engine.reserve(200)
    assert not alive


TORN = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB"


def test_memory_that_runs_out_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def torn(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError(TORN)

    target = Target(zoo_target())
    monkeypatch.setattr(target, "forward", torn)
    engine = Engine(target, None, num_speculative_tokens=0, num_slots=6)
    with pytest.raises(DraftkitError, match="ran out of memory while 6 sequences were decoded together") as error:
        engine.generate([[5, 6, 7]])
    assert "--concurrency 3" in str(error.value)
    assert "expandable_segments" in str(error.value)


def test_a_capture_without_memory_is_no_reason_to_run_without_graphs() -> None:
    tries: list[int] = []

    def capture(run: Replay) -> Replay:
        tries.append(1)
        if len(tries) == 1:
            raise torch.OutOfMemoryError(TORN)
        return lambda: torch.ones(1)

    sampling = SamplingParameters()
    batch = Batch.of({0: Request("0", (5, 6), 4, sampling)}, DraftSampling(), torch.device("cpu"), 1)
    target = Target(zoo_target())
    state = SlotState.empty(1, 1, 0, torch.device("cpu"), torch.float32)
    rounds = GraphedRounds(Rounds(target, None, SlotCache(1, 8), state, "rejection", None), 1, 8, capture)
    with pytest.raises(torch.OutOfMemoryError):
        rounds.run(batch, 0, 8)
    assert rounds.run(batch, 0, 8).tolist() == [1]  # the next one is captured


def test_a_gpu_keeps_a_reserve() -> None:
    config, free = zoo_target().config, 32 << 20
    told = [
        working_memory(config, torch.bfloat16, torch.device(kind), feature_size=576, available=free)
        for kind in ("cpu", "cuda")
    ]
    hidden, inner = config.hidden_size, config.intermediate_size
    most = max(3 * inner, 2 * (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim)
    assert told[0] == {"activations": PREFILL_CHUNK * (2 * hidden + most + 2 * 576) * 2}
    assert told[1] == told[0] | {"reserve": 1 << 20}
    assert partial_bytes(config, torch.device("cuda"), 2048, 4) == 0
    three = config.num_attention_heads * 5 * 3 * (config.head_dim + 1) * 4
    assert partial_bytes(config, torch.device("cuda"), 4097, 4) == three


EVAL = ("eval", "--target", "zoo:target", "--draft", "zoo:eagle3", "--limit", 4)


@pytest.mark.slow
def test_plan_memory(draftkit: Command) -> None:
    shown = draftkit("plan", *EVAL[1:], "--concurrency", 4)
    assert shown.code == 0
    assert "target cache" in shown.out
    assert "largest batch that fits" in shown.out
    found = json.loads(draftkit("plan", *EVAL[1:], "--concurrency", 4, "--json").out)
    plan: dict[str, Any] = found["memory"]["zoo:eagle3"]
    weights = sum(parameter.nbytes for parameter in zoo_target().parameters())
    assert plan["fixed"]["target weights"] == weights
    assert plan["total"] == sum(plan["fixed"].values()) + 4 * sum(plan["per_slot"].values())


@pytest.mark.usefixtures("little_memory")
def test_eval_refuses_before_it_loads(draftkit: Command) -> None:
    refused = draftkit(*EVAL, "--max-new-tokens", 1800, "--concurrency", 4)
    assert refused.code == 1
    assert "GiB of memory, 0.04 GiB are free" in refused.err
