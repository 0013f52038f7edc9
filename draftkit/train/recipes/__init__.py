"""The recipes, all with the interface of `draftkit.train.recipes.recipe`; found by being here.

A file is named after the family of the drafts that it trains, with a suffix where the family has several recipes. Users
name them by the suffix, or by the family where there is none: `eagle`, `eagle_eagle3` → `eagle3`.
"""

from __future__ import annotations

import functools
import pkgutil
from typing import TYPE_CHECKING

from draftkit.layout.families import class_in, name_of_file

if TYPE_CHECKING:
    from draftkit.train.recipes.recipe import Recipe


@functools.cache
def recipe_names() -> tuple[str, ...]:
    """Every recipe, as users name it. No recipe is imported, as most need torch and transformers."""
    return tuple(sorted(_files()))


def recipe_class(name: str) -> type[Recipe]:
    """The class of a recipe, by a name of `recipe_names`."""
    from draftkit.train.recipes.recipe import Recipe

    return class_in(f"{__name__}.{_files()[name]}", Recipe)


@functools.cache
def _files() -> dict[str, str]:
    files = (module.name for module in pkgutil.iter_modules(__path__))
    return {name: file for file in files if (name := name_of_file(file)) is not None}
