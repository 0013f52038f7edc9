"""Suffix decoding in vLLM 0.32: `suffix_decoding.py`, which needs the package arctic-inference."""

from __future__ import annotations

from draftkit.layout.families.suffix import SuffixSpec


def refusal(suffix: SuffixSpec) -> str | None:
    """It runs every one."""
    return None


def settings(suffix: SuffixSpec) -> dict[str, object]:
    """What `speculative_config` says instead of a folder; no answers to earlier requests are kept."""
    return {
        "suffix_decoding_max_tree_depth": suffix.max_depth,
        "suffix_decoding_max_cached_requests": 0,
        "suffix_decoding_max_spec_factor": suffix.max_spec_factor,
        "suffix_decoding_min_token_prob": suffix.min_token_prob,
    }
