"""Recipes of block drafters: their losses written out, their weights, and going on from other drafts."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fixtures.precision import assert_close
from test_chain_recipes import (
    DEPTH,
    RECIPES,
    K,
    V,
    batch_of,
    dflash,
    dflash2,
    dspark,
    finite,
    packed,
    same_gradients,
    saved,
    shaken,
    target,
    trained,
    vocabulary,
)
from torch import Tensor
from torch.nn.functional import binary_cross_entropy

from draftkit.errors import DraftkitError, LayoutError
from draftkit.layout.families.dflash import DFlashSpec
from draftkit.layout.folder import Draft, read_draft
from draftkit.layout.spec import DraftSpec
from draftkit.loading import open_draft
from draftkit.train.batch import TrainingBatch
from draftkit.train.checkpoint import save_draft
from draftkit.train.recipes.bases.dflash import BlockRecipe, default_layers
from draftkit.train.recipes.dflash import DFlash, DFlashOptions
from draftkit.train.recipes.dflash_dflash2 import DFlash2, DFlash2Options
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
        (dflash(dpace=None, decay_length=GAMMA), {"ce": 1.0}),
        (dflash(dpace=None, decay_length=GAMMA, loss="tv"), {"tv": 1.0}),
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


def test_drafts_weigh_by_their_effect_on_the_accepted_length(tmp_path: Path) -> None:
    alpha = 0.4
    recipe = recipe_of(dflash(dpace=alpha), tmp_path)
    batch = batch_of(recipe)
    drafted = batch.drafted(K)
    p, q = taught(batch), trained(recipe, batch).detach().softmax(-1)
    ce = losses("ce", p, q)
    weights = torch.zeros(drafted.shape)
    for anchor in range(drafted.shape[1]):
        rows = int(drafted[:, anchor].sum())
        right = [(1 - alpha) * float(torch.exp(-ce[t, anchor])) + alpha for t in range(rows)]
        for t in range(rows):
            weights[t, anchor] = sum(math.prod(right[: m + 1]) for m in range(t, rows))
    assert_close(recipe(batch).loss, (ce * weights).sum() / weights.sum(), depth=DEPTH)


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


@pytest.mark.parametrize("own_head", [False, True], ids=["the target's head", "a head of its own"])
def test_the_selector_learns_to_choose_among_the_candidates_of_serving(own_head: bool, tmp_path: Path) -> None:
    recipe = recipe_of(dflash2(decay_length=GAMMA, selector_weight=0.5, train_head=own_head), tmp_path)
    if own_head:  # as of a checkpoint that has one
        spec = replace(recipe.draft.spec, lm_head="draft")
        draft = saved_as(spec, recipe.tensors() | {"lm_head.weight": target().lm_head.weight}, tmp_path / "draft")
        recipe = recipe_of(lambda _: DFlash2.start(Origin(target(), draft), recipe.options), tmp_path)
        assert "lm_head.weight" in {name for name, p in recipe.draft.named_parameters() if p.requires_grad}
    batch = batch_of(recipe)
    drafted = batch.drafted(K)
    rows = recipe.rows(batch, drafted[0].nonzero()[:, 0], K)
    selector = recipe.draft.candidate_selector
    assert selector is not None
    p = taught(batch)[rows.steps, rows.anchors]
    logits = recipe.draft.logits(rows.output)
    candidates = logits.topk(selector.top_k).indices
    before = batch.tokens[0, rows.anchors + 1 + rows.steps]
    scores = logits.gather(1, candidates) + selector(before, candidates, rows.output)
    right = p.gather(1, candidates).argmax(1, keepdim=True)
    assert (candidates.gather(1, right)[:, 0] != p.argmax(1)).any()  # in some rows, which learn all the same
    each = losses("ce", p, logits.softmax(-1)) - 0.5 * scores.log_softmax(-1).gather(1, right)[:, 0]
    weights = drafted[rows.steps, rows.anchors] * torch.exp(-rows.steps / GAMMA)
    expected = (each * weights).sum() / weights.sum()
    outcome = recipe(batch)
    assert_close(outcome.loss, expected, depth=DEPTH)
    same_gradients(recipe, outcome.loss, expected)


def test_dflash2_starts_where_its_dflash_ended(tmp_path: Path) -> None:
    """And goes on from itself."""
    first = recipe_of(dflash(), tmp_path)
    options = DFlash2Options(selector_rank=8)
    second = DFlash2.start(Origin(target(), saved(first, tmp_path / "first")), options)
    assert isinstance(second, DFlash2)
    batch = packed(second.draft.spec.feature_size)
    expected, found = trained(first, batch), trained(second, batch)
    assert_close(finite(found), torch.where(found > -torch.inf, expected, 0), depth=DEPTH)
    assert_close(found.max(-1).values, expected.max(-1).values, depth=DEPTH)
    again = saved(shaken(second), tmp_path / "second")
    assert again.spec.architecture.method == "dflash2"
    third = DFlash2.start(Origin(target(), again), options)
    torch.testing.assert_close(third.tensors(), second.tensors(), rtol=0, atol=0)


def fresh_dflash2(**options: object) -> Recipe:
    return DFlash2.start(Origin(target()), DFlash2Options(**options))  # type: ignore[arg-type]


def test_dflash2_has_every_token_and_a_selector(tmp_path: Path) -> None:
    reduced = saved(recipe_of(dflash(d2t_ids=True), tmp_path), tmp_path / "reduced")
    for origin in (Origin(target(), d2t_ids=vocabulary()), Origin(target(), reduced)):
        with pytest.raises(DraftkitError, match="a draft vocabulary"):
            DFlash2.start(origin, DFlash2Options(mask_token_id=V - 1, layers=(2, 5)))
    with pytest.raises(LayoutError, match=f"selector_top_k is {V + 1}\n.*at most the {V} tokens"):
        fresh_dflash2(mask_token_id=V - 1, layers=(2, 5), selector_top_k=V + 1)
    recipe = recipe_of(dflash2(), tmp_path)
    tensors = {name: tensor for name, tensor in recipe.tensors().items() if "selector" not in name}
    without = saved_as(replace(recipe.draft.spec, selector=None), tensors, tmp_path / "without")
    with pytest.raises(DraftkitError, match="convolutions but no selector"):
        DFlash2.start(Origin(target(), without), DFlash2Options())


def test_capped_logits_are_refused(tmp_path: Path) -> None:
    recipe = recipe_of(dflash(), tmp_path)
    capped = saved_as(replace(recipe.draft.spec, logit_softcap=30.0), recipe.tensors(), tmp_path / "capped")
    with pytest.raises(DraftkitError, match=r"caps its logits at 30\.0"):
        DFlash.start(Origin(target(), capped), DFlashOptions())


def saved_as(spec: DFlashSpec, tensors: dict[str, Tensor], folder: Path) -> Draft:
    save_draft(folder, DraftSpec(architecture=spec, dtype="F32"), tensors, target="")
    return read_draft(folder)


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
    for recipe, options in ((DFlash, DFlashOptions()), (DSpark, DSparkOptions()), (DFlash2, DFlash2Options())):
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
