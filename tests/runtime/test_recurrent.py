"""Targets with recurrent states: a rejected token stays in none of them, whatever keeps the state.

The reference is what transformers generates from the same weights with its own cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints.recurrent_targets import FULL, KINDS, prompts, recurrent_model
from fixtures.compiler import compiles
from fixtures.precision import LAYER, assert_close
from lossless.poisoned import PoisonedTarget
from transformers import CONFIG_MAPPING, PreTrainedModel

from draftkit.evaluate.planning import plan_memory
from draftkit.loading import open_draft, open_target
from draftkit.report.memory_cost import cost_of
from draftkit.requests import DraftSampling, Request, SamplingParameters
from draftkit.runtime.architecture_check import Known
from draftkit.runtime.attention import NAME
from draftkit.runtime.cache import SlotCache, SlotStates
from draftkit.runtime.compiled.rounds import CompiledRounds
from draftkit.runtime.drafters.causal_lm import CausalLMDrafter, PardDrafter
from draftkit.runtime.engine import Engine
from draftkit.runtime.records import Generation
from draftkit.targets.target import Target, load_target

torch.set_num_threads(1)

K = 4
REQUESTS = prompts((5, 14, 1, 9, 22, 2), 12)
IN_PIECES = 4  # rows of a piece of a prompt


@dataclass(frozen=True)
class Case:
    kind: str
    model: PreTrainedModel
    texts: list[list[int]]  # prompts and answers

    def answers(self) -> list[list[int]]:
        return [text[len(request.prompt) :] for text, request in zip(self.texts, REQUESTS, strict=True)]


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest) -> Case:
    kind = request.param
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this release of transformers has no {kind}")
    model = recurrent_model(kind)
    texts = []
    for wanted in REQUESTS:
        prompt = torch.tensor([wanted.prompt])
        ids = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=wanted.max_new_tokens
        )
        texts.append(ids[0].tolist())
    model.set_attn_implementation(NAME)
    return Case(kind, model, texts)


def engine(case: Case, drafter: Any = None, k: int = K, target: type[Target] = Target, **options: Any) -> Engine:
    drafter = drafter or Known(case.texts)
    return Engine(target(case.model), drafter if k else None, num_speculative_tokens=k, **{"num_slots": 4} | options)


def tokens(generations: list[Generation]) -> list[list[int]]:
    return [generation.tokens for generation in generations]


@pytest.mark.slow
@pytest.mark.few(4)
@pytest.mark.parametrize("num_slots", [1, 4])
def test_output_equals_transformers(case: Case, num_slots: int) -> None:
    assert len({token for answer in case.answers() for token in answer}) > 20, "the reference only repeats itself"
    generations = engine(case, num_slots=num_slots).generate(REQUESTS)
    assert tokens(generations) == case.answers()
    assert {r.accepted for g in generations for r in g.rounds} == set(range(K + 1))


@pytest.mark.slow
def test_prompts_in_pieces_and_plain_decoding_equal_transformers(case: Case) -> None:
    assert tokens(engine(case, k=0, prefill_chunk=IN_PIECES).generate(REQUESTS)) == case.answers()


@pytest.mark.long
@compiles
def test_rounds_of_layers_with_states_are_not_compiled(case: Case) -> None:
    """Where that is asked for, they run as ever."""
    made = engine(case, k=0, compile=True)
    assert tokens(made.generate(REQUESTS)) == case.answers()
    assert isinstance(made._rounds, CompiledRounds)
    assert set(made._rounds._programs.values()) == {None}


@pytest.mark.slow
def test_states_after_rejections_are_those_of_a_fresh_prefill(case: Case) -> None:
    """In slots that other sequences had before."""
    run = engine(case)
    run.generate(REQUESTS[2:])
    for slot, generation in enumerate(run.generate(REQUESTS[:4])):
        assert any(r.accepted < K for r in generation.rounds)
        known = (*generation.request.prompt, *generation.tokens)[:-1]
        assert_states(run.target, run._cache.states, slot, known)


def assert_states(target: Target, states: SlotStates, slot: int, known: tuple[int, ...]) -> None:
    """A slot has the states of these tokens read at once."""
    cache = SlotCache(1, len(known))
    positions = torch.arange(len(known))[None]
    target.forward(torch.tensor([known]), positions, cache.rows(positions[0, :1], positions, len(known), prompt=True))
    entry = states.entries(torch.tensor([slot]), torch.tensor([len(known) - 1]))
    assert states.pools.keys() == cache.states.pools.keys() != set()
    for key, pool in states.pools.items():
        assert_close(pool[entry], cache.states.pools[key][:1], depth=target.num_layers * LAYER + 1)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [True, False])
def test_prompts_in_pieces_leave_the_same_states(case: Case, prompt: bool) -> None:
    target, known = Target(case.model), tuple(case.texts[4])
    cache = SlotCache(2, len(known), K)
    for begin, end in ((0, 3), (3, 4), (4, 11), (11, len(known))):
        positions = torch.arange(begin, end)[None]
        rows = cache.rows(torch.tensor([1]), positions, end, prompt=prompt)
        target.forward(torch.tensor([known[begin:end]]), positions, rows)
    assert_states(target, cache.states, 1, known)


@pytest.mark.slow
def test_what_was_rejected_is_not_read(case: Case) -> None:
    assert tokens(engine(case, target=PoisonedTarget, eager=True).generate(REQUESTS)) == case.answers()


@pytest.mark.slow
def test_states_of_other_positions_are_noticed(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    own = SlotStates.entries
    monkeypatch.setattr(SlotStates, "entries", lambda kept, slots, at: own(kept, slots, at - at % 2))
    assert tokens(engine(case).generate(REQUESTS)) != case.answers()


def draft_of(case: Case) -> Target:
    """Right at times."""
    draft = recurrent_model(case.kind, noise=0.02)
    draft.set_attn_implementation(NAME)
    return Target(draft)


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("kind", ["chain", "parallel"])
def test_drafts_with_states(case: Case, kind: str) -> None:
    draft = draft_of(case)
    drafter = CausalLMDrafter(draft) if kind == "chain" else PardDrafter(draft, mask_token_id=3)
    generations = engine(case, drafter).generate(REQUESTS[:4])
    assert tokens(generations) == case.answers()[:4]
    accepted = {r.accepted for g in generations for r in g.rounds}
    assert len(accepted) > (2 if kind == "chain" else 1)
    for slot, generation in enumerate(generations):
        known = (*generation.request.prompt, *generation.tokens)[: generation.rounds[-1].position]
        assert_states(draft, drafter.cache.states, slot, known)


@pytest.mark.slow
@pytest.mark.few(2)
def test_the_target_as_its_own_draft_accepts_everything(case: Case) -> None:
    generations = engine(case, CausalLMDrafter(Target(case.model))).generate(REQUESTS)
    assert tokens(generations) == case.answers()
    assert {r.accepted for g in generations for r in g.rounds} == {K}


@pytest.mark.slow
@pytest.mark.few(1)
def test_sampled_tokens_are_those_of_plain_decoding(case: Case) -> None:
    wanted = [
        Request(r.id, r.prompt, 8, SamplingParameters(temperature=0.7, seed=i), ignore_eos=True)
        for i, r in enumerate(REQUESTS[:4])
    ]
    options: Any = {"verification": "coupled", "draft_sampling": DraftSampling(mode="probabilistic")}
    plain = engine(case, k=0, **options).generate(wanted)
    drafted = engine(case, CausalLMDrafter(draft_of(case)), **options).generate(wanted)
    assert tokens(drafted) == tokens(plain) != case.answers()
    assert len({r.accepted for g in drafted for r in g.rounds}) > 1


def test_caches_take_what_was_planned(case: Case) -> None:
    run = engine(case, num_slots=2)
    run.generate(REQUESTS[:1])
    capacity = run._capacity
    positions = sum(pool.nbytes for pools in run._cache.layers.values() for pool in pools)
    states = sum(pool.nbytes * 2 * (K + 1) // len(pool) for pool in run._cache.states.pools.values())
    assert positions + states == 2 * run.target.slot_bytes(capacity, K)
    assert states == 2 * run.target.slot_bytes(0, K) > 0


# Of classes that have recurrent layers beside others, and of which a configuration may have none.
WITHOUT: dict[str, dict[str, Any]] = {
    "qwen3_next": {"layer_types": [FULL] * 4},
    "kimi_linear": {"layer_types": [FULL] * 4},
    "nemotron_h": {"layer_types": [FULL, "mlp", FULL, "moe", FULL]},
    "jamba": {"attn_layer_period": 1, "attn_layer_offset": 0},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", WITHOUT)
def test_hybrid_classes_run_without_a_recurrent_layer(kind: str, tmp_path: Path) -> None:
    model = recurrent_model(kind, **WITHOUT[kind])
    model.save_pretrained(tmp_path)
    prompt = torch.tensor([REQUESTS[0].prompt])
    text = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=16)[0]
    target = Target(load_target(tmp_path, device="cpu", dtype=torch.float32, attention=NAME))
    run = Engine(target, Known([text.tolist()]), num_speculative_tokens=K, num_slots=1)
    (generation,) = run.generate([REQUESTS[0].prompt], max_new_tokens=16)
    assert generation.tokens == text[len(REQUESTS[0].prompt) :].tolist()
    assert any(r.accepted for r in generation.rounds)


@pytest.mark.slow
def test_plans_tell_states_from_keys_and_values(tmp_path: Path) -> None:
    """Without a draft, those of one position are kept."""
    recurrent_model("qwen3_next").save_pretrained(tmp_path)
    sizes: Any = {"device": torch.device("cpu"), "dtype": torch.bfloat16, "num_slots": 2, "longest": 64, "k": K}
    with open_draft("ngram", str(tmp_path)) as draft:
        plan = plan_memory(open_target(str(tmp_path)), {"ngram": draft}, **sizes)["ngram"]
    one = 3 * (128 * 4 * 2 + 4 * 16 * 16 * 4)  # three layers, convolutions in bfloat16 and recurrent states in float32
    assert plan.per_slot["target states"] == (K + 1) * one
    assert plan.per_slot["target cache"] == plan.capacity * 2 * 2 * 16 * 2  # keys and values of one layer
    assert "draft states" not in plan.per_slot
    assert cost_of(plan, "ngram", K).plain_states == one


def test_states_keep_their_dtype_in_a_model_of_another() -> None:
    """Recurrent ones are in float32 in a bfloat16 model."""
    model = recurrent_model("nemotron_h").to(torch.bfloat16)
    model.set_attn_implementation(NAME)
    run = Engine(Target(model), None, num_speculative_tokens=0, num_slots=1)
    run.generate(REQUESTS[:1])
    pools = run._cache.states.pools
    assert {(key.kind, pool.dtype) for key, pool in pools.items()} == {
        ("conv", torch.bfloat16), ("recurrent", torch.float32),
    }  # fmt: skip
    assert sum(pool[0].nbytes for pool in pools.values()) == run.target.slot_bytes(0, 0)


@pytest.mark.slow
def test_rounds_of_vacant_batches_leave_no_trace(case: Case) -> None:
    """As a capture runs them."""
    run = engine(case)
    run.generate(REQUESTS)
    batch = run._batch
    assert batch is not None
    kept = {key: pool[:-1].clone() for key, pool in run._cache.states.pools.items()}
    run._rounds.run(batch.vacant(), K, run._capacity, drafting=False)
    for key, pool in run._cache.states.pools.items():
        assert torch.equal(pool[:-1], kept[key])
