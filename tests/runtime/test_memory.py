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
from transformers import GPT2Config

from draftkit.errors import DraftkitError
from draftkit.requests import DraftSampling, Request, SamplingParameters
from draftkit.runtime import engine as engine_module
from draftkit.runtime.batch import Batch
from draftkit.runtime.cache import SlotCache
from draftkit.runtime.engine import Engine
from draftkit.runtime.graphs import GraphedRounds, Replay
from draftkit.runtime.memory import STATES_OF_PROMPTS, Load, plan_of
from draftkit.runtime.memory_plan import MemoryPlan
from draftkit.runtime.prefill import PREFILL_CHUNK
from draftkit.runtime.rounds import Rounds, SlotState
from draftkit.targets.footprint import Footprint, activation_bytes, footprint, largest
from draftkit.targets.target import Target

psutil = pytest.importorskip("psutil")  # which a day on a GPU does without


def pool_bytes(cache: SlotCache) -> int:
    return sum(pool.nbytes for pools in cache.layers.values() for pool in pools)


@pytest.mark.slow
@pytest.mark.few(5)
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


EVAL = ("eval", "--target", "zoo:target", "--draft", "zoo:eagle3", "--limit", 4)
TORN = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB"


def test_memory_that_runs_out_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def torn(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError(TORN)

    target = Target(zoo_target())
    monkeypatch.setattr(target, "forward", torn)
    engine = Engine(target, None, num_speculative_tokens=0, num_slots=6)
    with pytest.raises(DraftkitError, match="ran out of memory while 6 sequences were decoded together") as error:
        engine.generate([[5, 6, 7]])
    assert "with room for 132 tokens each: Tried to allocate 2.00 GiB. GPU 0 has a total capacity" in str(error.value)
    assert "--concurrency 3" in str(error.value)
    assert "--context" in str(error.value)
    assert "expandable_segments" in str(error.value)


def test_memory_that_runs_out_elsewhere_is_one_message(draftkit: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where weights are joined, or a draft is loaded."""

    def torn(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError(TORN)

    monkeypatch.setattr(engine_module, "fuse", torn)
    failed = draftkit(*EVAL)
    assert failed.code == 1
    assert failed.err.count("error: the device ran out of memory: Tried to allocate 2.00 GiB. GPU 0 has") == 1
    assert "Traceback" not in failed.err
    assert "--concurrency" in failed.err


def test_a_capture_without_memory_is_no_reason_to_run_without_graphs() -> None:
    tries: list[int] = []

    def capture(run: Replay) -> Replay:
        tries.append(1)
        if len(tries) == 1:
            raise torch.OutOfMemoryError(TORN)
        return lambda: torch.ones(1)

    sampling = SamplingParameters()
    batch = Batch.of({0: Request("0", (5, 6), 4, sampling)}, DraftSampling(), torch.device("cpu"))
    target = Target(zoo_target())
    state = SlotState.empty(1, 1, 0, torch.device("cpu"), torch.float32)
    rounds = GraphedRounds(Rounds(target, None, SlotCache(1, 8), state, "rejection", None), 1, 8, capture)
    with pytest.raises(torch.OutOfMemoryError):
        rounds.run(batch, 0, 8)
    assert rounds.run(batch, 0, 8).tolist() == [1]  # the next one is captured


def load(capacity: int, k: int = 4) -> Load:
    """Of the zoo's target and a draft that reads 576 numbers of a row."""
    config = zoo_target().config
    return Load(config, footprint(config), torch.bfloat16, lambda capacity, k: 0, 576, capacity, k)


def test_a_gpu_keeps_a_reserve() -> None:
    config, free = zoo_target().config, 32 << 20
    told = [load(64).fixed(torch.device(kind), free) for kind in ("cpu", "cuda")]
    hidden, inner = config.hidden_size, config.intermediate_size
    most = max(3 * inner, 2 * (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim)
    assert told[0] == {"activations": PREFILL_CHUNK * (2 * hidden + most + STATES_OF_PROMPTS * 576) * 2}
    copied = 64 * footprint(config).cached * 2 // config.num_hidden_layers
    assert told[1] == {"activations": told[0]["activations"] + copied, "reserve": 1 << 20}


def test_sizes_have_the_names_of_older_models_too() -> None:
    config = GPT2Config(n_embd=64, n_layer=4, n_head=4, n_inner=96)
    assert (largest(config, "hidden_size"), largest(config, "num_hidden_layers")) == (64, 4)
    planned = Load(config, Footprint(1, 4 * 2 * 64, ()), torch.bfloat16, lambda capacity, k: 0, 0, 1000, 4)
    activations = planned.fixed(torch.device("cuda"), 0)["activations"]
    assert activations == activation_bytes(config, PREFILL_CHUNK, torch.bfloat16) + 1000 * 2 * 64 * 2


def test_attention_over_long_sequences_has_partial_results() -> None:
    config, gpu = zoo_target().config, torch.device("cuda")
    assert "attention partials" not in load(2048).per_slot(gpu)
    assert "attention partials" not in load(4097).per_slot(torch.device("cpu"))
    three = config.num_attention_heads * 5 * 3 * (config.head_dim + 1) * 4
    assert load(4097).per_slot(gpu)["attention partials"] == three


def test_a_plan_is_that_of_the_device_with_the_least_room() -> None:
    """Of layers on two GPUs, each keeps the caches of its own; all else of a slot is on the first."""
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    whole = load(4096).per_slot(first)
    free = {first: 1 << 30, second: 1 << 30}
    plan = plan_of(load(4096), 2, {first: 0.25, second: 0.75}, free)
    assert plan.place == "cuda:1"
    assert plan.per_slot == {
        "target cache": 3 * whole["target cache"] // 4,
        **{name: whole[name] for name in ("activations of a round", "attention partials")},
    }
    weights = {first: {"target weights": 900 << 20}, second: {"target weights": 100 << 20}}
    plan = plan_of(load(4096), 10**6, {first: 0.25, second: 0.75}, free, weights)
    assert plan.fixed["target weights"] == 900 << 20
    assert plan.per_slot == whole | {"target cache": whole["target cache"] // 4}
    with pytest.raises(DraftkitError, match=r"GiB of memory on cuda:0, 1\.00 GiB are free"):
        plan.require()
    assert plan_of(load(4096), 2, {first: 1.0}, free).place is None


@pytest.mark.slow
def test_plan_memory(draftkit: Command) -> None:
    shown = draftkit(*EVAL, "--dry-run", "--concurrency", 4)
    assert shown.code == 0
    assert "largest batch that fits" in " ".join(shown.out.split())
    found = json.loads(draftkit(*EVAL, "--dry-run", "--concurrency", 4, "--json").out)
    plan: dict[str, Any] = found["memory"]["zoo:eagle3"]
    weights = sum(parameter.nbytes for parameter in zoo_target().parameters())
    assert plan["fixed"]["target weights"] == weights
    assert "target cache" in plan["per_slot"]
    assert plan["total"] == sum(plan["fixed"].values()) + 4 * sum(plan["per_slot"].values())


@pytest.mark.usefixtures("little_memory")
def test_eval_refuses_before_it_loads(draftkit: Command) -> None:
    refused = draftkit(*EVAL, "--max-new-tokens", 1800, "--concurrency", 4)
    assert refused.code == 1
    assert "GiB of memory, 0.04 GiB are free" in refused.err
