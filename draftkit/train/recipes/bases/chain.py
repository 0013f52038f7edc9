"""What the recipes of drafts share that go on token by token from the target's hidden states: their chains.

Chains of drafts start from every position of a batch at once. Position i pairs the target's feature with token i + 1;
step t reads token i + 1 + t, always the true one, at position i + t, and drafts token i + 2 + t. R rows of all steps,
H draft width, N positions, K steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from draftkit.errors import DraftkitError
from draftkit.layout.spec import DraftSpec
from draftkit.models.chain import ChainModel, ChainOutput
from draftkit.train.attention import ChainSteps
from draftkit.train.batch import TrainingBatch, shifted
from draftkit.train.losses.linear import LinearLoss, linear_loss
from draftkit.train.losses.table import Loss, parse_loss
from draftkit.train.losses.teacher import OutputHead, TargetHead, Teacher, target_head
from draftkit.train.losses.weights import Reach
from draftkit.train.recipes.recipe import Chains, Origin, Recipe


class Step(NamedTuple):
    """The rows of a step: `rows` int64 [R] are their positions, `output` has [1, R, H]."""

    rows: Tensor
    output: ChainOutput


def chain_steps(draft: ChainModel, batch: TrainingBatch, drafted: Tensor, *, detached: bool = False) -> Iterator[Step]:
    """The steps of `drafted` bool [K, N]; the first runs all positions, whose keys and values the others see. Where no
    chain has a second step, it is the only one.

    `detached`: gradients do not flow from a step into the one before (HASS). Raises `DraftkitError` for chains that are
    longer than the draft's sliding window.
    """
    features = batch.last if batch.features is None else batch.features
    hidden = draft.fuse(features.float())  # the draft's parameters are, whatever the target's are
    if draft.window is not None and draft.window < len(drafted):
        raise DraftkitError(f"chains of {len(drafted)} drafts", expected=f"at most {draft.window}, the draft's window")
    chain = ChainSteps(batch.sample_ids)
    for t in range(len(drafted)):
        if t == 1:
            kept = drafted[1].nonzero()[:, 0]
            if len(kept) == 0:
                return
            chain.go_on(kept)
            hidden = hidden[:, kept]
        elif t > 1:
            chain.go_on()
        rows = chain.rows
        output = draft(shifted(batch.tokens, 1 + t)[:, rows], hidden, batch.positions[:, rows] + t, chain=chain)
        yield Step(rows, output)
        hidden = output.feedback.detach() if detached else output.feedback


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
        """Whether the draft vocabulary has the target's choice for token i + 2 + t: bool [K, N]."""
        if teacher.distribution is None:
            return torch.ones_like(drafted)
        known = self.head.to_draft(teacher.distribution.best) >= 0
        return torch.stack([shifted(known, 1 + t) for t in range(len(drafted))])

    @torch.no_grad()
    def chains(self, batch: TrainingBatch, k: int) -> Chains:
        drafted = batch.drafted(k)
        rows = self.rows(self.steps(batch, drafted))
        teacher = self.head.teacher(batch.last[0])
        found = self.compare(batch, rows, teacher, drafted.float(), parse_loss("tv"))
        return Chains.of(drafted, found, rows.steps, rows.positions)
