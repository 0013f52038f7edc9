"""Drafting with Medusa's heads: a chain of one token from each, or a tree of several."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftkit.layout.folder import Draft
from draftkit.models.medusa import MedusaModel, load_medusa
from draftkit.runtime.drafters.last_state import LastStateDrafter, last_state
from draftkit.runtime.drafters.protocol import Committed, Draw, Grow, Proposal, expand_marginals
from draftkit.runtime.memory_plan import SlotBytes


class MedusaDrafter(LastStateDrafter):
    """Drafts with independent heads, which do not see each other's tokens."""

    def __init__(self, model: MedusaModel):
        super().__init__(model.spec.num_heads, model)
        self.model = model

    @torch.inference_mode()
    def propose(self, committed: Committed, k: int, draw: Draw) -> Proposal:
        _, features = last_state(committed)
        ids = self.model.target_ids
        drafted = [draw(head, self.model(head, features), ids) for head in range(k)]
        return Proposal(torch.stack(drafted, dim=1))

    def expand(self, committed: Committed, depth: int, grow: Grow) -> None:
        expand_marginals(self, committed, depth, grow)


def load_drafter(draft: Draft, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> MedusaDrafter:
    """The drafter of Medusa's heads."""
    return MedusaDrafter(load_medusa(draft, target))


def slot_bytes(draft: Draft, dtype: torch.dtype) -> SlotBytes:
    """No bytes: the heads keep nothing between rounds."""
    return lambda capacity, k: 0
