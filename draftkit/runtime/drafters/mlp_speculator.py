"""Drafting with IBM's MLP speculator."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftkit.layout.folder import Draft
from draftkit.models.mlp_speculator import MlpSpeculatorModel, load_mlp_speculator
from draftkit.runtime.drafters.last_state import LastStateDrafter, last_state
from draftkit.runtime.drafters.protocol import Committed, Draw, Grow, Proposal
from draftkit.runtime.memory_plan import SlotBytes


class MlpSpeculatorDrafter(LastStateDrafter):
    """Drafts with one head a step, each of which reads the token drawn in the step before."""

    def __init__(self, model: MlpSpeculatorModel):
        super().__init__(model.spec.num_heads, model)
        self.model = model

    @torch.inference_mode()
    def propose(self, committed: Committed, k: int, draw: Draw) -> Proposal:
        token, features = last_state(committed)
        state = self.model.start(features)
        drafted = []
        for step in range(k):
            logits, state = self.model(step, state, token)
            token = draw(step, logits)
            drafted.append(token)
        return Proposal(torch.stack(drafted, dim=1))

    @torch.inference_mode()
    def expand(self, committed: Committed, depth: int, grow: Grow) -> None:
        token, features = last_state(committed)
        tokens, state = token[:, None], self.model.start(features)[:, None]
        for step in range(depth):
            logits, state = self.model(step, state, tokens)
            frontier = grow(logits)
            tokens, state = frontier.tokens, state.take_along_dim(frontier.parents[:, :, None], 1)


def load_drafter(
    draft: Draft, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> MlpSpeculatorDrafter:
    """The drafter of an MLP speculator."""
    return MlpSpeculatorDrafter(load_mlp_speculator(draft, target))


def slot_bytes(draft: Draft, dtype: torch.dtype) -> SlotBytes:
    """No bytes: the heads keep nothing between rounds."""
    return lambda capacity, k: 0
