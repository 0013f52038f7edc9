"""The draft–verify loop: lossless at temperature 0, whatever the draft, the batch and the way a sequence ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise

import pytest
import torch
from fixtures.checkpoints.zoo_models import requests, zoo_drafter, zoo_target
from transformers import AutoModelForCausalLM

from draftkit import zoo
from draftkit.errors import DraftkitError
from draftkit.requests import Request
from draftkit.runtime.cache import SlotCache
from draftkit.runtime.drafters.causal_lm import CausalLMDrafter
from draftkit.runtime.drafters.dflash import DFlashDrafter
from draftkit.runtime.drafters.eagle import EagleDrafter
from draftkit.runtime.drafters.protocol import Drafter, NewSequence
from draftkit.runtime.engine import MAX_SPECULATIVE_TOKENS, Engine
from draftkit.runtime.records import Generation
from draftkit.targets.target import Target

DRAFTS = ("eagle", "eagle3", "draft-model", "dspark")


@lru_cache
def transformers_output(eos_token_id: int | None = None) -> tuple[list[int], ...]:
    """What transformers itself generates for the requests, one at a time, from the same weights."""
    model = AutoModelForCausalLM.from_pretrained(zoo.path("target"), dtype=torch.float32)
    if eos_token_id is not None:
        model.generation_config.eos_token_id = eos_token_id
    outputs = []
    for request in requests():
        ids = model.generate(
            torch.tensor([request.prompt]), do_sample=False, max_new_tokens=request.max_new_tokens, pad_token_id=0
        )
        outputs.append(ids[0, len(request.prompt) :].tolist())
    return tuple(outputs)


def generate(
    drafter: Drafter | None, k: int, num_slots: int, eos_token_ids: frozenset[int] | None = None
) -> list[Generation]:
    target = Target(zoo_target(), drafter.aux_layers if drafter else None)
    if eos_token_ids is not None:
        target.eos_token_ids = eos_token_ids
    return Engine(target, drafter, num_speculative_tokens=k, num_slots=num_slots).generate(requests())


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize("num_slots", [pytest.param(1, marks=pytest.mark.long), 8])
@pytest.mark.parametrize("name", [*DRAFTS, "p-eagle", "pard", "mlp-speculator", "dflash"])
def test_output_equals_transformers(name: str, num_slots: int) -> None:
    generations = generate(zoo_drafter(name), 4, num_slots)
    assert [g.tokens for g in generations] == list(transformers_output())
    assert any(r.accepted > 0 for g in generations for r in g.rounds)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("k", [1, 2, 7, MAX_SPECULATIVE_TOKENS])
def test_output_does_not_depend_on_k(k: int) -> None:
    assert [g.tokens for g in generate(zoo_drafter("eagle3"), k, 3)] == list(transformers_output())


@pytest.mark.slow
def test_plain_decoding_equals_transformers() -> None:
    generations = generate(None, 0, 3)
    assert [g.tokens for g in generations] == list(transformers_output())
    assert {r.accepted for g in generations for r in g.rounds} == {0}


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("num_slots", [1, 8])
@pytest.mark.parametrize("name", DRAFTS)
def test_end_of_sequence_inside_an_accepted_prefix(name: str, num_slots: int) -> None:
    """Whatever token is made the end of sequence, the output stops right after its first occurrence."""
    token = most_common_token(transformers_output())
    generations = generate(zoo_drafter(name), 4, num_slots, frozenset([token]))
    assert [g.tokens for g in generations] == list(transformers_output(token))
    cut = [g.rounds[-1] for g in generations if g.finished == "eos" and g.rounds]
    assert any(r.emitted < r.accepted + 1 for r in cut), "no sequence ended inside an accepted prefix"


def most_common_token(outputs: Sequence[list[int]]) -> int:
    """The token in the most outputs, not counting the first two tokens of each."""
    seen = [token for output in outputs for token in set(output[2:]) - set(output[:2])]
    return max(sorted(set(seen)), key=seen.count)


@pytest.mark.slow
def test_length_limit_inside_an_accepted_prefix() -> None:
    generations = generate(zoo_drafter("eagle3"), 4, 8)
    limited = [g for g in generations if g.finished == "length"]
    assert all(len(g.tokens) == g.request.max_new_tokens for g in limited)
    assert any(g.rounds[-1].emitted < g.rounds[-1].accepted + 1 for g in limited)


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 4, MAX_SPECULATIVE_TOKENS])
def test_target_as_its_own_draft_accepts_everything(k: int) -> None:
    generations = generate(CausalLMDrafter(Target(zoo_target())), k, 3)
    assert {r.accepted for g in generations for r in g.rounds} == {k}
    assert [g.tokens for g in generations] == list(transformers_output())


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTS)
def test_rounds_account_for_every_token(name: str) -> None:
    for generation in generate(zoo_drafter(name), 4, 3):
        assert len(generation.tokens) == 1 + sum(r.emitted for r in generation.rounds)
        assert all(r.drafted == 4 and 0 <= r.accepted <= 4 for r in generation.rounds)
        assert all(r.emitted == r.accepted + 1 for r in generation.rounds[:-1])
        positions = [r.position for r in generation.rounds]
        assert all(b - a == r.emitted for (a, b), r in zip(pairwise(positions), generation.rounds, strict=False))


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTS)
def test_draft_state_equals_a_fresh_prefill(name: str) -> None:
    """After all its rejections the draft's keys and values are those of the same tokens read at once."""
    drafter = zoo_drafter(name)
    assert isinstance(drafter, EagleDrafter | CausalLMDrafter | DFlashDrafter)
    target = Target(zoo_target(), drafter.aux_layers)
    request = requests()[3]
    (generation,) = Engine(target, drafter, num_speculative_tokens=4, num_slots=1).generate([request])
    assert any(r.accepted < 4 for r in generation.rounds)
    known = (*request.prompt, *generation.tokens)[: generation.rounds[-1].position]  # when it last proposed
    kept = {layer: tuple(pool.clone() for pool in pools) for layer, pools in drafter.cache.layers.items()}

    drafter.allocate(1, len(known), 4)
    tokens = torch.tensor(known)
    positions = torch.arange(len(known))[None]
    rows = SlotCache(1, len(known)).rows(torch.tensor([0]), positions, len(known))
    features = target.forward(tokens[None], positions, rows).features
    drafter.prefill([NewSequence(0, tokens, None if features is None else features[0])])
    valid = len(known) - (drafter.aux_layers is not None)  # a head's last row still waits for its token
    for layer, pools in drafter.cache.layers.items():
        for fresh, used in zip(pools, kept[layer], strict=True):
            torch.testing.assert_close(used[:, :, :valid], fresh[:, :, :valid], rtol=1e-4, atol=1e-4)


def test_request_that_ends_with_its_first_token() -> None:
    request = Request("one", requests()[0].prompt, 1)
    drafter = zoo_drafter("eagle")
    engine = Engine(Target(zoo_target(), drafter.aux_layers), drafter, num_speculative_tokens=4, num_slots=2)
    first, again = engine.generate([request, request])
    assert first.tokens == again.tokens == transformers_output()[0][:1]
    assert first.rounds == []
    assert first.finished == "length"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: generate(None, 4, 1), "drafting needs a draft"),
        (lambda: generate(zoo_drafter("eagle"), 0, 1), "K = 0"),
        (lambda: generate(zoo_drafter("eagle"), MAX_SPECULATIVE_TOKENS + 1, 1), "K = 17"),
    ],
)
def test_impossible_settings_are_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(DraftkitError, match=message):
        build()


def test_empty_prompt_is_refused() -> None:
    engine = Engine(Target(zoo_target()), None, num_speculative_tokens=0, num_slots=1)
    with pytest.raises(DraftkitError, match="empty prompt"):
        engine.generate([Request("nothing", (), 4)])
