"""Drafting token by token from the target's hidden states, then from the draft's own.

The draft's row for position p pairs the target's feature of p with the token at p + 1. Rows made from the draft's own
feedback are rewritten with true features once the target has spoken, so the draft's keys and values after any
rejection are those of a fresh prefill.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from draftkit.models.chain import ChainModel, ChainOutput
from draftkit.runtime.cache import SlotCache
from draftkit.runtime.drafters.protocol import Committed, Draw, Grow, NewSequence, Proposal
from draftkit.runtime.fusion.packed_linear import dtype_of
from draftkit.runtime.memory_plan import SlotBytes
from draftkit.runtime.ops.expand_rows import expand_rows
from draftkit.runtime.prefill import features_before_last, pieces_before_last, prefill_forwards
from draftkit.runtime.slot_rows import Branches
from draftkit.targets.states import AuxLayers

Model = TypeVar("Model", bound=ChainModel)


class ChainDrafter(ABC, Generic[Model]):
    """Drafts token by token: the first comes from the target's features, each further one from the draft's own
    feedback."""

    max_tokens = None
    max_positions: int | None = None
    positions_end = False
    slot_bytes: SlotBytes | None = None
    joins_prompts = True  # whether several go into one forward

    def __init__(self, model: Model):
        self.model = model
        self.cache = SlotCache(0, 0)

    @property
    @abstractmethod
    def aux_layers(self) -> AuxLayers:
        """The target's hidden states that it reads."""

    @property
    def overlap(self) -> int:
        """A position whose feature has waited for the token after it."""
        return 1

    @property
    def dtype(self) -> torch.dtype:
        return dtype_of(self.model)

    @property
    def module(self) -> nn.Module:
        return self.model

    def allocate(self, num_slots: int, capacity: int, k: int) -> None:
        self.cache = SlotCache(num_slots, capacity)

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[NewSequence]) -> None:
        """Take in all rows of prompts but each one's last, whose feature waits for the token after it."""
        known = [prompt for prompt in prompts if len(prompt.tokens) > 1]
        if known:
            tokens = torch.cat([prompt.tokens[1:] for prompt in known])[None]
            features = features_before_last(known)
            pieces = pieces_before_last(known)
            for taken, positions, kv in prefill_forwards(self.cache, pieces, tokens.device, joins=self.joins_prompts):
                self.model(tokens[:, taken], self.model.fuse(features[:, taken]), positions, kv=kv)

    @torch.inference_mode()
    def propose(self, committed: Committed, k: int, draw: Draw) -> Proposal:
        (head_input, feedback), position = self._first(committed)
        ids = self.model.target_ids
        drafted = [draw(0, self.model.logits(head_input[:, 0]), ids)]
        for step in range(1, k):
            head_input, feedback = self._pass(committed, drafted[-1][:, None], feedback, position + step)
            drafted.append(draw(step, self.model.logits(head_input[:, 0]), ids))
        return Proposal(torch.stack(drafted, dim=1))

    @torch.inference_mode()
    def expand(self, committed: Committed, depth: int, grow: Grow) -> None:
        (head_input, feedback), position = self._first(committed)
        first, ids = position + 1, self.model.target_ids
        for level in range(depth):
            frontier = grow(self.model.logits(head_input), ids)
            if level + 1 < depth:
                branches = Branches(first, first + frontier.depths, frontier.visible)
                kv = self.cache.rows_of_tree(committed.slots, branches, committed.length)
                hidden = feedback.take_along_dim(frontier.parents[:, :, None], 1)
                head_input, feedback = self.model(frontier.tokens, hidden, branches.of_rows, kv=kv)

    def _first(self, committed: Committed) -> tuple[ChainOutput, Tensor]:
        """Run the committed rows; the newest one's output [B, 1, H] and its position int64 [B, 1]."""
        assert committed.features is not None
        hidden = self.model.fuse(committed.features)
        rows = expand_rows(committed.tokens, committed.counts, committed.start - 1, committed.length, hidden=hidden)
        assert rows.hidden is not None
        output = self._pass(committed, rows.tokens, rows.hidden, rows.positions)
        return ChainOutput(*map(rows.drafting, output)), rows.positions.gather(1, rows.sampled)

    def _pass(self, committed: Committed, tokens: Tensor, hidden: Tensor, positions: Tensor) -> ChainOutput:
        rows = self.cache.rows(committed.slots, positions, committed.length)
        output: ChainOutput = self.model(tokens, hidden, positions, kv=rows)
        return output
