"""Chain drafting with an EAGLE-style draft: EAGLE-1/2, HASS, EAGLE-3.

The draft's row for position p pairs the target's feature of p with the token at p + 1. Rows made from the draft's own
feedback are rewritten with true features once the target has spoken, so the draft's keys and values after any
rejection are those of a fresh prefill.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.folder import Draft
from draftkit.models.eagle import EagleModel, EagleOutput, load_eagle
from draftkit.models.states import FINAL, AuxLayers
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.cache import SlotCache
from draftkit.runtime.drafters.protocol import Committed, Draw, Proposal
from draftkit.runtime.ops.expand_rows import expand_rows


class EagleDrafter:
    """The first token comes from true features, each further one from the draft's own feedback."""

    max_tokens = None
    max_positions: int | None = None

    def __init__(self, model: EagleModel):
        self.model = model
        self.cache = SlotCache(0, 0)

    @property
    def aux_layers(self) -> AuxLayers:
        return AuxLayers(self.model.spec.aux_layer_ids or (FINAL,))

    @property
    def module(self) -> nn.Module:
        return self.model

    def slot_bytes(self, capacity: int, k: int) -> int:
        return capacity * self.model.spec.decoder.cached_numbers * next(self.model.parameters()).itemsize

    def allocate(self, num_slots: int, capacity: int, k: int) -> None:
        self.cache = SlotCache(num_slots, capacity)

    @torch.inference_mode()
    def prefill(self, slot: int, prompt: Tensor, features: Tensor | None) -> None:
        assert features is not None
        rows = len(prompt) - 1  # the last prompt token's feature waits for the token after it
        if rows == 0:
            return
        positions = torch.arange(rows, device=prompt.device)[None]
        slots = torch.tensor([slot], device=prompt.device)
        hidden = self.model.fuse(features[None, :-1])
        self.model(prompt[None, 1:], hidden, positions, kv=self.cache.rows(slots, positions, rows, prompt=True))

    @torch.inference_mode()
    def propose(self, committed: Committed, k: int, draw: Draw) -> Proposal:
        assert committed.features is not None
        hidden = self.model.fuse(committed.features)
        rows = expand_rows(committed.tokens, committed.counts, committed.start - 1, committed.length, hidden=hidden)
        assert rows.hidden is not None
        head_input, feedback = map(rows.drafting, self._pass(committed, rows.tokens, rows.hidden, rows.positions))
        position = rows.positions.gather(1, rows.sampled)  # [B, 1]
        drafted = [self._draw(draw, 0, head_input[:, 0])]
        for step in range(1, k):
            head_input, feedback = self._pass(committed, drafted[-1][:, None], feedback, position + step)
            drafted.append(self._draw(draw, step, head_input[:, 0]))
        return Proposal(torch.stack(drafted, dim=1))

    def _pass(self, committed: Committed, tokens: Tensor, hidden: Tensor, positions: Tensor) -> EagleOutput:
        rows = self.cache.rows(committed.slots, positions, committed.length)
        return self.model(tokens, hidden, positions, kv=rows)

    def _draw(self, draw: Draw, step: int, head_input: Tensor) -> Tensor:
        """The token [B] drawn from a row [B, H]."""
        return draw(step, self.model.logits(head_input), self.model.target_ids)


def load_drafter(draft: Draft, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> EagleDrafter:
    """The drafter of an EAGLE-style draft, one token after the other or all in one pass."""
    from draftkit.runtime.drafters.eagle_parallel import PEagleDrafter  # which builds on this module

    model = load_eagle(draft, target, attention=ATTENTION)
    return EagleDrafter(model) if model.spec.parallel is None else PEagleDrafter(model)


def slot_bytes(draft: Draft, dtype: torch.dtype, capacity: int, k: int) -> int:
    """Keys and values."""
    return capacity * draft.spec.architecture.expect(EagleSpec).decoder.cached_numbers * dtype.itemsize
