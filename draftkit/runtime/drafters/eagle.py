"""Chain drafting with an EAGLE-style draft: EAGLE-1/2, HASS, EAGLE-3."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.folder import Draft
from draftkit.models.eagle import EagleModel, load_eagle
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.drafters.chain import ChainDrafter
from draftkit.targets.states import FINAL, AuxLayers


class EagleDrafter(ChainDrafter[EagleModel]):
    """One token after the other."""

    @property
    def aux_layers(self) -> AuxLayers:
        return AuxLayers(self.model.spec.aux_layer_ids or (FINAL,))

    def slot_bytes(self, capacity: int, k: int) -> int:
        return capacity * self.model.spec.decoder.cached_numbers * self.dtype.itemsize


def load_drafter(draft: Draft, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> EagleDrafter:
    """The drafter of an EAGLE-style draft, one token after the other or all in one pass."""
    from draftkit.runtime.drafters.eagle_parallel import PEagleDrafter  # which builds on this module

    model = load_eagle(draft, target, attention=ATTENTION)
    return EagleDrafter(model) if model.spec.parallel is None else PEagleDrafter(model)


def slot_bytes(draft: Draft, dtype: torch.dtype, capacity: int, k: int) -> int:
    """Keys and values."""
    return capacity * draft.spec.architecture.expect(EagleSpec).decoder.cached_numbers * dtype.itemsize
