"""Gemma-4's assistant in vLLM 0.32: method `mtp`, `gemma4_mtp.py`."""

from __future__ import annotations

from draftkit.layout.families.gemma4_assistant import Gemma4AssistantSpec

SERVED = {"concatenation": "embedding_hidden", "hidden_state": "after_norm", "position": "state"}


def refusal(assistant: Gemma4AssistantSpec) -> str | None:
    """What its class computes otherwise, whatever the config says."""
    other = [name for name, value in SERVED.items() if getattr(assistant, name) != value]
    return f"vLLM's Gemma4MTP has {other[0]} {SERVED[other[0]]}, this assistant another" if other else None
