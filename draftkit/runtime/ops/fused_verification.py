"""The steps of `draftkit.runtime.verification` as one kernel each; that page has their plain form and chooses.

B requests, K draft tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftkit.runtime.emitted import Drafted
from draftkit.runtime.ops.backend import jit, next_power_of_2, tl
from draftkit.runtime.ops.distribution import Distribution, distribution_arguments, load_log_weights
from draftkit.runtime.ops.random import Stream, kernel_exponential, kernel_log, kernel_uniform, stream_arguments
from draftkit.runtime.ops.sample import first_maximum, vocabulary_blocks


def accept_drafts(drafted: Drafted, p: Distribution, stream: Stream) -> tuple[Tensor, Tensor]:
    """`verification.accept_drafts` in one kernel, with its two results."""
    rows, k = drafted.tokens.shape
    counts = torch.empty(rows, dtype=torch.int64, device=p.logits.device)
    target = torch.empty(rows, k, dtype=torch.float32, device=p.logits.device)
    _rejection_kernel[(rows,)](
        drafted.tokens.contiguous(),
        drafted.lengths,
        drafted.active,
        drafted.one_hot,
        None if drafted.probs is None else drafted.probs.contiguous(),
        *distribution_arguments(p),
        *stream_arguments(stream),
        counts,
        target,
        k,
        p.logits.shape[2],
        BLOCK=next_power_of_2(k),
        num_warps=1,
        enable_fp_fusion=False,
    )
    return counts, target


@jit(varying=("k",))
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
    stands = kernel_uniform(seed, position, origin, purpose) * q < p
    tl.store(counts + request, first_failure(stands, index, length))
    tl.store(target + draft, tl.where(valid, p, 0.0), mask=index < k)


def recover_token(
    drafted: Drafted, rejected: Tensor, p: Distribution, accepted: Tensor, weights: Tensor, stream: Stream
) -> tuple[Tensor, Tensor]:
    """The race of `verification.recover_token`: the best score float32 [B], and its token int64 [B]."""
    requests, k, size = len(accepted), drafted.tokens.shape[1], p.logits.shape[2]
    block, blocks = vocabulary_blocks(size)
    scores = torch.empty(requests, blocks, dtype=torch.float32, device=p.logits.device)
    winners = torch.empty(requests, blocks, dtype=torch.int64, device=p.logits.device)
    _recovered_kernel[requests, blocks](
        drafted.tokens.contiguous(),
        rejected,
        drafted.one_hot,
        None if drafted.probs is None else drafted.probs.contiguous(),
        *distribution_arguments(p),
        accepted,
        weights,
        *stream_arguments(stream),
        scores,
        winners,
        k,
        size,
        BLOCK=block,
        num_warps=4,
        enable_fp_fusion=False,
    )
    top, block_index = scores.max(-1)
    return top, winners.gather(1, block_index[:, None])[:, 0]


@jit(varying=("k",))
def _recovered_kernel(
    tokens: tl.tensor,
    rejected: tl.tensor,
    one_hot: tl.tensor,
    probs: tl.tensor,
    logits: tl.tensor,
    scales: tl.tensor,
    peaks: tl.tensor,
    bests: tl.tensor,
    floors: tl.tensor,
    log_sums: tl.tensor,
    accepted: tl.tensor,
    weights: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    origins: tl.tensor,
    purpose: tl.tensor,
    scores: tl.tensor,
    winners: tl.tensor,
    k: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program per request and block of the vocabulary: the best score of the block and the token that has it."""
    request = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    scale = tl.load(scales + request)
    if scale == 0:
        return
    count = tl.load(accepted + request)
    row = request * (k + 1) + count
    draft = request * k + count
    counters = block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    token = counters[:, None] * 4 + tl.arange(0, 4)[None, :]
    log_p = load_log_weights(logits, peaks, floors, scale, row, token, size)
    seed, position, origin = tl.load(seeds + request), tl.load(positions + request), tl.load(origins + request)
    race = kernel_exponential(seed, position, origin, purpose, counters)
    score = log_p - kernel_log(race)
    if tl.load(rejected + request):
        if tl.load(one_hot + request):
            score = tl.where(token == tl.load(tokens + draft), -float("inf"), score)
        elif probs is not None:
            q = tl.load(probs + draft * size + token, mask=token < size, other=0.0)
            p = tl.exp(log_p - tl.load(log_sums + row))
            score = tl.maximum(tl.load(weights + request) * p - q, 0.0) / race
    top, winner = first_maximum(score, token, size)
    result = request * tl.num_programs(1) + block
    tl.store(scores + result, top)
    tl.store(winners + result, winner)


def count_matches(drafted: Drafted, chosen: Tensor) -> Tensor:
    """`verification.count_matches` in one kernel."""
    rows, k = drafted.tokens.shape
    accepted = torch.empty(rows, dtype=torch.int64, device=chosen.device)
    _matching_kernel[(rows,)](
        drafted.tokens.contiguous(),
        drafted.lengths,
        drafted.active,
        chosen.contiguous(),
        accepted,
        k,
        BLOCK=next_power_of_2(k),
        num_warps=1,
        enable_fp_fusion=False,
    )
    return accepted


@jit(varying=("k",))
def _matching_kernel(
    tokens: tl.tensor,
    lengths: tl.tensor,
    active: tl.tensor,
    chosen: tl.tensor,
    accepted: tl.tensor,
    k: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program per request."""
    request = tl.program_id(0)
    length = tl.where(tl.load(active + request), tl.load(lengths + request), 0)
    index = tl.arange(0, BLOCK)
    valid = index < length
    token = tl.load(tokens + request * k + index, mask=valid, other=0)
    choice = tl.load(chosen + request * (k + 1) + index, mask=valid, other=0)
    tl.store(accepted + request, first_failure(token == choice, index, length))


@jit
def first_failure(passes: tl.tensor, index: tl.tensor, length: tl.tensor) -> tl.tensor:
    """The number of leading entries that pass, `length` at most."""
    return tl.min(tl.where(passes, length, tl.minimum(index, length)), axis=0)
