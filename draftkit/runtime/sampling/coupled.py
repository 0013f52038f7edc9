"""Verification by shared noise: the output is the same with any draft, and with none (Daliri, Musco and Suresh 2024).

The target draws every position with its own noise, as it would alone, and a draft stands where it is the same token.
A draft that was drawn with that noise too (`drafting.draw`) agrees with probability (1 − TV) / (1 + TV) or more, where
TV is the total variation distance of the two laws.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftkit.runtime.kernels.matching import count_matches
from draftkit.runtime.kernels.sample import sample
from draftkit.runtime.sampling.acceptance import expected_acceptance, target_probs
from draftkit.runtime.sampling.parameters import SamplingTensors
from draftkit.runtime.sampling.probabilities import distribution
from draftkit.runtime.sampling.random import target_stream
from draftkit.runtime.sampling.verdict import Drafted, Verdict, emit_chosen


def verify_coupled(drafted: Drafted, logits: Tensor, parameters: SamplingTensors, start: Tensor) -> Verdict:
    """`verdict.Verify` by matching tokens.

    `expected` is exact in one-hot rows. For drafts drawn from `probs` it is what `rejection` would accept, Σ min(p, q):
    a few points more than this mode does.
    """
    law = distribution(logits, parameters)
    positions = start[:, None] + torch.arange(logits.shape[1], device=logits.device)
    chosen = sample(law, target_stream(parameters.seed, positions))
    expected = expected_acceptance(drafted, law, target_probs(drafted, law))
    return emit_chosen(drafted, count_matches(drafted, chosen), chosen, expected)
