"""The drafters: a file for each family, all with the protocol of `draftkit.runtime.drafters.protocol`."""

from __future__ import annotations

import importlib
from types import ModuleType

from draftkit.layout.folder import Draft


def family_of(draft: Draft) -> ModuleType:
    """The file of a draft's family.

    `load_drafter(draft, target, tokenizer)` makes its drafter. `slot_bytes(draft, dtype, capacity, k)` is
    what that will keep of a slot (`Drafter.slot_bytes`), told from facts and configurations.
    """
    return importlib.import_module(f"{__name__}.{draft.spec.architecture.family}")
