"""Medusa's heads in vLLM 0.32: `medusa.py`. 0.33 has neither class nor method (`vllm/config/speculative.py`)."""

from __future__ import annotations

from draftkit.layout.families.medusa import MedusaSpec


def refusal(medusa: MedusaSpec) -> str | None:
    """What its class leaves uninitialized, or its loader stops at."""
    if medusa.lm_head == "target":
        return "vLLM's Medusa class does not borrow the target's head, and leaves its own uninitialized"
    if medusa.reduced_vocabulary:
        return "vLLM's Medusa class has a token_map, and its loader stops at it"
    return None


def notes(medusa: MedusaSpec) -> list[str]:
    """That it is gone."""
    del medusa
    return ["vLLM 0.33 has dropped Medusa: its newest release that runs these heads is 0.32."]
