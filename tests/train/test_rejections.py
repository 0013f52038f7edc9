"""On-policy steps: what counts more is exactly what serving rejected, and a run with them can be resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fixtures.checkpoints.zoo_models import requests
from fixtures.precision import assert_close
from test_chain_recipes import DEPTH, K, batch_of, dflash, eagle3, target
from test_train import assert_same, config, data, weights  # noqa: F401
from test_train import target as pico_folder  # noqa: F401
from torch import Tensor
from transformers import PreTrainedModel

from draftkit.data.packing import row_tensors
from draftkit.data.samples import Sample
from draftkit.data.states.online import OnlineStates, load_training_target
from draftkit.errors import DraftkitError
from draftkit.loading import load_drafter, load_model, open_draft
from draftkit.requests import Request
from draftkit.runtime.engine import Engine
from draftkit.targets.target import Target
from draftkit.train.batch import TrainingBatch
from draftkit.train.checkpoint import draft_in_memory
from draftkit.train.config import read_config
from draftkit.train.on_policy import RejectionStage
from draftkit.train.recipes.bases.dflash import BlockRecipe
from draftkit.train.recipes.dflash import DFlash, DFlashOptions
from draftkit.train.recipes.eagle_eagle3 import Eagle3, Eagle3Options
from draftkit.train.recipes.recipe import Origin, Recipe
from draftkit.train.run import train_draft
from draftkit.train.settings import OnPolicy, Validation

torch.set_num_threads(1)
WEIGHT = 5.0
NEW = 24  # tokens of an answer


@pytest.fixture(scope="module")
def zoo() -> PreTrainedModel:
    return load_training_target("zoo:target", device="cpu", dtype=torch.float32)


def started(name: str, zoo: PreTrainedModel) -> Recipe:
    if name == "eagle3":
        with open_draft("zoo:eagle3", "zoo:target") as draft:
            return Eagle3.start(Origin(zoo, draft), Eagle3Options())
    torch.manual_seed(0)
    return DFlash.start(Origin(zoo), DFlashOptions(block_size=K + 1, num_layers=1))


def asked() -> list[Sample]:
    """Prompts with answers that are not the target's, one of them after an earlier turn, and one that asks nothing."""
    samples = [Sample.of(r.id, [*r.prompt, *[7] * NEW], [(len(r.prompt), len(r.prompt) + NEW)]) for r in requests()[:3]]
    begin = len(requests()[3].prompt)
    two = Sample.of("two", [*requests()[3].prompt, *[7] * NEW], [(begin - 4, begin - 2), (begin, begin + NEW - 3)])
    return [*samples, two, Sample.of("none", [5, 6, 7], [(0, 3)])]


def batch_on(zoo: PreTrainedModel, recipe: Recipe, samples: list[Sample], size: int) -> TrainingBatch:
    row = {name: tensor[None] for name, tensor in row_tensors(samples, size).items()}
    states = OnlineStates(zoo, recipe.aux_layers).states(row["tokens"], row["positions"], row["sample_ids"])
    return TrainingBatch(**row, features=states.features, last=states.last)


def stage_of(zoo: PreTrainedModel, **validation: object) -> RejectionStage:
    settings = OnPolicy(share=1.0, weight=WEIGHT)
    return RejectionStage(settings, Validation(k=K, **validation), zoo, seed=3)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_what_counts_more_is_what_serving_rejected(name: str, zoo: PreTrainedModel) -> None:
    recipe, samples = started(name, zoo), asked()
    size = sum(map(len, samples)) + 5
    stage = stage_of(zoo)
    attention = zoo.config._attn_implementation
    served = stage.serve(recipe.train(), samples, step=0)
    assert (recipe.training, zoo.config._attn_implementation) == (True, attention)
    found = stage.weights(served, size)

    # The same requests on the draft's checkpoint, one after the other.
    model, _ = load_model("zoo:target", device="cpu", dtype=torch.float32)
    drafter = load_drafter(draft_in_memory(recipe.spec, recipe.tensors(), target="zoo:target"), model)
    engine = Engine(Target(model, drafter.aux_layers), drafter, num_speculative_tokens=K, num_slots=1)
    expected, begin, rounds = torch.ones(K, size), 0, 0
    for sample, after in zip(samples, served.samples, strict=True):
        if sample.id == "none":
            assert after is sample
            continue
        first, last = sample.spans[-1]
        (generation,) = engine.generate([Request("x", tuple(sample.tokens[:first].tolist()), last - first)])
        text = [*generation.request.prompt, *generation.tokens]
        assert after.tokens.tolist() == text
        assert after.spans == [*sample.spans[:-1], (first, len(text))]
        for r in generation.rounds:
            at = r.position + r.accepted  # where the first draft that did not stand would be
            if r.accepted < r.drafted and at < len(text):
                assert r.proposal[r.accepted] != text[at]
                assert r.proposal[: r.accepted] == tuple(text[r.position : at])
                expected[r.accepted, begin + r.position - 2] = WEIGHT
                rounds += 1
        begin += len(text)
    assert rounds > 10
    assert torch.equal(found, expected)
    # At temperature 0 rounds simulated on that text find the same places, those of the earlier turn besides.
    batch = batch_on(zoo, recipe, served.samples, size)
    simulated = stage.simulated_weights(recipe, batch, step=0)
    answers = torch.ones(size, dtype=torch.bool)
    start = sum(len(sample) for sample in served.samples[:3])
    answers[start : start + len(requests()[3].prompt) - 2] = False
    answers[start + len(served.samples[3]) :] = False
    assert torch.equal(simulated[:, answers] > 1, expected[:, answers] > 1)
    assert bool((found[: len(batch.drafted(K))][~batch.drafted(K)] == 1).all())  # every one is trained on


@pytest.mark.slow
def test_at_a_temperature_the_seed_decides(zoo: PreTrainedModel) -> None:
    recipe, samples = started("eagle3", zoo), asked()[:2]
    stage = stage_of(zoo, mode="sampled", temperature=1.0)
    one, same, other = (stage.serve(recipe, samples, step=step) for step in (1, 1, 2))
    texts = [[sample.tokens.tolist() for sample in served.samples] for served in (one, same, other)]
    assert texts[0] == texts[1] != texts[2]
    assert one.rejected == same.rejected
    assert 20 < sum(stage_share(0.3).due(step) for step in range(100)) < 40


def stage_share(share: float) -> RejectionStage:
    return RejectionStage(OnPolicy(share=share), Validation(), target(), seed=0)


def counted_alone(recipe: Recipe, batch: TrainingBatch, step: int, anchor: int) -> Tensor:
    """The loss where nothing but one draft counts."""
    alone = torch.zeros(K, batch.tokens.shape[1])
    alone[step, anchor] = 1.0
    return recipe(batch._replace(weights=alone)).loss.detach()


@pytest.mark.parametrize("make", [eagle3(steps=K), dflash(dpace=None)], ids=["eagle3", "dflash"])
def test_the_loss_is_a_mean_with_these_weights(make: object, tmp_path: Path) -> None:
    recipe: Recipe = make(tmp_path)  # type: ignore[operator]
    batch = batch_of(recipe)
    drafted = batch.drafted(K)
    slots = drafted.nonzero().tolist()
    generator = torch.Generator().manual_seed(0)
    given = torch.where(torch.rand(drafted.shape, generator=generator) < 0.3, WEIGHT, 1.0)
    each = torch.zeros(drafted.shape)
    for step, anchor in slots:
        each[step, anchor] = counted_alone(recipe, batch, step, anchor)
    if isinstance(recipe, BlockRecipe):
        factors = torch.exp(-torch.arange(K) / recipe.options.decay_length)[:, None] * given * drafted
        expected = (each * factors).sum() / factors.sum()
    else:  # each step is a mean of its own; alone, it is one with its factor
        expected = (each * given * drafted).sum(1).div((given * drafted).sum(1)).sum()
    assert_close(recipe(batch._replace(weights=given)).loss, expected, depth=DEPTH)
    assert torch.equal(recipe(batch._replace(weights=torch.ones(2, len(batch.tokens[0])))).loss, recipe(batch).loss)


def test_blocks_stand_at_rejections_first(tmp_path: Path) -> None:
    recipe = dflash(max_anchors=1)(tmp_path)
    batch = batch_of(recipe)
    for anchor in batch.drafted(K)[0].nonzero()[:, 0].tolist():
        heavy = torch.ones(K, batch.tokens.shape[1])
        heavy[0, anchor] = WEIGHT
        whole = torch.zeros_like(heavy)
        whole[:, anchor] = heavy[:, anchor]
        every = dflash(max_anchors=None)(tmp_path / str(anchor))
        every.load(recipe.tensors())
        expected = every(batch._replace(weights=whole)).loss
        assert_close(recipe(batch._replace(weights=heavy)).loss, expected, depth=DEPTH)


STAGE = {"on_policy.share": 0.6, "validation.k": 3}


@pytest.mark.long
@pytest.mark.parametrize("rounds", ["decoded", "simulated"])
def test_a_run_is_resumed_bit_for_bit(rounds: str, pico_folder: Path, data: Path, tmp_path: Path) -> None:  # noqa: F811
    more = STAGE | {"on_policy.rounds": rounds, "keep": 0}
    train_draft(config(pico_folder, data, tmp_path / "whole", **more))
    train_draft(config(pico_folder, data, tmp_path / "plain"))
    whole = weights(tmp_path / "whole" / "checkpoint-8")
    unlike = weights(tmp_path / "plain" / "checkpoint-8")
    assert any(not torch.equal(whole[name], unlike[name]) for name in whole)
    (tmp_path / "whole" / "checkpoint-8" / "trainer_state.json").unlink()  # as if killed before it was complete
    train_draft(config(pico_folder, data, tmp_path / "whole", **more), resume=True)
    assert_same(weights(tmp_path / "whole" / "checkpoint-8"), whole)


def test_what_cannot_be_is_refused(pico_folder: Path, data: Path, tmp_path: Path) -> None:  # noqa: F811
    flags = {"recipe": "mlp-speculator", "target": "t", "data": "d", "out": "o", "on_policy": {}}
    with pytest.raises(
        DraftkitError, match=r"recipe mlp-speculator has no on-policy steps\n.*dflash, dflash2, dspark, eagle3"
    ):
        read_config(None, [], flags)
    run = config(pico_folder, data, tmp_path / "run", **STAGE, states=str(tmp_path / "states"))
    with pytest.raises(DraftkitError, match=r"on_policy\.rounds=decoded"):
        train_draft(run)
    assert not (tmp_path / "run").exists()
