"""What may be wrong with a draft: each file here has experiments of one kind, found by being there.

A new suspicion is one function marked with `@experiment`. What only drafts of one family can have is in a file with the
family's name.
"""

from __future__ import annotations

import importlib
import pkgutil

from draftkit.doctor.trial import Experiment


def all_experiments() -> tuple[Experiment, ...]:
    """The experiments of every file."""
    modules = [importlib.import_module(f"{__name__}.{name}") for _, name, _ in pkgutil.iter_modules(__path__)]
    return tuple(value for module in modules for value in vars(module).values() if isinstance(value, Experiment))
