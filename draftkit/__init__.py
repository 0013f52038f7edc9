"""draftkit: convert, train, measure and explain draft models for speculative decoding.

The public API is imported on first use, so that `import draftkit` stays cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from draftkit.version import __version__

if TYPE_CHECKING:
    from draftkit.convert.api import convert_checkpoint, inspect_checkpoint
    from draftkit.doctor.diagnose import diagnose_draft
    from draftkit.evaluate.evaluate import evaluate_draft
    from draftkit.loading import open_draft as load_draft
    from draftkit.publish import push_draft
    from draftkit.train.run import train_draft

__all__ = [
    "__version__",
    "convert_checkpoint",
    "diagnose_draft",
    "evaluate_draft",
    "inspect_checkpoint",
    "load_draft",
    "push_draft",
    "train_draft",
]

_HOMES = {
    "convert_checkpoint": ("draftkit.convert.api", "convert_checkpoint"),
    "inspect_checkpoint": ("draftkit.convert.api", "inspect_checkpoint"),
    "diagnose_draft": ("draftkit.doctor.diagnose", "diagnose_draft"),
    "evaluate_draft": ("draftkit.evaluate.evaluate", "evaluate_draft"),
    "load_draft": ("draftkit.loading", "open_draft"),
    "push_draft": ("draftkit.publish", "push_draft"),
    "train_draft": ("draftkit.train.run", "train_draft"),
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'draftkit' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(module), attribute)
