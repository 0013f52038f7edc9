"""The distribution that a request asks for, written out from its definition, with what rounding leaves open at its
cuts.

Cuts are thresholds: a token whose probability lies within rounding of one may stay or go. Such tokens are left out of
what is tested; the distribution of the others among themselves does not depend on them. V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draftkit.requests import SamplingParameters
from lossless.goodness import ChiSquare, chi_square

ROUNDING = 1e-5  # of a probability that is computed in float32 from logits that are known exactly


class ExactDistribution(NamedTuple):
    """`probs` float64 [..., V] at the temperature, nothing cut; bool [..., V]: tokens that no cut can remove (`sure`),
    and those that some rounding keeps (`possible`)."""

    probs: Tensor
    sure: Tensor
    possible: Tensor


def exact_distribution(logits: Tensor, sampling: SamplingParameters, shift: float = 0.0) -> ExactDistribution:
    """The distribution of `logits` [..., V] for a request with a temperature, whose logits may be off by `shift`."""
    probs = (logits.double() / sampling.temperature).softmax(-1)
    slack = ROUNDING + shift / sampling.temperature
    ordered = probs.sort(descending=True).values
    sums = torch.cat((torch.zeros_like(ordered[..., :1]), ordered.cumsum(-1)), dim=-1)
    # How many tokens are larger than each beyond doubt, and how many others may be.
    larger = torch.searchsorted(-ordered, -probs * (1 + slack))
    rivals = torch.searchsorted(-ordered, -probs * (1 - slack), right=True) - 1
    best = ordered[..., :1]
    possible = probs >= sampling.min_p * best * (1 - slack)
    sure = (probs >= sampling.min_p * best * (1 + slack)) | (rivals == 0)
    if sampling.top_k:
        possible &= larger < sampling.top_k
        sure &= rivals < sampling.top_k
    if sampling.top_p < 1:
        most, least = ((probs * kept).sum(-1, keepdim=True) for kept in (possible, sure))
        possible &= sums.gather(-1, larger) < sampling.top_p * most * (1 + slack)
        sure &= sums.gather(-1, rivals + 1) - probs < sampling.top_p * least * (1 - slack)
    return ExactDistribution(probs, sure, possible)


def fit(counts: Tensor, distribution: ExactDistribution) -> ChiSquare:
    """Pearson's test that `counts` [V] follow a distribution [V]; the statistic is ∞ where the impossible occurred."""
    counts = counts.to(distribution.probs.device)
    if counts[~distribution.possible].sum() > 0:
        return ChiSquare(torch.inf, 1)
    return chi_square(counts * distribution.sure, distribution.probs * distribution.sure)
