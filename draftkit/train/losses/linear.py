"""Losses of a draft's last hidden states through its head, without keeping logits (as Liger's fused cross-entropy).

Rows are taken a few at a time: their logits, the loss, and in the same pass the gradient, which takes the logits' place
and goes back through the head at once. What is kept are gradients by states and head, and numbers per row.
N rows, H the draft's width, Vd the draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from draftkit.errors import DraftkitError
from draftkit.train.kernels.row_loss import RowLoss, row_loss
from draftkit.train.losses.candidates import Candidates
from draftkit.train.losses.table import Loss
from draftkit.train.losses.teacher import (
    OutputHead,
    Teacher,
    add_product,
    compute_dtype,
    product,
    rows_at_once,
    widened,
)
from draftkit.train.losses.weights import Reach


class LinearLoss(NamedTuple):
    """`value`: Σ weights·loss, to be differentiated. The others are detached, [N], and zero where the weight is.

    - `weights`: what each row counted. `loss`: the unweighted loss.
    - `agree` bool: the draft's choice is the target's over its whole vocabulary (without a teacher: is the label).
    - `alpha`: Σ_v min(p_v, q_v) with the target's whole vocabulary; the probability that a draft token is accepted.
    - `oov`: the target's mass outside the draft vocabulary, which no draft can win.
    - `ratio`: min(1, q(x)/p(x)) of the emitted token x, the probability that x had been drafted, given that it was
      emitted; 0 outside the draft vocabulary.

    Without a teacher the last three are None, and `ratio` where no tokens were given.
    """

    value: Tensor
    weights: Tensor
    loss: Tensor
    agree: Tensor
    alpha: Tensor | None
    oov: Tensor | None
    ratio: Tensor | None


def joined(parts: list[LinearLoss]) -> LinearLoss:
    """The losses of several calls as one: their sum, and their rows one after the other."""
    values, *columns = zip(*parts, strict=True)
    rows = (None if column[0] is None else torch.cat(column) for column in columns)
    return LinearLoss._make([torch.stack(values).sum(), *rows])


def linear_loss(
    hidden: Tensor,
    head: OutputHead,
    teacher: Teacher | None,
    weights: Tensor,
    loss: Loss,
    *,
    labels: Tensor | None = None,
    emitted: Tensor | None = None,
    frozen: int = 0,
    reach: Reach | None = None,
    candidates: Candidates | None = None,
    chunk: int | None = None,
) -> LinearLoss:
    """Σ_i weights_i·loss_i of `hidden` [N, H], differentiable by it and by the head unless gradients are off.

    - `weights` float32 [N]: mask, decay and denominator in one (`reduction`). Rows of weight 0 cost nothing.
    - `labels` int64 [N] in the draft vocabulary, anything where the weight is 0: what `ce` asks for; None for the
      target's choice within the draft vocabulary.
    - `emitted` int64 [N]: the tokens that the target emitted, by its own ids.
    - `frozen`: so many of the head's first columns do not change, and get zeros for their gradient at no cost.
    - `reach`: what the weights are multiplied by, as a constant, from the draft's probability of the label.
    - `candidates`: filled with the likeliest tokens of each row that has a weight, by draft and teacher.
    - `chunk`: rows at a time; the result does not depend on it.

    A call keeps one gradient of the head: give all steps of a training-time test to one call, as rows one after the
    other with `Teacher.at`. Under autocast the head multiplies in its type; the rest is float32.
    Raises `DraftkitError` when the loss asks for a teacher or labels that are not there or do not fit the head.
    """
    if teacher is None and loss.needs_target:
        raise DraftkitError(f"loss {loss}", expected="ce, where there are labels and no teacher")
    if teacher is None and labels is None:
        raise DraftkitError(f"loss {loss} without a teacher and without labels")
    if teacher is not None and len(teacher.head) != len(head.weight):
        raise DraftkitError(
            f"a head of {len(head.weight)} tokens", expected=f"the draft vocabulary of the teacher, {len(teacher.head)}"
        )
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    rows = weights.nonzero()[:, 0]
    if labels is not None:
        used = labels[rows]
        if ((used < 0) | (used >= len(head.weight))).any():
            raise DraftkitError("a label outside the draft vocabulary", hint="give its row the weight 0")
    together = 1 if reach is None else reach.together
    chunk = max((chunk or rows_at_once(len(head.weight), hidden.device)) // together, 1) * together
    task = _Task(teacher, weights, loss, labels, emitted, rows, frozen, reach, candidates, chunk)
    if torch.is_grad_enabled():
        return LinearLoss(*_Linear.apply(hidden, *head, task))
    return task.run(hidden, head, (False, False, False))[0]


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]  # by hidden states, weight and bias


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, task: _Task) -> LinearLoss:
        result, gradients = task.run(hidden, OutputHead(weight, bias), ctx.needs_input_grad[:3])
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(*(statistic for statistic in result[1:] if statistic is not None))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_value: Tensor, *statistics: Any) -> tuple[Tensor | None, ...]:
        gradients = (None if saved is None else saved * by_value.to(saved.dtype) for saved in ctx.saved_tensors)
        return *gradients, None


class _Statistics(NamedTuple):
    """The fields of `LinearLoss` of the rows [n] of a chunk."""

    weights: Tensor
    loss: Tensor
    agree: Tensor
    alpha: Tensor | None = None
    oov: Tensor | None = None
    ratio: Tensor | None = None


@dataclass(frozen=True)
class _Task:
    """What `linear_loss` is given and does not differentiate by; `rows` int64 are those with a weight."""

    teacher: Teacher | None
    weights: Tensor
    loss: Loss
    labels: Tensor | None
    emitted: Tensor | None
    rows: Tensor
    frozen: int
    reach: Reach | None
    candidates: Candidates | None
    chunk: int

    def run(self, hidden: Tensor, head: OutputHead, wanted: tuple[bool, ...]) -> tuple[LinearLoss, Gradients]:
        """The result, and the gradients that are `wanted` by hidden states, weight and bias."""
        dtype = compute_dtype(hidden, head.weight)
        sums = widened(dtype)
        cast = head.to(dtype)
        by_hidden = torch.zeros_like(hidden) if wanted[0] else None
        by_weight = torch.zeros_like(head.weight, dtype=sums) if wanted[1] else None
        by_trained = None if by_weight is None else by_weight[:, self.frozen :]
        by_bias = torch.zeros_like(head.bias, dtype=sums) if wanted[2] and head.bias is not None else None
        parts = []
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in self._chunks():
                states = hidden[rows].to(dtype)
                logits = cast.logits(states)
                parts.append(self._measure(rows, logits, any(wanted)))
                if not any(wanted):
                    continue
                gradient = logits.to(dtype)  # it has taken their place
                if by_hidden is not None:
                    by_hidden[rows] = product(gradient, cast.weight).to(hidden.dtype)
                if by_trained is not None:
                    add_product(by_trained, gradient.T, states[:, self.frozen :])
                if by_bias is not None:
                    by_bias += gradient.sum(0, dtype=sums)
        statistics = _Statistics._make(self._whole(column, len(hidden)) for column in zip(*parts, strict=True))
        result = LinearLoss(torch.dot(statistics.weights.to(sums), statistics.loss), *statistics)
        return result, (by_hidden, _like(head.weight, by_weight), _like(head.bias, by_bias))

    def _whole(self, parts: tuple[Tensor | None, ...], size: int) -> Tensor | None:
        """One statistic of all rows, [N], from its chunks."""
        present = [part for part in parts if part is not None]
        if not present:
            return None
        values = torch.cat(present)
        return values.new_zeros(size).index_copy_(0, self.rows, values)

    def _chunks(self) -> tuple[Tensor, ...]:
        """The rows with a weight, `chunk` at a time; for `reach` those of so many rows, where chains stay whole."""
        if self.reach is None:
            return self.rows.split(self.chunk)
        more = max(len(self.weights) - 1, 0) // self.chunk
        if more == 0:
            return (self.rows,)
        begins = torch.arange(1, more + 1, device=self.rows.device) * self.chunk
        return self.rows.tensor_split(torch.searchsorted(self.rows, begins).tolist())

    def _measure(self, rows: Tensor, draft: Tensor, differentiate: bool) -> _Statistics:
        """Put the weighted gradient, if there is to be one, in the place of the logits `draft` [n, Vd]."""
        labels = None if self.labels is None else self.labels[rows]
        if self.teacher is None:
            assert labels is not None
            weights, found = self._row_loss(rows, draft, None, None, labels, 1.0 if differentiate else None)
            return _Statistics(weights, found.loss, found.draft.best == labels)
        head, positions = self.teacher.head, self.teacher.of(rows)
        target, whole = self.teacher.logits(positions), self.teacher.whole_distribution(positions)
        head.scale(draft)
        log_ratio = None if self.emitted is None else _log_ratio(head.to_draft(self.emitted[rows]), draft, target)
        log_sum = None if whole is None else whole.log_sum
        likeliest = None if self.candidates is None else self.candidates.likeliest(draft)
        scale = 1 / head.temperature if differentiate else None
        weights, found = self._row_loss(rows, draft, target, log_sum, labels, scale)
        assert found.target is not None
        whole = whole or found.target
        if self.candidates is not None and likeliest is not None:
            self.candidates.put(rows, likeliest, target, whole)
        if log_ratio is not None:
            log_ratio += whole.log_sum - found.draft.log_sum
        return _Statistics(
            weights,
            found.loss,
            agree=head.to_target(found.draft.best) == whole.best,
            alpha=found.alpha,
            oov=-torch.expm1((found.target.log_sum - whole.log_sum).clamp(max=0)),
            ratio=None if log_ratio is None else log_ratio.clamp(max=0).exp(),
        )

    def _row_loss(
        self,
        rows: Tensor,
        draft: Tensor,
        target: Tensor | None,
        log_sum: Tensor | None,
        labels: Tensor | None,
        scale: float | None,
    ) -> tuple[Tensor, RowLoss]:
        """What the rows count, and `row_loss` of them, its gradient times `scale`; None for no gradient."""
        weights = self.weights[rows].to(draft.dtype)
        scaled = None if scale is None else weights * scale
        if self.reach is None:
            return weights, row_loss(draft, target, log_sum, labels, scaled, self.loss)
        if labels is None:
            assert target is not None
            labels = target.argmax(-1)
        chosen = _of(draft, labels)
        found = row_loss(draft, target, log_sum, labels, scaled, self.loss)
        factors = self.reach.of(rows, chosen - found.draft.log_sum)
        if scale is not None:
            draft *= factors[:, None]
        return weights * factors, found


def _log_ratio(token: Tensor, draft: Tensor, target: Tensor) -> Tensor:
    """The difference of the draft's and the target's logits [n, Vd] of one token per row: [n], −∞ where it is −1."""
    known = token.clamp(min=0)
    return torch.where(token < 0, -torch.inf, _of(draft, known) - _of(target, known))


def _of(logits: Tensor, tokens: Tensor) -> Tensor:
    """The logit of one token per row: [n] of logits [n, Vd]."""
    return logits.gather(-1, tokens[:, None])[:, 0]


def _like(parameter: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    return None if parameter is None or gradient is None else gradient.to(parameter.dtype)
