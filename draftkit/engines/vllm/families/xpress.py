"""XPress in vLLM 0.32, which has no class for it; 0.33 has (`qwen3_xpress.py`), for what `--to xpress` writes."""

from __future__ import annotations

from draftkit.layout.families.xpress import XPressSpec


def refusal(draft: XPressSpec) -> str | None:
    """Always: as DFlash it would run without the head."""
    del draft
    return "vLLM 0.32 has no class for XPress; 0.33 has one, for the layout that convert --to xpress writes"
