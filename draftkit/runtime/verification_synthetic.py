"""Acceptance at given rates, for performance work: the output is no text, the rounds have the given lengths.

A rate of 1 everywhere is the upper bound of a pair.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftkit.runtime.batch import SamplingTensors
from draftkit.runtime.ops.distribution import distribution
from draftkit.runtime.ops.random import acceptance_stream, target_stream, uniform
from draftkit.runtime.ops.sample import sample
from draftkit.runtime.verdict import Drafted, Verdict, emit


def verify_synthetic(
    drafted: Drafted, logits: Tensor, parameters: SamplingTensors, start: Tensor, *, rates: Tensor
) -> Verdict:
    """`verdict.Verify` once `rates`, conditional ones float32 [K], are bound: a draft stands at its rate.

    The target's own token is drawn from its distribution after the accepted drafts. `expected` are the rates.
    """
    expected = torch.where(drafted.valid, rates, 0)
    stands = uniform(acceptance_stream(parameters.seed, start, len(rates))) < expected
    accepted = stands.long().cumprod(-1).sum(-1)
    row = logits.take_along_dim(accepted[:, None, None], 1)
    token = sample(distribution(row, parameters), target_stream(parameters.seed, (start + accepted)[:, None]))
    return emit(drafted, accepted, token[:, 0], expected)
