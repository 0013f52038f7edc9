"""The token that the target adds to the accepted drafts: recovered at a rejection, the bonus token after the last one.

B requests, K draft tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftkit.runtime.kernels.backend import jit, tl, uses_triton
from draftkit.runtime.kernels.law import law_arguments, load_log_weights
from draftkit.runtime.kernels.noise import exponential, natural_log, stream_arguments
from draftkit.runtime.kernels.sample import first_maximum, vocabulary_blocks
from draftkit.runtime.sampling import random
from draftkit.runtime.sampling.probabilities import Distribution, log_weights
from draftkit.runtime.sampling.random import Stream
from draftkit.runtime.sampling.verdict import Drafted


def recover_token(drafted: Drafted, law: Distribution, accepted: Tensor, weights: Tensor, stream: Stream) -> Tensor:
    """Draw the token after `accepted` int64 [B] drafts with the noise of `stream` [B]: int64 [B].

    Row `accepted` of the target's `law` [B, K+1] is p. After all drafts: drawn from p, by the same arithmetic as
    `sample`. At a rejected draft d: from p without d where the draft is one-hot, else in proportion to
    max(w·p − q, 0) with `weights` w float32 [B]; where rounding leaves nothing of that, p's most likely token.
    """
    if uses_triton(law.logits) and accepted.numel():
        return _recover_token(drafted, law, accepted, weights, stream)
    return recover_token_reference(drafted, law, accepted, weights, stream)


def recover_token_reference(
    drafted: Drafted, law: Distribution, accepted: Tensor, weights: Tensor, stream: Stream
) -> Tensor:
    row = law.row(accepted)
    race = random.exponential(stream, law.logits.shape[2])
    log_p = log_weights(row)[:, 0]
    scores = log_p - random.natural_log(race)
    if drafted.tokens.shape[1]:
        rejected = _rejected(drafted, accepted)
        index = accepted.clamp(max=drafted.tokens.shape[1] - 1)[:, None]
        excluded = torch.where(rejected & drafted.one_hot, drafted.tokens.gather(1, index)[:, 0], -1)
        scores = scores.masked_fill(
            torch.arange(scores.shape[1], device=scores.device) == excluded[:, None], -torch.inf
        )
        if drafted.probs is not None:
            q = drafted.probs.take_along_dim(index[..., None], 1)[:, 0]
            residual = (weights[:, None] * (log_p - row.log_sum).exp() - q).clamp(min=0)
            scores = torch.where((rejected & ~drafted.one_hot)[:, None], residual / race, scores)
    top, token = scores.nan_to_num(-torch.inf).max(-1)
    return _final(drafted, law, accepted, top, token)


def _recover_token(drafted: Drafted, law: Distribution, accepted: Tensor, weights: Tensor, stream: Stream) -> Tensor:
    requests, k, size = len(accepted), drafted.tokens.shape[1], law.logits.shape[2]
    block, blocks = vocabulary_blocks(size)
    scores = torch.empty(requests, blocks, dtype=torch.float32, device=law.logits.device)
    winners = torch.empty(requests, blocks, dtype=torch.int64, device=law.logits.device)
    _recovered_kernel[requests, blocks](
        drafted.tokens.contiguous(),
        _rejected(drafted, accepted),
        drafted.one_hot,
        None if drafted.probs is None else drafted.probs.contiguous(),
        *law_arguments(law),
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
    return _final(drafted, law, accepted, top, winners.gather(1, block_index[:, None])[:, 0])


def _rejected(drafted: Drafted, accepted: Tensor) -> Tensor:
    """bool [B]: rows that ended at a draft that does not stand."""
    return drafted.active & (accepted < drafted.lengths)


def _final(drafted: Drafted, law: Distribution, accepted: Tensor, top: Tensor, token: Tensor) -> Tensor:
    """The winner, or the target's most likely token where it is greedy or nothing scored above zero in a residual."""
    empty = _rejected(drafted, accepted) & ~drafted.one_hot & (top <= 0)
    return torch.where((law.scale == 0) | empty, law.best.gather(1, accepted[:, None])[:, 0], token)


@jit
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
    race = exponential(seed, position, origin, purpose, counters)
    score = log_p - natural_log(race)
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
