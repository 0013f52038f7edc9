"""What the recipes of drafts share that go on token by token from the target's hidden states: their chains.

R rows of all steps, H draft width, N positions, K steps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from draftkit.layout.spec import DraftSpec
from draftkit.models.chain import ChainModel
from draftkit.train.batch import TrainingBatch, ahead
from draftkit.train.chain import Step, chain_steps
from draftkit.train.losses.head import OutputHead
from draftkit.train.losses.linear import LinearLoss, linear_loss
from draftkit.train.losses.parse import Loss, parse_loss
from draftkit.train.losses.reach import Reach
from draftkit.train.losses.teacher import TargetHead, Teacher
from draftkit.train.recipes.recipe import Chains, Origin, Recipe
from draftkit.train.teaching import target_head


class ChainRows(NamedTuple):
    """The rows of all steps, one after the other: `steps` and `positions` int64 [R], `hidden` [R, H] for the head."""

    steps: Tensor
    positions: Tensor
    hidden: Tensor


class ChainRecipe(Recipe):
    """A recipe for a `ChainModel`; `head` is the target's output layer, restricted to the draft vocabulary."""

    draft: ChainModel

    def __init__(self, draft: ChainModel, spec: DraftSpec, origin: Origin, temperature: float):
        super().__init__(draft, spec)
        self.head: TargetHead = target_head(origin.target, draft.target_ids, temperature)

    def steps(self, batch: TrainingBatch, drafted: Tensor, *, detached: bool = False) -> list[Step]:
        return list(chain_steps(self.draft, batch, drafted, detached=detached))

    def rows(self, steps: list[Step]) -> ChainRows:
        number = [torch.full_like(step.rows, t) for t, step in enumerate(steps)]
        hidden = torch.cat([step.output.head_input[0] for step in steps])
        return ChainRows(torch.cat(number), torch.cat([step.rows for step in steps]), hidden)

    def compare(
        self,
        batch: TrainingBatch,
        rows: ChainRows,
        teacher: Teacher,
        weights: Tensor,
        loss: Loss,
        reach: Reach | None = None,
    ) -> LinearLoss:
        """The draft's distribution of every row against the target's; `weights` float32 [K, N]."""
        size = batch.tokens.shape[1]
        taught = (rows.positions + 1 + rows.steps) % size
        layer = self.draft.lm_head
        assert isinstance(layer, nn.Linear)
        scale = self.draft.logit_scale
        return linear_loss(
            rows.hidden if scale == 1 else rows.hidden * scale,
            OutputHead(layer.weight, layer.bias),
            teacher.at(taught),
            weights[rows.steps, rows.positions],
            loss,
            emitted=batch.tokens[0, (taught + 1) % size],
            reach=reach,
        )

    def drawable(self, teacher: Teacher, drafted: Tensor) -> Tensor:
        """bool [K, N]: the draft vocabulary has the target's choice for token i + 2 + t."""
        if teacher.distribution is None:
            return torch.ones_like(drafted)
        known = self.head.to_draft(teacher.distribution.best) >= 0
        return torch.stack([ahead(known, 1 + t) for t in range(len(drafted))])

    @torch.no_grad()
    def chains(self, batch: TrainingBatch, k: int) -> Chains:
        drafted = batch.drafted(k)
        rows = self.rows(self.steps(batch, drafted))
        teacher = self.head.teacher(batch.last[0])
        found = self.compare(batch, rows, teacher, drafted.float(), parse_loss("tv"))
        return Chains(
            drafted, *(spread(values, rows, drafted) for values in (found.agree, found.ratio, found.alpha, found.oov))
        )


def spread(values: Tensor | None, rows: ChainRows, like: Tensor) -> Tensor:
    """Values [R] of rows at their places in [K, N]."""
    assert values is not None
    out = values.new_zeros(like.shape)
    out[rows.steps, rows.positions] = values
    return out
