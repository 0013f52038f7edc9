"""DFlare in vLLM 0.32, which has no class for it."""

from __future__ import annotations

from draftkit.layout.families.dflare import DFlareSpec


def refusal(draft: DFlareSpec) -> str | None:
    """Always: as DFlash it would run without the projections of the context."""
    del draft
    return "vLLM 0.32 has no class for DFlare"
