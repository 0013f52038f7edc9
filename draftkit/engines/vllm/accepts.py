"""Which drafts vLLM 0.32 runs rightly."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path

from draftkit.errors import TargetError
from draftkit.io.tensors import gguf_file
from draftkit.layout.spec import DraftSpec


def refusal_by_vllm(spec: DraftSpec, layout: str = "unified") -> str | None:
    """Why vLLM 0.32 must not load this draft (it would, and run it wrongly without a word), or None.

    `layout`: that of its folder, as `--to` names it. `layout_refusals` of a family are what vLLM reads otherwise in
    another one than the unified.
    """
    if find_spec(_file(spec)) is None:
        return f"draftkit does not know how vLLM runs {spec.method} drafts"
    family = importlib.import_module(_file(spec))
    in_layout = getattr(family, "layout_refusals", {}).get(layout, lambda _: None)
    reason: str | None = family.refusal(spec.architecture) or in_layout(spec.architecture)
    return reason


def check_target(folder: Path) -> None:
    """Raise `TargetError` for a target that vLLM 0.32 does not load, of any architecture."""
    if (file := gguf_file(folder)) is not None:
        raise TargetError(
            "vLLM 0.32 does not load GGUF files",
            where=file,
            hint="leave vLLM out, or pass the folder or Hub id of the model that the file was made from",
        )


def family_settings(spec: DraftSpec) -> dict[str, object]:
    """What `speculative_config` says of a draft besides its folder, its method and the tokens a round."""
    settings = getattr(importlib.import_module(_file(spec)), "settings", None)
    return {} if settings is None else settings(spec.architecture)


def family_tokens(spec: DraftSpec, wanted: int) -> int:
    """The draft tokens a round that vLLM takes, as many as are wanted or the next fewer."""
    tokens = getattr(importlib.import_module(_file(spec)), "tokens", None)
    return wanted if tokens is None else tokens(spec.architecture, wanted)


def family_notes(spec: DraftSpec) -> list[str]:
    """What a user has to know who serves a draft, one sentence each."""
    notes = getattr(importlib.import_module(_file(spec)), "notes", None)
    return [] if notes is None else notes(spec.architecture)


def _file(spec: DraftSpec) -> str:
    return f"draftkit.engines.vllm.families.{spec.architecture.family}"
