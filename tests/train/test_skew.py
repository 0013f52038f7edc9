"""The skew report: none where there is none, and the cause of each planted one by its name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fixtures.checkpoints import memorized
from fixtures.checkpoints.zoo_models import requests
from torch import Tensor
from transformers import PreTrainedModel

from draftkit.data.packing import row_tensors
from draftkit.data.samples import Sample
from draftkit.data.states.online import OnlineStates, States, load_training_target
from draftkit.layout.facts import with_facts
from draftkit.loading import open_draft
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.engine import Engine
from draftkit.targets.states import AuxLayers
from draftkit.targets.target import Target
from draftkit.train.batch import TrainingBatch
from draftkit.train.checkpoint import save_draft
from draftkit.train.recipes.eagle_eagle3 import Eagle3, Eagle3Options
from draftkit.train.recipes.recipe import Origin, Recipe
from draftkit.train.skew import Skew, measure_skew

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return load_training_target("zoo:target", device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def answers(target: PreTrainedModel) -> list[Sample]:
    """The target's own greedy answers."""
    target.set_attn_implementation(ATTENTION)
    generations = Engine(Target(target), None, num_speculative_tokens=0, num_slots=6).generate(requests()[:6])
    target.set_attn_implementation("sdpa")
    return [
        Sample.of(g.request.id, [*g.request.prompt, *g.tokens], [(len(g.request.prompt), g.length)])
        for g in generations
    ]


def recipe(target: PreTrainedModel) -> Eagle3:
    with open_draft("zoo:eagle3", "zoo:target") as draft:
        return Eagle3.start(Origin(target, draft), Eagle3Options())


def states(target: PreTrainedModel, layers: tuple[int, ...]) -> Callable[[Sample], States]:
    source = OnlineStates(target, AuxLayers(layers))

    def states_of(sample: Sample) -> States:
        row = row_tensors([sample], len(sample))
        return source.states(*(row[name][None] for name in ("tokens", "positions", "sample_ids")))

    return states_of


def skew(
    target: PreTrainedModel, answers: list[Sample], trained: Recipe, layers: tuple[int, ...] | None = None
) -> Skew:
    assert trained.aux_layers is not None

    def save(out: Path, tensors: dict[str, Tensor]) -> None:
        save_draft(out, trained.spec, tensors, target="zoo:target")

    states_of = states(target, layers or trained.aux_layers.states)
    return measure_skew(
        trained, answers, target, states_of=states_of, save_draft=save, k=4, mode="greedy", temperature=0.0
    )


@pytest.mark.slow
def test_without_a_fault_there_is_no_gap(target: PreTrainedModel, answers: list[Sample]) -> None:
    found = skew(target, answers, recipe(target))
    assert found.simulated == found.decoded
    assert found.closed
    assert found.causes == ()


@pytest.mark.slow
def test_other_layers(target: PreTrainedModel, answers: list[Sample]) -> None:
    (cause,) = skew(target, answers, recipe(target), (3, 5, 7)).causes
    assert cause.name == "states"
    assert "after 2 layers differ by" in cause.message


@pytest.mark.slow
def test_another_rope_base(target: PreTrainedModel, answers: list[Sample]) -> None:
    trained = recipe(target)
    trained.draft.rotary.inv_freq.pow_(1.2)
    (cause,) = skew(target, answers, trained).causes
    assert cause.name == "rope"


@pytest.mark.slow
@pytest.mark.parametrize("shift", [-1, 1])
def test_a_shifted_mask(
    shift: int, target: PreTrainedModel, answers: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Published trainers leave it unshifted and never train the first chain after a prompt."""
    drafted = TrainingBatch.drafted

    def shifted(batch: TrainingBatch, k: int) -> Tensor:
        return drafted(batch, k).roll(shift, -1)

    monkeypatch.setattr(TrainingBatch, "drafted", shifted)
    names = [cause.name for cause in skew(target, answers, recipe(target)).causes]
    assert names == ["mask"]


@pytest.mark.slow
def test_answers_of_another_model(target: PreTrainedModel, answers: list[Sample]) -> None:
    others = [Sample(a.id, a.tokens.copy(), a.loss_mask, a.category) for a in answers]
    for other in others:
        begin, end = other.spans[0]
        other.tokens[begin:end] = other.tokens[begin:end][::-1]
    (cause,) = skew(target, others, recipe(target)).causes
    assert cause.name == "text"
    assert "answers are not the target's greedy ones" in cause.message


@pytest.mark.slow
def test_a_norm_that_serving_does_not_know(target: PreTrainedModel, answers: list[Sample]) -> None:
    trained = recipe(target)
    trained.draft.layers[0].norm_before_residual = True
    (cause,) = skew(target, answers, trained).causes
    assert cause.name == "draft"


@pytest.mark.long
def test_a_block_drafter_without_a_fault_has_no_gap(target: PreTrainedModel, answers: list[Sample]) -> None:
    found = skew(target, answers, memorized.fill_in_dspark())
    assert found.simulated == found.decoded
    assert found.simulated.mean > 1.1
    assert found.causes == ()


@pytest.mark.slow
def test_a_block_drafter_whose_checkpoint_says_something_else(target: PreTrainedModel, answers: list[Sample]) -> None:
    trained = copy.copy(memorized.fill_in_dspark())
    other = with_facts(trained.spec.architecture, slots="anchor-first", block_size=4)
    trained.spec = replace(trained.spec, architecture=other)
    (cause,) = skew(target, answers, trained).causes
    assert cause.name == "facts"
    assert "slots is fill-in in training and anchor-first in the checkpoint" in cause.message
    assert "block_size is 5 in training and 4 in the checkpoint" in cause.message


@pytest.mark.slow
def test_rows_of_a_block_that_see_no_later_ones_in_training(target: PreTrainedModel, answers: list[Sample]) -> None:
    trained = copy.deepcopy(memorized.fill_in_dspark())
    trained.draft.layers[0].sight["bidirectional"] = False
    (cause,) = skew(target, answers, trained).causes
    assert cause.name == "draft"
