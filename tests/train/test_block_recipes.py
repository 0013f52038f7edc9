"""Recipes of block drafters: their losses written out, their weights, and going on from other drafts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from fixtures.precision import assert_close
from test_chain_recipes import DEPTH, RECIPES, K, V, batch_of, dflash, dspark, packed, saved, shaken, target, trained
from torch import Tensor
from torch.nn.functional import binary_cross_entropy

from draftkit.errors import DraftkitError
from draftkit.loading import open_draft
from draftkit.train.batch import TrainingBatch
from draftkit.train.recipes.bases.dflash import BlockRecipe, default_layers
from draftkit.train.recipes.dflash import DFlash, DFlashOptions
from draftkit.train.recipes.dflash_dspark import DSpark, DSparkOptions
from draftkit.train.recipes.recipe import Origin, Recipe

GAMMA = 3.0


def recipe_of(make: object, folder: Path) -> BlockRecipe:
    recipe = make(folder)  # type: ignore[operator]
    assert isinstance(recipe, BlockRecipe)
    return recipe


def taught(batch: TrainingBatch) -> Tensor:
    """The target's distributions [K, N, V] at the places of the drafts."""
    p = (batch.last[0] @ target().lm_head.weight.T).softmax(-1)
    return torch.stack([p.roll(-1 - t, 0) for t in range(K)])


def losses(name: str, p: Tensor, q: Tensor) -> Tensor:
    if name == "ce":
        return -q.gather(-1, p.argmax(-1, keepdim=True))[..., 0].log()
    return 1 - torch.minimum(p, q).sum(-1)


@pytest.mark.parametrize(
    ("make", "terms"),
    [
        (dflash(decay_length=GAMMA), {"ce": 1.0}),
        (dflash(decay_length=GAMMA, loss="tv"), {"tv": 1.0}),
        (dspark(decay_length=GAMMA, confidence=False), {"ce": 0.1, "tv": 1.8}),
    ],
    ids=["dflash", "dflash, tv", "dspark"],
)
def test_the_loss_is_the_weighted_mean_over_all_rows(make: object, terms: dict[str, float], tmp_path: Path) -> None:
    recipe, batch = recipe_of(make, tmp_path), batch_of(recipe_of(make, tmp_path))
    drafted = batch.drafted(K)
    p, q = taught(batch), trained(recipe, batch).detach().softmax(-1)
    each = sum(weight * losses(name, p, q) for name, weight in terms.items())
    weights = drafted * torch.exp(-torch.arange(K) / GAMMA)[:, None]
    assert_close(recipe(batch).loss, (each * weights).sum() / weights.sum(), depth=DEPTH)


def test_drafts_weigh_by_their_effect_on_the_accepted_length_or_the_chance_to_be_reached(tmp_path: Path) -> None:
    alpha = 0.4
    recipes = {name: recipe_of(dflash(**{name: alpha}), tmp_path) for name in ("dpace", "reached")}
    batch = batch_of(recipes["dpace"])
    drafted = batch.drafted(K)
    p, q = taught(batch), trained(recipes["dpace"], batch).detach().softmax(-1)
    ce = losses("ce", p, q)
    weights = {name: torch.zeros(drafted.shape) for name in recipes}
    for anchor in range(drafted.shape[1]):
        rows = int(drafted[:, anchor].sum())
        right = [(1 - alpha) * float(torch.exp(-ce[t, anchor])) + alpha for t in range(rows)]
        for t in range(rows):
            weights["reached"][t, anchor] = math.prod(right[:t])
            weights["dpace"][t, anchor] = sum(math.prod(right[: m + 1]) for m in range(t, rows))
    for name, recipe in recipes.items():
        assert_close(recipe(batch).loss, (ce * weights[name]).sum() / weights[name].sum(), depth=DEPTH)


def test_drafts_weigh_by_one_of_them() -> None:
    with pytest.raises(DraftkitError, match=r"options.dpace and options.reached"):
        DFlash.start(Origin(target()), DFlashOptions(mask_token_id=V - 1, dpace=0.5, reached=0.5))


def test_a_draft_of_another_kind_is_refused_by_its_name() -> None:
    """Not by that of the folder that it was converted into, which is gone."""
    with (
        pytest.raises(DraftkitError, match=r"(?s)of the kind dspark.*where: zoo:dspark\n"),
        open_draft("zoo:dspark", "zoo:target") as draft,
    ):
        DFlash.start(Origin(target(), draft), DFlashOptions())


def test_confidence_learns_the_chance_of_acceptance(tmp_path: Path) -> None:
    without = recipe_of(dspark(confidence_weight=0.0), tmp_path)
    recipe = recipe_of(dspark(confidence_weight=2.0), tmp_path)
    batch = batch_of(recipe)
    drafted = batch.drafted(K)
    rows = recipe.rows(batch, drafted[0].nonzero()[:, 0], K)
    assert rows.confidence is not None
    estimate = torch.zeros(drafted.shape).index_put_((rows.steps, rows.anchors), rows.confidence.detach().sigmoid())
    alpha = torch.minimum(taught(batch), trained(recipe, batch).detach().softmax(-1)).sum(-1)
    weights = drafted * torch.exp(-torch.arange(K) / recipe.options.decay_length)[:, None]
    each = binary_cross_entropy(estimate, alpha.clamp(0, 1), reduction="none")
    expected = without(batch).loss + 2 * (each * weights).sum() / weights.sum()
    assert_close(recipe(batch).loss, expected, depth=DEPTH)
    recipe(batch).loss.backward()
    body = recipe.draft.layers[0].self_attn.q_proj.weight.grad  # type: ignore[union-attr]
    without(batch).loss.backward()
    assert_close(body, without.draft.layers[0].self_attn.q_proj.weight.grad, depth=DEPTH)  # type: ignore[union-attr]


def test_blocks_stand_at_random_anchors(tmp_path: Path) -> None:
    """All of them in the long run, no more at a time than asked for, the same again from the same generator."""
    recipe = recipe_of(dflash(max_anchors=3), tmp_path)
    batch = batch_of(recipe)
    possible = set(batch.drafted(K)[0].nonzero()[:, 0].tolist())
    seen = []
    inner = recipe.rows

    def rows(batch: TrainingBatch, anchors: Tensor, k: int) -> object:
        seen.append(anchors.tolist())
        return inner(batch, anchors, k)

    recipe.rows = rows  # type: ignore[method-assign, assignment]
    for _ in range(60):
        recipe(batch)
    assert {len(anchors) for anchors in seen} == {3}
    assert set().union(*seen) == possible
    torch.manual_seed(3)
    recipe(batch)
    torch.manual_seed(3)
    recipe(batch)
    assert seen[-1] == seen[-2]


@pytest.mark.parametrize("slots", ["fill-in", "anchor-first"])
def test_dspark_starts_where_its_dflash_ended(slots: str, tmp_path: Path) -> None:
    size = K + 1 if slots == "fill-in" else K
    options = DSparkOptions(block_size=size, slots=slots, mask_token_id=V - 1, layers=(2, 5), confidence=False)
    first = shaken(DSpark.start(Origin(target()), options))
    assert isinstance(first, BlockRecipe)
    if slots == "fill-in":  # what DFlash's own recipe makes
        first = shaken(
            DFlash.start(Origin(target()), DFlashOptions(block_size=size, mask_token_id=V - 1, layers=(2, 5)))
        )
    draft = saved(first, tmp_path / "first")
    second = DSpark.start(Origin(target(), draft), DSparkOptions(markov_rank=8))
    assert isinstance(second, DSpark)
    assert second.draft.spec.slots == slots
    assert second.draft.spec.block_size == size
    batch = packed(second.draft.spec.feature_size)
    assert_close(trained(second, batch), trained(first, batch), depth=DEPTH)
    again = saved(second, tmp_path / "second")
    assert again.spec.architecture.method == "dspark"


def test_drafts_of_other_kinds_are_refused(tmp_path: Path) -> None:
    draft = saved(RECIPES["eagle3"](tmp_path), tmp_path / "eagle3")
    for recipe, options in ((DFlash, DFlashOptions()), (DSpark, DSparkOptions())):
        with pytest.raises(DraftkitError, match="the draft is of the kind eagle3"):
            recipe.start(Origin(target(), draft), options)


def test_default_layers() -> None:
    assert default_layers(36, 5) == (2, 10, 18, 26, 34)  # z-lab/Qwen3-8B-DFlash-b16, one more: states, not outputs
    assert default_layers(64, 5) == (2, 17, 32, 47, 62)
    assert default_layers(8, 1) == (5,)
    assert default_layers(4, 2) == (3,)


def test_no_gradient_reaches_what_is_borrowed(tmp_path: Path) -> None:
    recipe: Recipe = recipe_of(dspark(), tmp_path)
    recipe(batch_of(recipe)).loss.backward()
    assert target().lm_head.weight.grad is None
    assert target().get_input_embeddings().weight.grad is None
