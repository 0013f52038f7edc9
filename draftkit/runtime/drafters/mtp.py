"""Chain drafting with a target's own multi-token prediction head, which feeds on its state as EAGLE's does."""

from __future__ import annotations

import torch
from transformers import CONFIG_MAPPING, PreTrainedModel, PreTrainedTokenizerBase

from draftkit.layout.families.mtp import MtpSpec
from draftkit.layout.folder import Draft
from draftkit.models.mtp import MtpModel, load_mtp, one_layer
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.drafters.chain import ChainDrafter
from draftkit.targets.attention import chooses
from draftkit.targets.footprint import footprint
from draftkit.targets.states import FINAL, AuxLayers


class MtpDrafter(ChainDrafter[MtpModel]):
    """`slot_numbers`: what the head keeps of a position. `num_layers`: those of the target."""

    def __init__(self, model: MtpModel, slot_numbers: int, num_layers: int):
        super().__init__(model)
        self.joins_prompts = not chooses(model.layer_config)
        self._slot_numbers = slot_numbers
        self._num_layers = num_layers

    @property
    def aux_layers(self) -> AuxLayers:
        return AuxLayers((FINAL if self.model.spec.hidden_state == "after_norm" else self._num_layers,))

    def slot_bytes(self, capacity: int, k: int) -> int:
        return capacity * self._slot_numbers * self.dtype.itemsize


def load_drafter(draft: Draft, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> MtpDrafter:
    """The drafter of a target's own head."""
    from draftkit.runtime.drafters.mtp_in_turn import MtpInTurnDrafter  # which builds on this module

    config = target.config.get_text_config()
    model = load_mtp(draft, target, attention=ATTENTION)
    drafter = MtpInTurnDrafter if model.spec.modules_run > 1 else MtpDrafter
    return drafter(model, footprint(one_layer(config)).cached, config.num_hidden_layers)


def slot_bytes(draft: Draft, dtype: torch.dtype, capacity: int, k: int) -> int:
    """Keys and values, or their latents; of modules that are used in turn, those of each step."""
    spec = draft.spec.architecture.expect(MtpSpec)
    stated = dict(spec.config)
    config = CONFIG_MAPPING[str(stated.pop("model_type"))].from_dict(stated).get_text_config()
    caches = k if spec.modules_run > 1 else 1
    return caches * footprint(one_layer(config)).slot_bytes(dtype, capacity, k)
