"""Domino in vLLM 0.32, which has no class for it. SpecForge has a worker for SGLang."""

from __future__ import annotations

from draftkit.layout.families.domino import DominoSpec


def refusal(draft: DominoSpec) -> str | None:
    """Always: as DFlash it would run without the head."""
    del draft
    return "vLLM 0.32 has no class for Domino"
