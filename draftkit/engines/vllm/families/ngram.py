"""n-gram lookup in vLLM 0.32: `ngram_proposer.py`."""

from __future__ import annotations

from draftkit.layout.families.ngram import NgramSpec


def refusal(ngram: NgramSpec) -> str | None:
    """It runs every n-gram lookup."""
    return None


def settings(ngram: NgramSpec) -> dict[str, object]:
    """What `speculative_config` says instead of a folder."""
    return {"prompt_lookup_min": ngram.min_n, "prompt_lookup_max": ngram.max_n}
