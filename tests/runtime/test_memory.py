"""Memory is planned as it is then used, and what cannot fit fails before anything is allocated."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import Command
from fixtures.checkpoints.zoo_models import zoo_drafter, zoo_target
from fixtures.engines.drafter_cases import Case, target

from draftkit.errors import DraftkitError
from draftkit.runtime.cache import SlotCache
from draftkit.runtime.engine import Engine
from draftkit.runtime.memory_plan import MemoryPlan
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
