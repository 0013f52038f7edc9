"""Fake checkpoints in every published layout: the real names, keys and shapes, tiny sizes, random weights.

One module for each family. Every checkpoint here goes through the tests of `test_formats.py`: recognised, converted,
accounted for, and written back where its format has a way out.
"""

from __future__ import annotations

import importlib
import pkgutil

from published.checkpoint import Published


def all_published() -> dict[str, Published]:
    """Every fake checkpoint by name."""
    found: dict[str, Published] = {}
    for module in pkgutil.iter_modules(__path__):
        if module.name not in ("checkpoint", "layers"):
            for published in importlib.import_module(f"{__name__}.{module.name}").PUBLISHED:
                assert published.name not in found, published.name
                found[published.name] = published
    return found
