"""Which drafts vLLM 0.32 runs rightly."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

from draftkit.layout.spec import DraftSpec


def refusal_by_vllm(spec: DraftSpec) -> str | None:
    """Why vLLM 0.32 must not load this draft (it would, and run it wrongly without a word), or None."""
    family = f"draftkit.engines.vllm.families.{spec.architecture.family}"
    if find_spec(family) is None:
        return f"draftkit does not know how vLLM runs {spec.method} drafts"
    reason: str | None = importlib.import_module(family).refusal(spec.architecture)
    return reason
