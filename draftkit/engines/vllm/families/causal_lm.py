"""Causal language models as drafts in vLLM 0.32."""

from __future__ import annotations

from draftkit.layout.families.causal_lm import CausalLMSpec


def refusal(lm: CausalLMSpec) -> str | None:
    """What it would ignore."""
    return None if lm.target_features is None else "vLLM would ignore the target features of PARD-2"


def settings(lm: CausalLMSpec) -> dict[str, object]:
    """That all tokens are drafted in one pass."""
    return {} if lm.parallel is None else {"parallel_drafting": True}
