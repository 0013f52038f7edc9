"""Drafting with an EAGLE-style draft: token by token (EAGLE-1/2, HASS, EAGLE-3), or all in one pass (P-EAGLE).

P-EAGLE's pass has the committed rows and K−1 mask rows, whose hidden input is a learned state. The keys and values of
the mask rows lie beyond the sequence and are overwritten by its rows before anything sees them.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.folder import Draft
from draftkit.models.eagle import EagleModel, load_eagle
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.drafters.chain import ChainDrafter
from draftkit.runtime.drafters.protocol import Committed, Draw, Grow, Proposal, expand_marginals
from draftkit.runtime.memory_plan import SlotBytes
from draftkit.runtime.ops.expand_rows import expand_rows
from draftkit.targets.states import FINAL, AuxLayers


class EagleDrafter(ChainDrafter[EagleModel]):
    """Drafts one token after the other, each from the state that gave the last one."""

    def __init__(self, model: EagleModel):
        super().__init__(model)
        limit = model.spec.max_positions
        self.max_positions = None if limit is None else limit.tokens

    @property
    def aux_layers(self) -> AuxLayers:
        return AuxLayers(self.model.spec.aux_layer_ids or (FINAL,))


class PEagleDrafter(EagleDrafter):
    """The learned mask state takes the place of captured features: it goes through the same norms and `fc`."""

    def __init__(self, model: EagleModel):
        super().__init__(model)
        assert model.spec.parallel is not None
        self.mask_token_id = model.spec.parallel.mask_token_id
        with torch.inference_mode():
            self.mask_hidden = model.fuse(model.mask_hidden)[0, 0]

    @torch.inference_mode()
    def propose(self, committed: Committed, k: int, draw: Draw) -> Proposal:
        assert committed.features is not None
        rows = expand_rows(
            committed.tokens,
            committed.counts,
            committed.start - 1,
            committed.length,
            masks=k - 1,
            mask_token=self.mask_token_id,
            hidden=self.model.fuse(committed.features),
            mask_hidden=self.mask_hidden,
        )
        assert rows.hidden is not None
        head_input = rows.drafting(self._pass(committed, rows.tokens, rows.hidden, rows.positions).head_input)
        ids = self.model.target_ids
        drafted = [draw(step, self.model.logits(head_input[:, step]), ids) for step in range(k)]
        return Proposal(torch.stack(drafted, dim=1))

    def expand(self, committed: Committed, depth: int, grow: Grow) -> None:
        expand_marginals(self, committed, depth, grow)


def load_drafter(draft: Draft, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> EagleDrafter:
    """The drafter of an EAGLE-style draft, one token after the other or all in one pass."""
    model = load_eagle(draft, target, attention=ATTENTION)
    return EagleDrafter(model) if model.spec.parallel is None else PEagleDrafter(model)


def slot_bytes(draft: Draft, dtype: torch.dtype) -> SlotBytes:
    """The bytes of a slot: the draft's keys and values."""
    per_position = draft.spec.architecture.expect(EagleSpec).decoder.cached_numbers * dtype.itemsize
    return lambda capacity, _: capacity * per_position
