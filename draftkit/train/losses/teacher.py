"""The target as a teacher: its final states, from which its distribution is computed anew wherever it is needed.

M positions, W the target's width, V its vocabulary, Vd the draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from draftkit.errors import DraftkitError
from draftkit.train.kernels.row_loss import RowDistribution, row_distribution
from draftkit.train.losses.head import OutputHead, compute_dtype, rows_at_once


@dataclass(frozen=True)
class TargetHead:
    """The target's output layer and what the draft sees of it; made once per training.

    `d2t_ids` int64 [Vd]: the target's ids of the draft vocabulary, None where that is the whole vocabulary.
    `temperature` divides the logits of target and draft alike, as in serving.
    """

    head: OutputHead
    d2t_ids: Tensor | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise DraftkitError(
                f"temperature {self.temperature}", expected="above 0", hint="loss ce for greedy serving"
            )

    @cached_property
    @torch.no_grad()
    def restricted(self) -> OutputHead:
        """The rows of the draft vocabulary, in the type they are multiplied in."""
        weight, bias = self.head
        if self.d2t_ids is not None:
            weight, bias = weight[self.d2t_ids], None if bias is None else bias[self.d2t_ids]
        return OutputHead(weight, bias).to(compute_dtype(weight))

    @cached_property
    def _t2d_ids(self) -> Tensor:
        """int64 [V]: the place in the draft vocabulary, −1 outside."""
        ids = torch.arange(len(self.head.weight), device=self.head.weight.device)
        return ids if self.d2t_ids is None else torch.full_like(ids, -1).scatter_(0, self.d2t_ids, ids[: len(self)])

    def __len__(self) -> int:
        """Vd."""
        return len(self.head.weight if self.d2t_ids is None else self.d2t_ids)

    def to_draft(self, tokens: Tensor) -> Tensor:
        """Target ids to places in the draft vocabulary, −1 outside."""
        return self._t2d_ids[tokens]

    def to_target(self, tokens: Tensor) -> Tensor:
        """Places in the draft vocabulary to target ids."""
        return tokens if self.d2t_ids is None else self.d2t_ids[tokens]

    def scale(self, logits: Tensor) -> Tensor:
        """Divide by the temperature, in place."""
        return logits if self.temperature == 1 else logits.div_(self.temperature)

    @torch.no_grad()
    def teacher(self, states: Tensor) -> Teacher:
        """A teacher of the target's final normed `states` [M, W]: what depends on the whole vocabulary, done once."""
        if self.d2t_ids is None:
            return Teacher(self, states)
        head = self.head.to(compute_dtype(self.head.weight))
        chunks = []
        with torch.autocast(states.device.type, enabled=False):
            for chunk in states.split(rows_at_once(len(head.weight), states.device)):
                chunks.append(row_distribution(self.scale(head.logits(chunk.to(head.weight.dtype)))))
        return Teacher(self, states, RowDistribution(*(torch.cat(parts) for parts in zip(*chunks, strict=True))))


@dataclass(frozen=True)
class Teacher:
    """The target's distribution at each row.

    `states` [M, W], `distribution` [M] over the target's whole vocabulary; None where the draft vocabulary is the whole
    one, and the loss finds it by itself. `positions` int64 [N]: the position that teaches each row, None for each its
    own.
    """

    head: TargetHead
    states: Tensor
    distribution: RowDistribution | None = None
    positions: Tensor | None = None

    def at(self, positions: Tensor) -> Teacher:
        """The same for rows taught by `positions` int64 [N], as the rows of all steps of a training-time test."""
        return replace(self, positions=positions)

    def of(self, rows: Tensor) -> Tensor:
        """The positions that teach `rows`, both int64 [n]."""
        return rows if self.positions is None else self.positions[rows]

    def whole_distribution(self, positions: Tensor) -> RowDistribution | None:
        """`distribution` at positions int64 [n]."""
        return (
            None if self.distribution is None else RowDistribution(*(values[positions] for values in self.distribution))
        )

    def logits(self, positions: Tensor) -> Tensor:
        """Over the draft vocabulary, divided by the temperature: float32 [n, Vd] at positions int64 [n]."""
        head = self.head.restricted
        return self.head.scale(head.logits(self.states[positions].to(head.weight.dtype)))
