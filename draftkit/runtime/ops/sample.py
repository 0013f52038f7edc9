"""Draw a token per row from logits: Gumbel-max, with the noise made in the kernel and no probabilities stored.

B requests, T rows each, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftkit.runtime.ops.backend import jit, next_power_of_2, tl, uses_triton
from draftkit.runtime.ops.distribution import (
    Distribution,
    distribution_arguments,
    load_log_weights,
    log_weights,
)
from draftkit.runtime.ops.random import (
    Stream,
    kernel_exponential,
    kernel_log,
    natural_log,
    race,
    stream_arguments,
)

_MAX_BLOCK = 1024  # eight tokens per thread: more noise arithmetic would outgrow the instruction cache


def sample(p: Distribution, stream: Stream, out: Tensor | None = None) -> Tensor:
    """Draw from each row of `p` [B, T] with the noise of `stream` [B, T]: int64 [B, T]. Greedy rows take `best`.

    `out` float32 [B, V] with contiguous rows, allowed where T = 1, receives the probabilities that were drawn from;
    rows of greedy requests are left as they are.
    """
    if uses_triton(p.logits) and p.best.numel():
        return _sample(p, stream, out)
    return sample_reference(p, stream, out)


def sample_reference(p: Distribution, stream: Stream, out: Tensor | None = None) -> Tensor:
    weights = log_weights(p)
    likely = (weights - p.log_sum[..., None]).exp()
    scores = race(likely, stream, lambda tokens, noise: weights[tokens] - natural_log(noise))
    if out is not None:
        out.copy_(torch.where(p.scale[:, None] == 0, out, likely[:, 0]))
    return torch.where(p.scale[:, None] == 0, p.best, scores.nan_to_num(-torch.inf).argmax(-1))


def _sample(p: Distribution, stream: Stream, out: Tensor | None) -> Tensor:
    (requests, rows), size = p.best.shape, p.logits.shape[2]
    block, blocks = vocabulary_blocks(size)
    scores = torch.empty(requests, rows, blocks, dtype=torch.float32, device=p.logits.device)
    winners = torch.empty(requests, rows, blocks, dtype=torch.int64, device=p.logits.device)
    _sample_kernel[requests * rows, blocks](
        *distribution_arguments(p),
        *stream_arguments(stream),
        scores,
        winners,
        out,
        0 if out is None else out.stride(0),
        rows,
        size,
        BLOCK=block,
        num_warps=4,
        enable_fp_fusion=False,
    )
    drawn = winners.gather(-1, scores.argmax(-1, keepdim=True))[..., 0]
    return torch.where(p.scale[:, None] == 0, p.best, drawn)


def vocabulary_blocks(size: int) -> tuple[int, int]:
    """How a vocabulary is split among programs that draw noise: tokens per block, a multiple of 4, and blocks."""
    block = min(max(next_power_of_2(size), 4), _MAX_BLOCK)
    return block, (size + block - 1) // block


@jit(varying=("rows_per_request",))
def _sample_kernel(
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
    scores: tl.tensor,
    winners: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    rows_per_request: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program per row and block of the vocabulary: the best score of the block and the token that has it."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    request = row // rows_per_request
    scale = tl.load(scales + request)
    if scale == 0:
        return
    counters = block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    token = counters[:, None] * 4 + tl.arange(0, 4)[None, :]
    weights = load_log_weights(logits, peaks, floors, scale, row, token, size)
    if out is not None:
        drawn_from = tl.exp(weights - tl.load(log_sums + row))
        tl.store(out + request * out_stride + token, drawn_from, mask=token < size)
    race = kernel_exponential(tl.load(seeds + row), tl.load(positions + row), tl.load(origins + row), purpose, counters)
    score, winner = first_maximum(weights - kernel_log(race), token, size)
    result = row * tl.num_programs(1) + block
    tl.store(scores + result, score)
    tl.store(winners + result, winner)


@jit
def first_maximum(scores: tl.tensor, token: tl.tensor, size: tl.tensor) -> Any:
    """The largest of `scores` [N, 4] and its token, the first of equals; NaN never wins, nor a token beyond `size`."""
    scores = tl.where((scores == scores) & (token < size), scores, -float("inf"))
    top = tl.max(tl.max(scores, axis=1), axis=0)
    # No index of a reshaped row: Triton lets a reshape that is reduced change the order of what it is given.
    winners = tl.where(scores == top, token, size - 1)
    return top, tl.min(tl.min(winners, axis=1), axis=0)
