"""The families of drafts: one file each, found by being here."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil

from draftkit.layout.architecture import Architecture


@functools.cache
def families() -> dict[str, type[Architecture]]:
    """The class of every family's facts, by its name in a spec: `eagle`, `causal-lm`, ..."""
    return {name.replace("_", "-"): _facts_class(name) for _, name, _ in pkgutil.iter_modules(__path__)}


def named(source: str) -> Architecture | None:
    """The draft without a checkpoint that a user's words name, as `ngram:2-4`; None for any other source.

    Raises `DraftkitError` for a name that says what its family cannot.
    """
    found = (cls.named(source) for cls in families().values())
    return next((architecture for architecture in found if architecture is not None), None)


def _facts_class(name: str) -> type[Architecture]:
    module = importlib.import_module(f"{__name__}.{name}")
    (found,) = (
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Architecture) and value.__module__ == module.__name__
    )
    return found
