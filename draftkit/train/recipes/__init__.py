"""The recipes: one file each, all with the interface of `draftkit.train.recipes.recipe`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draftkit.train.recipes.recipe import Recipe

# Name → module and class; imported on use, as most need torch and transformers.
RECIPES = {
    "eagle3": ("eagle3", "Eagle3"),
    "eagle": ("eagle", "Eagle"),
    "p-eagle": ("p_eagle", "PEagle"),
    "pard": ("pard", "Pard"),
    "mlp-speculator": ("mlp_speculator", "MlpSpeculator"),
    "draft-model": ("draft_model", "DraftModel"),
}


def recipe_class(name: str) -> type[Recipe]:
    """The class of a recipe, by a name of `RECIPES`."""
    module, attribute = RECIPES[name]
    return getattr(importlib.import_module(f"draftkit.train.recipes.{module}"), attribute)
