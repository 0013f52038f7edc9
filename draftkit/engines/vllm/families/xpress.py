"""XPress in vLLM 0.32, which has no class for it. A later release loads the layout that `--to xpress` writes."""

from __future__ import annotations

from draftkit.layout.families.xpress import XPressSpec


def refusal(draft: XPressSpec) -> str | None:
    """Always: as DFlash it would run without the head."""
    del draft
    return "vLLM 0.32 has no class for XPress"
