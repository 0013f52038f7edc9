"""Chains of drafts from every position of a batch at once, for drafts that feed on the target's hidden states.

Position i pairs the target's feature with token i + 1; step t reads token i + 1 + t, always the true one, at position
i + t, and drafts token i + 2 + t. N positions, H draft width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from draftkit.errors import DraftkitError
from draftkit.models.chain import ChainModel, ChainOutput
from draftkit.train.attention import ChainSteps
from draftkit.train.batch import TrainingBatch, ahead


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
        output = draft(ahead(batch.tokens, 1 + t)[:, rows], hidden, batch.positions[:, rows] + t, chain=chain)
        yield Step(rows, output)
        hidden = output.feedback.detach() if detached else output.feedback
