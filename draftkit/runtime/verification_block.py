"""Block verification (Sun et al. 2024, arXiv 2403.10444): the target's distribution exactly, with more accepted drafts.

Drafts are judged together: the longest prefix that passes its own test stands, and a failure before it does not stop
it. Since the tests look at every draft token, what decided a round must not be met again in the next; the streams of
drafts and of acceptance see to that (`random`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftkit.runtime.batch import SamplingTensors
from draftkit.runtime.ops.distribution import Distribution, distribution
from draftkit.runtime.ops.random import acceptance_stream, target_stream, uniform
from draftkit.runtime.ops.residual_mass import residual_mass
from draftkit.runtime.verdict import Drafted, Verdict, emit
from draftkit.runtime.verification import draft_probs, recover_token, target_probs


def verify_block(drafted: Drafted, logits: Tensor, parameters: SamplingTensors, start: Tensor) -> Verdict:
    """`verdict.Verify` for whole blocks; equal to `rejection` for K = 1, never worse in expectation.

    `expected` is exact given the draft tokens: whether a draft stands depends on those after it too.
    """
    p = distribution(logits, parameters)
    target = target_probs(drafted, p)
    weights = _prefix_weights(target, draft_probs(drafted))
    passing = _pass_probabilities(drafted, p, target, weights)
    passes = uniform(acceptance_stream(parameters.seed, start, passing.shape[1])) < passing
    accepted = pad(torch.where(passes, _count(passes), 0), (1, 0)).amax(-1)
    noise = target_stream(parameters.seed, start + accepted)
    token = recover_token(drafted, p, accepted, weights.gather(1, accepted[:, None])[:, 0], noise)
    return emit(drafted, accepted, token, _expected(passing))


def _prefix_weights(target: Tensor, draft: Tensor) -> Tensor:
    """w_0 = 1 and w_i = min(1, w_{i−1}·p(d_i) / q(d_i)): float32 [B, K+1], from both probabilities [B, K]."""
    weights = [target.new_ones(len(target))]
    for p, q in zip(target.unbind(1), draft.unbind(1), strict=True):
        joint = weights[-1] * p
        weights.append(torch.where(joint < q, joint / q, (joint > 0).float()))
    return torch.stack(weights, dim=1)


def _pass_probabilities(drafted: Drafted, p: Distribution, target: Tensor, weights: Tensor) -> Tensor:
    """The probability [B, K] that the prefix up to each draft passes its test; 0 in padding.

    With Z_i = Σ_v max(w_i·p(v) − q(v), 0) over the token after prefix i, it is Z_i / (Z_i + 1 − w_i), and w for the
    last draft.
    """
    w = weights[:, 1:]
    after = weights[:, 1:-1]  # the prefixes that a further draft follows
    mass = after * (1 - target[:, 1:])
    if drafted.probs is not None:
        drawn = drafted.valid & ~drafted.one_hot[:, None] & (_count(w) > 1)
        full = residual_mass(drafted.probs, p, weights[:, :-1], drawn)[:, 1:]
        mass = torch.where(drafted.one_hot[:, None], mass, full)
    inner = torch.where(mass > 0, mass / (mass + 1 - after), 0)
    last = _count(w) == drafted.lengths[:, None]
    passing = torch.where(last, w, pad(inner, (0, w.shape[1] - inner.shape[1])))
    return torch.where(drafted.valid, passing, 0)


def _expected(passing: Tensor) -> Tensor:
    """From pass probabilities [B, K]: the probability that prefix i stands or a longer one, given that i−1 does."""
    none_from = (1 - passing).flip(-1).cumprod(-1).flip(-1)
    reached = pad(1 - none_from, (1, 0), value=1.0)
    return torch.where(reached[:, :-1] > 0, reached[:, 1:] / reached[:, :-1], 0)


def _count(like: Tensor) -> Tensor:
    """1 … K."""
    return torch.arange(1, like.shape[1] + 1, device=like.device)
