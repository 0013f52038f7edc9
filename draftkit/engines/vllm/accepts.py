"""Which drafts vLLM 0.32 runs rightly."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

from draftkit.layout.spec import DraftSpec


def refusal_by_vllm(spec: DraftSpec) -> str | None:
    """Why vLLM 0.32 must not load this draft (it would, and run it wrongly without a word), or None."""
    if find_spec(_file(spec)) is None:
        return f"draftkit does not know how vLLM runs {spec.method} drafts"
    reason: str | None = importlib.import_module(_file(spec)).refusal(spec.architecture)
    return reason


def family_settings(spec: DraftSpec) -> dict[str, object]:
    """What `speculative_config` says of a draft besides its folder, its method and the tokens a round."""
    settings = getattr(importlib.import_module(_file(spec)), "settings", None)
    return {} if settings is None else settings(spec.architecture)


def _file(spec: DraftSpec) -> str:
    return f"draftkit.engines.vllm.families.{spec.architecture.family}"
