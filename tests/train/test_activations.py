"""What a step keeps is told from forwards of a few tokens, as that of a whole row finds it."""

from __future__ import annotations

import pytest
import torch
from fixtures.checkpoints import pico

from draftkit.io.records import from_dict, to_dict
from draftkit.train import activations
from draftkit.train.activations import kept_activations
from draftkit.train.recipes import recipe_class
from draftkit.train.recipes.recipe import Origin, Recipe
from draftkit.train.setup import recompute_activations

torch.set_num_threads(1)
OPTIONS: dict[str, dict[str, object]] = {
    "eagle3": {"steps": 3, "layers": [1, 3, 5]},
    "dflash": {"block_size": 4, "mask_token_id": 5, "layers": [1, 3]},
    "draft-model": {},
}
VOCABULARY = 256


def started(name: str, **more: object) -> Recipe:
    kind = recipe_class(name)
    options = from_dict(kind.options_type, to_dict(kind.options_type()) | OPTIONS[name] | more, "here")
    return kind.start(Origin(pico.llama(num_hidden_layers=6)), options)


def told(recipe: Recipe, tokens: int, most: int | None = None, precision: torch.dtype = torch.float32) -> int:
    return kept_activations(
        recipe, width=pico.HIDDEN, vocab_size=VOCABULARY, tokens=tokens, precision=precision, most_anchors=most
    )


def found(recipe: Recipe, tokens: int) -> int:
    """What a whole row keeps, all of it drafted."""
    return activations._kept(recipe, activations._row(recipe, pico.HIDDEN, VOCABULARY, tokens, tokens))


@pytest.mark.parametrize("name", OPTIONS)
def test_a_row_keeps_what_is_told(name: str) -> None:
    """But for masks, which on a CPU have a number for each pair of tokens up to some thousands."""
    recipe = started(name)
    assert told(recipe, 64) == pytest.approx(found(recipe, 64), rel=0.02)
    assert told(recipe, 192) == pytest.approx(found(recipe, 192), rel=0.15)


def test_it_grows_with_tokens_up_to_the_anchors() -> None:
    for recipe in (started("eagle3"), started("draft-model")):
        assert told(recipe, 32768) == pytest.approx(32 * told(recipe, 1024), rel=0.03)
    blocks = started("dflash", max_anchors=100)
    grown = [told(blocks, size, 100) for size in (100, 1100, 2100)]
    assert grown[2] - grown[1] == pytest.approx(grown[1] - grown[0], rel=0.02)
    assert told(blocks, 2100, 100) < told(blocks, 2100) / 3


def test_recomputing_and_rounding_keep_less() -> None:
    recipe = started("eagle3")
    whole = told(recipe, 4096)
    assert told(recipe, 4096, precision=torch.bfloat16) < 0.8 * whole
    recompute_activations(recipe.draft)
    assert told(recipe, 4096) < 0.8 * whole
