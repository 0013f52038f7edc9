"""What a draft leaves of the target's probability: Σ_v max(w·p(v) − q(v), 0) for each draft position.

B requests, K draft tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftkit.runtime.ops.backend import jit, next_power_of_2, tl, uses_triton
from draftkit.runtime.ops.distribution import Distribution, distribution_arguments, load_log_weights, probabilities

_MAX_BLOCK = 4096


def residual_mass(probs: Tensor, p: Distribution, weights: Tensor, wanted: Tensor) -> Tensor:
    """The residual of row i of the target's `p` [B, K+1] against `probs` [B, K, V], row by row: float32 [B, K].

    `weights` float32 [B, K] between 0 and 1 multiply p. Only rows that are `wanted` bool [B, K] are read, 0 elsewhere.
    With w = 1 it is 1 − Σ min(p, q).
    """
    if uses_triton(probs) and probs.numel():
        return _residual_mass(probs, p, weights, wanted)
    return residual_mass_reference(probs, p, weights, wanted)


def residual_mass_reference(probs: Tensor, p: Distribution, weights: Tensor, wanted: Tensor) -> Tensor:
    residual = weights[..., None] * probabilities(p)[:, :-1] - probs
    return torch.where(wanted, residual.clamp(min=0).sum(-1), 0)


def _residual_mass(probs: Tensor, p: Distribution, weights: Tensor, wanted: Tensor) -> Tensor:
    rows, k, size = probs.shape
    block = min(next_power_of_2(size), _MAX_BLOCK)
    blocks = (size + block - 1) // block
    partial = torch.empty(rows, k, blocks, dtype=torch.float32, device=probs.device)
    _residual_mass_kernel[rows * k, blocks](
        probs.contiguous(),
        *distribution_arguments(p),
        weights.contiguous(),
        wanted.contiguous(),
        partial,
        k,
        size,
        BLOCK=block,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return partial.sum(-1)


@jit(varying=("k",))
def _residual_mass_kernel(
    probs: tl.tensor,
    logits: tl.tensor,
    scales: tl.tensor,
    peaks: tl.tensor,
    bests: tl.tensor,
    floors: tl.tensor,
    log_sums: tl.tensor,
    weights: tl.tensor,
    wanted: tl.tensor,
    partial: tl.tensor,
    k: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program per draft position and block of the vocabulary: the block's share."""
    draft = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    result = draft * tl.num_programs(1) + block
    if tl.load(wanted + draft) == 0:
        tl.store(partial + result, 0.0)
        return
    request = draft // k
    row = draft + request  # K+1 target rows per request
    token = block * BLOCK + tl.arange(0, BLOCK)
    scale = tl.load(scales + request)
    sampled = tl.exp(load_log_weights(logits, peaks, floors, scale, row, token, size) - tl.load(log_sums + row))
    p = tl.where(scale == 0, (token == tl.load(bests + row)).to(tl.float32), sampled)
    q = tl.load(probs + draft * size + token, mask=token < size, other=0.0)
    residual = tl.load(weights + draft) * p - q
    tl.store(partial + result, tl.sum(tl.where(residual > 0, residual, 0.0), axis=0))
