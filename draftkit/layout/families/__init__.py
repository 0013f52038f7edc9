"""The families of drafts: one file each, found by being here."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftkit.layout.architecture import Architecture


@functools.cache
def family_names() -> tuple[str, ...]:
    """The names of the families' files: `eagle`, `causal_lm`, ... None is imported."""
    return tuple(module.name for module in pkgutil.iter_modules(__path__))


@functools.cache
def families() -> dict[str, type[Architecture]]:
    """The class of every family's facts, by its name in a spec: `eagle`, `causal-lm`, ..."""
    from draftkit.layout.architecture import Architecture

    return {name.replace("_", "-"): class_in(f"{__name__}.{name}", Architecture) for name in family_names()}


def name_of_file(file: str) -> str | None:
    """The name that users have for one of several files of a family, as recipes of training: the suffix of
    `FAMILY_SUFFIX`, or the family where there is none. None for a file that is not named after a family."""
    for family in family_names():
        if file == family or file.startswith(f"{family}_"):
            return (file.removeprefix(family).removeprefix("_") or family).replace("_", "-")
    return None


def named(source: str) -> Architecture | None:
    """The draft without a checkpoint that a user's words name, as `ngram:2-4`; None for any other source.

    Raises `DraftkitError` for a name that says what its family cannot.
    """
    found = (cls.named(source) for cls in families().values())
    return next((architecture for architecture in found if architecture is not None), None)


def class_in(module: str, base: type) -> type[Any]:
    """The one class that a module, imported for it, defines of a kind."""
    values = vars(importlib.import_module(module)).values()
    (found,) = (cls for cls in values if inspect.isclass(cls) and issubclass(cls, base) and cls.__module__ == module)
    return found
