"""Which drafts stand under speculative sampling (Leviathan et al. 2023, Chen et al. 2023).

B requests, K draft tokens, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draftkit.runtime.kernels.backend import jit, next_power_of_2, tl, uses_triton
from draftkit.runtime.kernels.law import law_arguments
from draftkit.runtime.kernels.matching import first_failure
from draftkit.runtime.kernels.noise import stream_arguments, to_uniform
from draftkit.runtime.sampling.acceptance import draft_probs, target_probs
from draftkit.runtime.sampling.probabilities import Distribution
from draftkit.runtime.sampling.random import Stream, uniform
from draftkit.runtime.sampling.verdict import Drafted


class Accepted(NamedTuple):
    """`counts` int64 [B]: leading drafts that stand. `target_probs` float32 [B, K]: the target's probability of each
    draft, 0 in padding.
    """

    counts: Tensor
    target_probs: Tensor


def accept_drafts(drafted: Drafted, law: Distribution, stream: Stream) -> Accepted:
    """Accept draft d while u·q(d) < p(d), with the uniform numbers u of `stream` [B, K].

    `law` [B, K+1] is the target's; q is 1 in one-hot rows. The inequality is strict: p(d) = 0 never stands, even at
    u = 0, and p = q always does, because u < 1. A greedy target accepts its own argmax only.
    """
    if uses_triton(law.logits) and drafted.tokens.numel():
        return _accept_drafts(drafted, law, stream)
    return accept_drafts_reference(drafted, law, stream)


def accept_drafts_reference(drafted: Drafted, law: Distribution, stream: Stream) -> Accepted:
    target = target_probs(drafted, law)
    stands = (uniform(stream) * draft_probs(drafted) < target) & drafted.valid
    return Accepted(stands.long().cumprod(-1).sum(-1), target)


def _accept_drafts(drafted: Drafted, law: Distribution, stream: Stream) -> Accepted:
    rows, k = drafted.tokens.shape
    counts = torch.empty(rows, dtype=torch.int64, device=law.logits.device)
    target = torch.empty(rows, k, dtype=torch.float32, device=law.logits.device)
    _rejection_kernel[(rows,)](
        drafted.tokens.contiguous(),
        drafted.lengths,
        drafted.active,
        drafted.one_hot,
        None if drafted.probs is None else drafted.probs.contiguous(),
        *law_arguments(law),
        *stream_arguments(stream),
        counts,
        target,
        k,
        law.logits.shape[2],
        BLOCK=next_power_of_2(k),
        num_warps=1,
        enable_fp_fusion=False,
    )
    return Accepted(counts, target)


@jit
def _rejection_kernel(
    tokens: tl.tensor,
    lengths: tl.tensor,
    active: tl.tensor,
    one_hot: tl.tensor,
    probs: tl.tensor,
    logits: tl.tensor,
    scales: tl.tensor,
    peaks: tl.tensor,
    bests: tl.tensor,
    floors: tl.tensor,
    log_sums: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    origins: tl.tensor,
    purpose: tl.tensor,
    counts: tl.tensor,
    target: tl.tensor,
    k: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program per request, all its drafts at once."""
    request = tl.program_id(0).to(tl.int64)
    length = tl.where(tl.load(active + request), tl.load(lengths + request), 0)
    scale = tl.load(scales + request)
    index = tl.arange(0, BLOCK)
    valid = index < length
    draft = request * k + index
    row = request * (k + 1) + index
    token = tl.load(tokens + draft, mask=valid, other=0)
    x = tl.load(logits + row * size + token, mask=valid, other=0).to(tl.float32)
    exponent = (x - tl.load(peaks + row, mask=valid, other=0)) * scale - tl.load(log_sums + row, mask=valid, other=0)
    p = tl.where(x >= tl.load(floors + row, mask=valid, other=0), tl.exp(exponent), 0.0)
    best = tl.load(bests + row, mask=valid, other=0)
    p = tl.where(scale == 0, (token == best).to(tl.float32), p)
    q = tl.full([BLOCK], 1.0, tl.float32)
    if probs is not None:
        drawn = index < tl.where(tl.load(one_hot + request), 0, length)
        q = tl.load(probs + draft * size + token, mask=drawn, other=1.0)
    seed = tl.load(seeds + draft, mask=valid, other=0)
    position = tl.load(positions + draft, mask=valid, other=0)
    origin = tl.load(origins + draft, mask=valid, other=0)
    stands = to_uniform(seed, position, origin, purpose) * q < p
    tl.store(counts + request, first_failure(stands, index, length))
    tl.store(target + draft, tl.where(valid, p, 0.0), mask=index < k)
