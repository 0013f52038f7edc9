"""Losses over a few candidates of each row, the draft's likeliest tokens, among which a selector chooses (DFlash2).

To the losses, its candidates are a row's draft vocabulary: the target's distribution is restricted to them. N rows, k
candidates, H the draft's width, V the target's vocabulary, Vd the draft's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding_bag

from draftkit.train.kernels.row_loss import RowDistribution, row_loss
from draftkit.train.losses.table import Loss
from draftkit.train.losses.teacher import TargetHead


class Likeliest(NamedTuple):
    """`logits` [n, k], the largest ones, and `ids` int64 [n, k] of their tokens in the draft vocabulary."""

    logits: Tensor
    ids: Tensor


class Candidates:
    """The k likeliest tokens of each row, as `linear_loss` has found them; of rows without a weight, k times the first.

    - `logits` [N, k] of the draft and `log_p` [N, k] of the target, over its whole vocabulary, both at the temperature.
    - `ids` int64 [N, k] in the draft vocabulary. `best` int64 [N]: the target's choice of all tokens, by its own ids.
    """

    def __init__(self, rows: int, k: int, device: torch.device):
        self.k = k
        self.logits, self.log_p = torch.zeros(2, rows, k, device=device)
        self.ids = torch.zeros(rows, k, dtype=torch.int64, device=device)
        self.best = torch.zeros(rows, dtype=torch.int64, device=device)

    def likeliest(self, logits: Tensor) -> Likeliest:
        """The largest of the draft's logits [n, Vd]."""
        return Likeliest(*logits.topk(self.k))

    def put(self, rows: Tensor, likeliest: Likeliest, target: Tensor, whole: RowDistribution) -> None:
        """Store what is known of `rows` int64 [n]: `target` [n, Vd], the teacher's logits, and `whole` [n], their
        statistics over all tokens."""
        self.logits[rows], self.ids[rows] = likeliest
        self.log_p[rows] = target.gather(-1, likeliest.ids) - whole.log_sum[:, None]
        self.best[rows] = whole.best

    def logits_of(self, states: Tensor, weight: Tensor) -> Tensor:
        """`logits`, differentiable by what they were made of: `states` [N, H] and the head's `weight` [Vd, H]."""
        return _Known.apply(states, weight, self.ids, self.logits)


class CandidateLoss(NamedTuple):
    """The loss of the distribution that the scores of candidates are logits of; its fields are those of `LinearLoss`,
    and a draft is always a candidate."""

    value: Tensor
    loss: Tensor
    agree: Tensor
    alpha: Tensor
    ratio: Tensor


def candidate_loss(
    scores: Tensor, candidates: Candidates, head: TargetHead, weights: Tensor, loss: Loss, emitted: Tensor
) -> CandidateLoss:
    """Σ_i weights_i·loss_i of `scores` [N, k], differentiable by them. `weights` float32 [N], `emitted` int64 [N]."""
    value, each, alpha, best, log_sum = _Rows.apply(scores, candidates.log_p, weights, loss)
    chosen = candidates.ids.gather(-1, best[:, None])[:, 0]
    is_emitted = candidates.ids == head.to_draft(emitted)[:, None]
    log_ratio = scores.detach() - log_sum[:, None] - candidates.log_p
    ratio = torch.where(is_emitted, log_ratio.clamp(max=0).exp(), 0).sum(-1)
    return CandidateLoss(value, each, head.to_target(chosen) == candidates.best, alpha, ratio)


class _Rows(torch.autograd.Function):
    """`row_loss` of the candidates, its gradient kept until it is asked for."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, log_p: Tensor, weights: Tensor, loss: Loss) -> tuple[Tensor, ...]:
        gradient = scores.float().contiguous().clone()
        everything = torch.zeros_like(weights)  # log Σ p over the target's whole vocabulary
        found = row_loss(gradient, log_p, everything, None, weights if ctx.needs_input_grad[0] else None, loss)
        assert found.alpha is not None
        ctx.save_for_backward(gradient)
        rest = found.loss, found.alpha, found.draft.best, found.draft.log_sum
        ctx.mark_non_differentiable(*rest)
        return torch.dot(weights, found.loss), *rest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_value: Tensor, *statistics: Any) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * by_value, None, None, None


class _Known(torch.autograd.Function):
    """Logits [N, k] that were computed before, as a product of states and rows of a head."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, ids: Tensor, logits: Tensor) -> Tensor:
        ctx.save_for_backward(states, weight, ids)
        return logits.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_logits: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, ids = ctx.saved_tensors
        by_states = by_weight = None
        if ctx.needs_input_grad[0]:
            rows = embedding_bag(ids, weight, per_sample_weights=by_logits.to(weight.dtype), mode="sum")
            by_states = rows.to(states.dtype)
        if ctx.needs_input_grad[1]:
            by_weight = torch.zeros_like(weight)
            for tokens, rates in zip(ids.T, by_logits.T, strict=True):  # never [N, k, H]
                by_weight.index_add_(0, tokens, (rates[:, None] * states).to(weight.dtype))
        return by_states, by_weight, None, None
