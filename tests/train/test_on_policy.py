"""Samples in the draft's own words."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from fixtures.checkpoints import pico
from transformers import LlamaForCausalLM

from draftkit.data.packing import row_tensors
from draftkit.data.samples import Sample
from draftkit.data.states.online import OnlineStates
from draftkit.errors import DraftkitError
from draftkit.requests import SamplingParameters
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.engine import Engine
from draftkit.targets.target import Target
from draftkit.train.attention import MASKED_ATTENTION as MASKED
from draftkit.train.batch import TrainingBatch
from draftkit.train.on_policy import continued
from draftkit.train.recipes.causal_lm_draft_model import DraftModel, DraftModelOptions
from draftkit.train.recipes.recipe import Origin

TOKENS = np.random.default_rng(0).integers(3, pico.VOCABULARY, 40).tolist()
SAMPLES = [
    Sample.of("answer", TOKENS[:20], [(8, 20)], "chat"),
    Sample.of("two turns", TOKENS[5:30], [(4, 9), (14, 22)]),  # a tail that nobody supervises
    Sample.of("from the start", TOKENS[:6], [(0, 6)]),
    Sample.of("plain", TOKENS[:7], []),
]
CONTINUED = {0: (8, 12), 1: (14, 8)}  # sample → prompt and new tokens, at most


@cache
def draft() -> LlamaForCausalLM:
    model = pico.llama(seed=4, num_hidden_layers=2)
    model.set_attn_implementation(MASKED)
    return model


def test_documents_go_on_with_what_the_draft_says() -> None:
    model = draft().train()
    found = continued(SAMPLES, model, SamplingParameters())
    assert model.training
    assert model.config._attn_implementation == MASKED
    plain = pico.llama(seed=4, num_hidden_layers=2)
    plain.set_attn_implementation(ATTENTION)
    for number, (before, after) in enumerate(zip(SAMPLES, found, strict=True)):
        if number not in CONTINUED:
            assert after is before
            continue
        begin, most = CONTINUED[number]
        engine = Engine(Target(plain), None, num_speculative_tokens=0, num_slots=1)
        (generation,) = engine.generate([before.tokens[:begin].tolist()], max_new_tokens=most)
        assert after.tokens.tolist() == [*before.tokens[:begin].tolist(), *generation.tokens]
        assert after.tokens.dtype == np.int32
        assert after.spans == [(begin, len(after))]
        assert (after.id, after.category) == (before.id, before.category)
        assert len(after) <= len(before)


def test_samples_depend_on_the_seed_alone() -> None:
    def sampled(seed: int) -> list[list[int]]:
        found = continued(SAMPLES, draft(), SamplingParameters(temperature=1, seed=seed))
        return [sample.tokens.tolist() for sample in found]

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)


def test_nothing_to_continue() -> None:
    assert continued(SAMPLES[2:], draft(), SamplingParameters()) == SAMPLES[2:]


def recipe(**options: object) -> DraftModel:
    torch.manual_seed(0)
    sizes = {"num_layers": 1, "hidden_size": 32, "num_heads": 4, "num_key_value_heads": 2}
    return DraftModel.start(Origin(pico.llama()), DraftModelOptions(**(sizes | options)))  # type: ignore[arg-type]


def test_the_share_of_on_policy_steps() -> None:
    assert all(recipe().resample(SAMPLES, seed) is SAMPLES for seed in range(20))
    assert all(recipe(on_policy=1.0).resample(SAMPLES, seed) is not SAMPLES for seed in range(3))
    mixed, short = recipe(on_policy=0.3), SAMPLES[2:]
    own = sum(mixed.resample(short, seed) is not short for seed in range(1000))
    assert 260 < own < 340
    with pytest.raises(DraftkitError, match=r"on_policy: 1\.5 is not"):
        recipe(on_policy=1.5)


def test_training_on_own_text() -> None:
    """Generating leaves nothing behind that a backward pass could not go through, and the loss falls."""
    target = pico.llama()
    trained = recipe(on_policy=1.0).train()
    optimiser = torch.optim.AdamW(trained.parameters(), lr=3e-3)
    source = OnlineStates(target, None)
    losses = []
    for _ in range(15):
        row = {k: v[None] for k, v in row_tensors(trained.resample(SAMPLES, 0), 70).items()}
        states = source.states(row["tokens"], row["positions"], row["sample_ids"])
        loss = trained(TrainingBatch(**row, features=states.features, last=states.last)).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
