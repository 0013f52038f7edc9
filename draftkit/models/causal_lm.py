"""A causal language model as draft; of PARD-2, with a projection of the target's features in its input embeddings.

Shapes: B sequences, T rows, F feature width, H draft width, V draft vocabulary. Source: AMD-AGI/PARD `pard2_infer.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftkit.errors import TargetError
from draftkit.layout.families.causal_lm import CausalLMSpec
from draftkit.layout.folder import Draft
from draftkit.models.weights import check_mask_token, fill, load_into
from draftkit.targets.attention import KeyValues, Sight, narrow
from draftkit.targets.states import FINAL, AuxLayers
from draftkit.targets.target import Target, load_target, own_model


class Pard2Model:
    """`lm` with `scale` · `target_proj`(feature) [H] added to each token's embedding."""

    def __init__(self, lm: Target, target_proj: nn.Linear, scale: float):
        self.lm = lm
        self.target_proj = target_proj
        self.scale = scale

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        kv: KeyValues,
        *,
        last_only: bool = False,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, T or 1, V] of tokens int64 [B, T] with the target's `features` [B, T, F] of the tokens before;
        the rest as of `Target.forward`."""
        embeddings = self.lm.model.get_input_embeddings()(tokens) + self.target_proj(features) * self.scale
        output = self.lm.forward(tokens, positions, kv, last_only=last_only, embeddings=embeddings, lengths=lengths)
        return output.logits


def load_causal_lm(draft: Draft, target: PreTrainedModel, *, attention: str) -> Target:
    """A causal language model, of PARD-2 without its projection; its logits are those of the spec's `head_ids`."""
    spec = draft.spec.architecture.expect(CausalLMSpec)
    check_mask_token(draft)
    model = load_target(
        draft.path, device=str(target.device), dtype=target.dtype, attention=attention, known=draft.kept(own_model)
    )
    _rotate(model, spec.config)
    narrow(model, Sight(spec.sliding_window, spec.sink_tokens))
    if spec.head_ids is not None:
        _keep_rows(model, torch.tensor(spec.head_ids, device=target.device))
    return Target(model)


def _rotate(model: PreTrainedModel, config: dict[str, object]) -> None:
    """Give a model the rotary positions of the spec's `config`, where those of its folder are others."""
    own, stated = model.config.get_text_config(), type(model.config).from_dict(dict(config)).get_text_config()
    if getattr(own, "rope_parameters", None) != getattr(stated, "rope_parameters", None):
        own.rope_parameters = stated.rope_parameters
        decoder: Any = model.get_decoder()  # every decoder of transformers that rotates keeps it under this name
        decoder.rotary_emb = type(decoder.rotary_emb)(own).to(model.device)


def _keep_rows(model: PreTrainedModel, ids: Tensor) -> None:
    """Give a model an output layer with the rows `ids` int64 [Vd] of its own; a tied embedding stays whole."""
    whole = model.get_output_embeddings()
    rows = nn.Linear(whole.in_features, len(ids), bias=whole.bias is not None, device="meta")
    kept = {name: weight.detach()[ids] for name, weight in whole.named_parameters()}
    model.set_output_embeddings(fill(rows, kept))


def load_pard2(draft: Draft, target: PreTrainedModel, *, attention: str) -> tuple[Pard2Model, AuxLayers]:
    """PARD-2 with its projection, and the target's states that it reads."""
    spec = draft.spec.architecture.expect(CausalLMSpec)
    features = spec.target_features
    assert features is not None
    config = target.config.get_text_config()
    aux_layers = AuxLayers(tuple(_state(draft, i, config.num_hidden_layers) for i in features.layer_ids))
    if features.size != len(aux_layers.states) * config.hidden_size:
        raise TargetError(
            f"the draft reads features of {features.size} numbers from {len(aux_layers.states)} layers; the target's "
            f"hidden states have {config.hidden_size}",
            where=draft.path,
            hint=f"evaluate it with its own target: {draft.provenance.target or 'see the model card'}",
        )
    lm = load_causal_lm(draft, target, attention=attention)
    with torch.device("meta"):
        target_proj = nn.Linear(features.size, lm.hidden_size, bias=features.projection_bias)
    load_into(target_proj, draft, target, "target_proj.")
    return Pard2Model(lm, target_proj, features.scale), aux_layers


def _state(draft: Draft, index: int, num_layers: int) -> int:
    """The state at an index of transformers' `hidden_states`, whose last one, unlike ours, is after the final norm."""
    state = index + num_layers + 1 if index < 0 else index
    if not 0 <= state <= num_layers:
        raise TargetError(
            f"the draft reads hidden state {index}; the target has {num_layers + 1}",
            where=draft.path,
            hint="the draft was made for another target",
        )
    return FINAL if state == num_layers else state
