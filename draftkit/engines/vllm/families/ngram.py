"""n-gram lookup in vLLM 0.32: `ngram_proposer.py`. It has no checkpoint, so nothing to refuse."""

from __future__ import annotations


def speculative_config(least: int, most: int, tokens: int) -> dict[str, object]:
    """vLLM's `speculative_config` for `tokens` drafted after the last `least` to `most` tokens, looked up."""
    return {
        "method": "ngram",
        "prompt_lookup_min": least,
        "prompt_lookup_max": most,
        "num_speculative_tokens": tokens,
    }
