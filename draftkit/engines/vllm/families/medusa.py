"""Medusa's heads in vLLM 0.32: `medusa.py`."""

from __future__ import annotations

from draftkit.layout.families.medusa import MedusaSpec


def refusal(medusa: MedusaSpec) -> str | None:
    """What its class leaves uninitialized, or its loader stops at."""
    if medusa.lm_head == "target":
        return "vLLM's Medusa class does not borrow the target's head, and leaves its own uninitialized"
    if medusa.reduced_vocabulary:
        return "vLLM's Medusa class has a token_map, and its loader stops at it"
    return None
