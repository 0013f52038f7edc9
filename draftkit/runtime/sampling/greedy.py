"""Verification at temperature 0: a draft token stands where it is the target's most likely token."""

from __future__ import annotations

from torch import Tensor

from draftkit.runtime.kernels.matching import count_matches
from draftkit.runtime.sampling.parameters import SamplingTensors
from draftkit.runtime.sampling.verdict import Drafted, Verdict, emit_chosen


def verify_greedy(drafted: Drafted, logits: Tensor, parameters: SamplingTensors, start: Tensor) -> Verdict:
    """`verdict.Verify` for batches of greedy requests; the cheapest, and what `rejection` and `coupled` come to there.

    `parameters` and `start` play no part. `expected` is 1 where the draft token is the target's, else 0.
    """
    best = logits.argmax(-1)
    agrees = (drafted.tokens == best[:, :-1]) & drafted.valid
    return emit_chosen(drafted, count_matches(drafted, best), best, agrees.float())
