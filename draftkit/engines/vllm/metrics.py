"""vLLM's counters: as a server shows them, and as its offline engine lists them.

0.32 (`vllm/v1/spec_decode/metrics.py`) has `vllm:spec_decode_num_drafts`, `…_num_draft_tokens`, `…_num_accepted_tokens`
and `…_num_accepted_tokens_per_pos`. That file of 0.33.0 is the same, byte for byte.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftkit.engines.prometheus import MetricSample, by_position, total
from draftkit.engines.records import Counters, DraftCounts


def counters_of(samples: Sequence[MetricSample]) -> Counters:
    """What a measurement needs of vLLM's counters, summed over its engines."""
    finished, tokens = (total(samples, f"vllm:{name}") for name in ("request_success", "generation_tokens"))
    return Counters(draft_counts(samples), finished, tokens)


def draft_counts(samples: Sequence[MetricSample]) -> DraftCounts | None:
    """The counters of speculative decoding; None of a server without it."""
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    drafts, drafted, accepted = (total(samples, f"vllm:spec_decode_{name}") for name in names)
    if drafts is None or drafted is None or accepted is None:
        return None
    return DraftCounts(drafts, drafted, accepted, by_position(samples, "vllm:spec_decode_num_accepted_tokens_per_pos"))
