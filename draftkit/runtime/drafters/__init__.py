"""The drafters: a file for each family, all with the protocol of `draftkit.runtime.drafters.protocol`."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from types import ModuleType

from draftkit.engines.vllm.accepts import refusal_by_vllm
from draftkit.errors import LayoutError
from draftkit.layout.folder import Draft
from draftkit.layout.spec import DraftSpec


def refusal_to_run(spec: DraftSpec) -> str | None:
    """What a draft is that draftkit's own runtime has no drafter for; None of all others."""
    known = find_spec(f"{__name__}.{spec.architecture.family}") is not None
    what = spec.architecture.not_run if known else spec.architecture.title
    return None if what is None else f"{what}; draftkit cannot run it yet"


def check_runs(draft: Draft) -> None:
    """Raise `LayoutError`, which calls the draft by its name, where draftkit's own runtime has no drafter for it."""
    if reason := refusal_to_run(draft.spec):
        by_vllm = refusal_by_vllm(draft.spec) is None
        elsewhere = "draftkit convert writes it back in the layout it came from, for the engines that run it"
        hint = "draftkit eval --engine vllm measures it through vLLM" if by_vllm else elsewhere
        raise LayoutError(reason, where=draft.path, hint=hint)


def family_of(draft: Draft) -> ModuleType:
    """The file of a draft's family. Raises `LayoutError` where there is none.

    `load_drafter(draft, target, tokenizer)` makes its drafter. `slot_bytes(draft, dtype)` tells from facts and
    configurations what that will keep of a slot.
    """
    check_runs(draft)
    return importlib.import_module(f"{__name__}.{draft.spec.architecture.family}")
