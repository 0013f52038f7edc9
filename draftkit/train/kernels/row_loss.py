"""Losses of rows of logits, their gradient in place, and what acceptance statistics need.

n rows, V draft vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftkit.runtime.ops.backend import jit, next_power_of_2, tl, uses_triton
from draftkit.train.losses.table import LOSSES, SMALLEST_ALPHA, Loss, LossRows

_MAX_BLOCK = 4096
_FUSED = {*LOSSES, "lk"}


class RowDistribution(NamedTuple):
    """`log_sum` [n]: log Σ exp(logit); `best` int64 [n]: the first token with the largest logit."""

    log_sum: Tensor
    best: Tensor


class RowLoss(NamedTuple):
    """`loss` [n]; `alpha` [n], Σ min(p, q) with the target's whole vocabulary in p; without a target None and None."""

    loss: Tensor
    draft: RowDistribution
    alpha: Tensor | None
    target: RowDistribution | None


def row_loss(
    draft: Tensor,
    target: Tensor | None,
    log_sum: Tensor | None,
    labels: Tensor | None,
    weights: Tensor | None,
    loss: Loss,
) -> RowLoss:
    """`loss` of the `draft` logits [n, V], float32 and contiguous, which become its gradient times `weights` [n].

    - `target` [n, V]: the target's logits of these tokens; None where `loss` needs labels alone.
    - `log_sum` [n]: log Σ exp over the target's whole vocabulary, None where it is these tokens.
    - `labels` int64 [n] of hard cross-entropy; None for the target's choice among these tokens.
    - `weights` None: nothing is written over the logits.
    """
    fused = uses_triton(draft) and draft.dtype == torch.float32 and draft.numel() and loss.names <= _FUSED
    compute = _row_loss if fused else row_loss_reference
    return compute(draft, target, log_sum, labels, weights, loss)


def row_loss_reference(
    draft: Tensor,
    target: Tensor | None,
    log_sum: Tensor | None,
    labels: Tensor | None,
    weights: Tensor | None,
    loss: Loss,
) -> RowLoss:
    draft_row = row_distribution(draft)
    target_row = None if target is None else row_distribution(target)
    if labels is None:
        assert target_row is not None
        labels = target_row.best
    rows = LossRows(
        log_q=draft - draft_row.log_sum[:, None],
        log_target=None if target is None or target_row is None else target - target_row.log_sum[:, None],
        labels=labels,
    )
    value, slope = loss(rows)
    alpha = None
    if target_row is not None:
        alpha = rows.alpha
        if log_sum is not None:
            alpha = torch.minimum(rows.p * (target_row.log_sum - log_sum).exp()[:, None], rows.q).sum(-1)
    if weights is not None:
        torch.addcmul(slope, rows.q, slope.sum(-1, keepdim=True), value=-1, out=draft).mul_(weights[:, None])
    return RowLoss(value, draft_row, alpha, target_row)


def row_distribution(logits: Tensor) -> RowDistribution:
    """The distributions of logits [n, V], twice as fast on a CPU as by logsumexp and argmax."""
    peak, best = logits.max(-1)
    return RowDistribution((logits - peak[:, None]).exp_().sum(-1).log_().add_(peak), best)


def _row_loss(
    draft: Tensor,
    target: Tensor | None,
    log_sum: Tensor | None,
    labels: Tensor | None,
    weights: Tensor | None,
    loss: Loss,
) -> RowLoss:
    count, size = draft.shape
    out = torch.empty(4, count, device=draft.device)
    best = torch.empty(2, count, dtype=torch.int64, device=draft.device)
    _row_loss_kernel[(count,)](
        draft,
        None if target is None else target.contiguous(),
        log_sum,
        None if labels is None else labels.contiguous(),
        weights,
        *out,
        *best,
        *(loss.term(name).weight for name in [*LOSSES, "lk"]),
        loss.term("lk").number,
        size,
        SMALLEST=SMALLEST_ALPHA,
        BLOCK=min(next_power_of_2(size), _MAX_BLOCK),
        num_warps=8,
        enable_fp_fusion=False,
    )
    value, alpha, draft_sum, target_sum = out
    if target is None:
        return RowLoss(value, RowDistribution(draft_sum, best[0]), None, None)
    return RowLoss(value, RowDistribution(draft_sum, best[0]), alpha, RowDistribution(target_sum, best[1]))


@jit
def _row_loss_kernel(
    draft: tl.tensor,
    target: tl.tensor,
    log_sums: tl.tensor,
    labels: tl.tensor,
    weights: tl.tensor,
    values: tl.tensor,
    alphas: tl.tensor,
    draft_sums: tl.tensor,
    target_sums: tl.tensor,
    draft_bests: tl.tensor,
    target_bests: tl.tensor,
    ce: tl.tensor,
    soft_ce: tl.tensor,
    kl: tl.tensor,
    reverse_kl: tl.tensor,
    jsd: tl.tensor,
    tv: tl.tensor,
    nla: tl.tensor,
    lk: tl.tensor,
    eta: tl.tensor,
    size: tl.tensor,
    SMALLEST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program per row; what it reads again comes from the L2 cache.

    All slopes are sums of p, q·log(q/p), q·log(q/m), q where q ≤ p, and the label; the row's own factors of these
    follow from its sums, after which one more pass writes the gradient.
    """
    row = tl.program_id(0).to(tl.int64)
    draft += row * size
    draft_sum, draft_best = _law_of(draft, size, BLOCK)
    tl.store(draft_sums + row, draft_sum)
    tl.store(draft_bests + row, draft_best)
    target_sum = draft_sum
    label = draft_best.to(tl.int64)
    value = tl.full([], 0.0, tl.float32)
    towards_p = tl.full([], 0.0, tl.float32)
    on_overlap = tl.full([], 0.0, tl.float32)
    slope_sum = -ce
    if target is not None:
        target += row * size
        target_sum, target_best = _law_of(target, size, BLOCK)
        tl.store(target_sums + row, target_sum)
        tl.store(target_bests + row, target_best)
        label = target_best.to(tl.int64)
        mass = tl.full([], 1.0, tl.float32)  # of the draft vocabulary
        if log_sums is not None:
            mass = tl.exp(target_sum - tl.load(log_sums + row))
        cross = tl.full([], 0.0, tl.float32)  # Σ p·log q
        forward = tl.full([], 0.0, tl.float32)  # Σ p·log(p/q)
        backward = tl.full([], 0.0, tl.float32)  # Σ q·log(q/p)
        p_to_middle = tl.full([], 0.0, tl.float32)  # Σ p·log(p/m)
        q_to_middle = tl.full([], 0.0, tl.float32)  # Σ q·log(q/m)
        overlap = tl.full([], 0.0, tl.float32)  # Σ min(p, q)
        served = tl.full([], 0.0, tl.float32)  # the same with p of the whole vocabulary
        covered = tl.full([], 0.0, tl.float32)  # Σ q where q ≤ p
        for first in range(0, size, BLOCK):
            token = first + tl.arange(0, BLOCK)
            inside = token < size
            log_q = tl.load(draft + token, mask=inside, other=0.0) - draft_sum
            log_p = tl.load(target + token, mask=inside, other=0.0).to(tl.float32) - target_sum
            q = tl.where(inside, tl.exp(log_q), 0.0)
            p = tl.where(inside, tl.exp(log_p), 0.0)
            cross += tl.sum(p * log_q, axis=0)
            forward += tl.sum(p * (log_p - log_q), axis=0)
            backward += tl.sum(q * (log_q - log_p), axis=0)
            overlap += tl.sum(tl.minimum(p, q), axis=0)
            served += tl.sum(tl.minimum(p * mass, q), axis=0)
            covered += tl.sum(tl.where(log_q <= log_p, q, 0.0), axis=0)
            if jsd > 0:
                log_m = _log_middle(p, q)
                p_to_middle += tl.sum(tl.where(p > 0, p * (log_p - log_m), 0.0), axis=0)
                q_to_middle += tl.sum(tl.where(q > 0, q * (log_q - log_m), 0.0), axis=0)
        tl.store(alphas + row, served)
        share = tl.exp(-eta * overlap)
        towards_p = soft_ce + kl + lk * share
        on_overlap = tv + lk * (1 - share) + tl.where(overlap >= SMALLEST, nla / tl.maximum(overlap, SMALLEST), 0.0)
        value = (kl + lk * share) * forward - soft_ce * cross + reverse_kl * backward
        value += jsd * 0.5 * (p_to_middle + q_to_middle) + (tv + lk * (1 - share)) * (1 - overlap)
        value += tl.where(overlap > 0, nla * -tl.log(tl.maximum(overlap, SMALLEST)), 0.0)
        slope_sum += reverse_kl * backward + jsd * 0.5 * q_to_middle - towards_p - on_overlap * covered
    if labels is not None:
        label = tl.load(labels + row)
    value += ce * (draft_sum - tl.load(draft + label))
    tl.store(values + row, value)
    if weights is not None:
        weight = tl.load(weights + row)
        tl.debug_barrier()  # the label's logit is read before it is overwritten
        for first in range(0, size, BLOCK):
            token = first + tl.arange(0, BLOCK)
            inside = token < size
            log_q = tl.load(draft + token, mask=inside, other=0.0) - draft_sum
            q = tl.exp(log_q)
            gradient = -q * slope_sum - tl.where(token == label, ce, 0.0)
            if target is not None:
                log_p = tl.load(target + token, mask=inside, other=0.0).to(tl.float32) - target_sum
                p = tl.exp(log_p)
                gradient += reverse_kl * q * (log_q - log_p) - towards_p * p
                gradient -= tl.where(log_q <= log_p, on_overlap * q, 0.0)
                if jsd > 0:
                    gradient += tl.where(q > 0, jsd * 0.5 * q * (log_q - _log_middle(p, q)), 0.0)
            tl.store(draft + token, gradient * weight, mask=inside)


@jit
def _law_of(logits: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> Any:
    """log Σ exp(logit) and the first token with the largest logit, in one pass."""
    peak = tl.full([], -float("inf"), tl.float32)
    mass = tl.full([], 0.0, tl.float32)
    best = tl.full([], 0, tl.int32)
    for first in range(0, size, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = tl.load(logits + token, mask=token < size, other=-float("inf")).to(tl.float32)
        top, index = tl.max(x, axis=0, return_indices=True)
        best = tl.where(top > peak, first + index, best)
        highest = tl.maximum(peak, top)
        mass = mass * tl.exp(peak - highest) + tl.sum(tl.exp(x - highest), axis=0)
        peak = highest
    return peak + tl.log(mass), best


@jit
def _log_middle(p: tl.tensor, q: tl.tensor) -> tl.tensor:
    return tl.log(0.5 * (p + q))
