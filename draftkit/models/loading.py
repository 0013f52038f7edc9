"""From a unified draft on disk to a module ready to run, in the target's dtype and on its device.

Weights that the spec borrows are the target's own. All raise `TargetError` when the draft does not fit the target,
`LayoutError` when its mask token is none of its tokens, and `NonFiniteError` for weights with NaN or infinity.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftkit.errors import LayoutError, TargetError
from draftkit.layout.folder import Draft
from draftkit.layout.spec import CausalLMSpec, EagleSpec, MedusaSpec, MlpSpeculatorSpec, ParallelDrafting
from draftkit.models.dequantise import dequantised
from draftkit.models.eagle import EagleModel, rotary_embedding
from draftkit.models.finite import require_finite
from draftkit.models.medusa import MedusaModel
from draftkit.models.mlp_speculator import MlpSpeculatorModel
from draftkit.models.pard2 import Pard2Model
from draftkit.models.target import FINAL, Taps, Target, load_target

Module = TypeVar("Module", bound=nn.Module)


def load_eagle(
    draft: Draft, target: PreTrainedModel, *, attention: str, dtype: torch.dtype | None = None
) -> EagleModel:
    """An EAGLE-style draft. `attention` names the attention function; `dtype` None is the target's."""
    spec = draft.spec.architecture
    assert isinstance(spec, EagleSpec)
    if spec.parallel is not None and not spec.parallel.mask_state:
        raise LayoutError("the draft proposes in parallel and has no mask state", where=draft.path)
    _check_sizes(draft, spec, target)
    _check_mask_token(draft, spec.parallel, spec.vocab_size)
    with torch.device("meta"):
        model = EagleModel(spec, attention)
    _fill(model, _weights(draft, target, dtype=dtype))
    model.rotary = rotary_embedding(model.rotary.config).to(target.device)  # its frequencies are not weights
    model.borrow(target.get_input_embeddings(), target.get_output_embeddings())
    return model


def load_medusa(draft: Draft, target: PreTrainedModel) -> MedusaModel:
    """Medusa's heads."""
    spec = draft.spec.architecture
    assert isinstance(spec, MedusaSpec)
    _check_sizes(draft, spec, target)
    with torch.device("meta"):
        model = MedusaModel(spec)
    _fill(model, _weights(draft, target))
    model.borrow(target.get_output_embeddings())
    return model


def load_mlp_speculator(
    draft: Draft, target: PreTrainedModel, *, dtype: torch.dtype | None = None
) -> MlpSpeculatorModel:
    """An MLP speculator; `dtype` None is the target's."""
    spec = draft.spec.architecture
    assert isinstance(spec, MlpSpeculatorSpec)
    _check_sizes(draft, spec, target)
    with torch.device("meta"):
        model = MlpSpeculatorModel(spec)
    return _fill(model, _weights(draft, target, "speculator.", dtype))


def load_causal_lm(draft: Draft, target: PreTrainedModel, *, attention: str) -> Target:
    """A causal language model, of PARD-2 without its projection; its logits are those of the spec's `head_ids`."""
    spec = draft.spec.architecture
    assert isinstance(spec, CausalLMSpec)
    _check_mask_token(draft, spec.parallel, spec.vocab_size)
    model = load_target(draft.path, device=str(target.device), dtype=target.dtype, attention=attention)
    if spec.head_ids is not None:
        _keep_rows(model, torch.tensor(spec.head_ids, device=target.device))
    return Target(model)


def _keep_rows(model: PreTrainedModel, ids: Tensor) -> None:
    """Give a model an output layer with the rows `ids` int64 [Vd] of its own; a tied embedding stays whole."""
    whole = model.get_output_embeddings()
    rows = nn.Linear(whole.in_features, len(ids), bias=whole.bias is not None, device="meta")
    kept = {name: weight.detach()[ids] for name, weight in whole.named_parameters()}
    model.set_output_embeddings(_fill(rows, kept))


def load_pard2(draft: Draft, target: PreTrainedModel, *, attention: str) -> tuple[Pard2Model, Taps]:
    """PARD-2 with its projection, and the target's states that it reads."""
    spec = draft.spec.architecture
    assert isinstance(spec, CausalLMSpec)
    features = spec.target_features
    assert features is not None
    config = target.config.get_text_config()
    taps = Taps(tuple(_state(draft, i, config.num_hidden_layers) for i in features.layer_ids))
    if features.size != len(taps.states) * config.hidden_size:
        raise TargetError(
            f"the draft reads features of {features.size} numbers from {len(taps.states)} layers; the target's hidden "
            f"states have {config.hidden_size}",
            where=draft.path,
            hint=f"evaluate it with its own target: {draft.provenance.target or 'see the model card'}",
        )
    lm = load_causal_lm(draft, target, attention=attention)
    with torch.device("meta"):
        target_proj = nn.Linear(features.size, lm.hidden_size, bias=features.projection_bias)
    _fill(target_proj, _weights(draft, target, "target_proj."))
    return Pard2Model(lm, target_proj, features.scale), taps


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


def _weights(
    draft: Draft, target: PreTrainedModel, prefix: str = "", dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """The tensors whose names start with `prefix`, without it; in the target's dtype where there is no other."""
    found = {name.removeprefix(prefix): t.load() for name, t in draft.tensors.items() if name.startswith(prefix)}
    weights = {
        name: tensor.to(target.device, dtype or target.dtype if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in dequantised(found, draft.spec.quantization).items()
    }
    require_finite(((prefix + name, tensor) for name, tensor in weights.items()), draft.path)
    return weights


def _fill(module: Module, weights: dict[str, Tensor]) -> Module:
    # The folder was validated against the spec, and the module is built from the same spec: strict cannot fail.
    module.load_state_dict(weights, strict=True, assign=True)
    return module.eval().requires_grad_(False)


def _check_sizes(draft: Draft, spec: EagleSpec | MedusaSpec | MlpSpeculatorSpec, target: PreTrainedModel) -> None:
    config = target.config.get_text_config()
    for what, mine, theirs in (
        ("hidden states", spec.target_hidden_size, config.hidden_size),
        ("tokens", spec.vocab_size, config.vocab_size),
    ):
        if mine != theirs:
            raise TargetError(
                f"the draft is for a target with {mine} {what}; this one has {theirs}",
                where=draft.path,
                hint=f"evaluate it with its own target: {draft.provenance.target or 'see the model card'}",
            )


def _check_mask_token(draft: Draft, parallel: ParallelDrafting | None, vocab_size: int) -> None:
    if parallel is not None and not 0 <= parallel.mask_token_id < vocab_size:
        raise LayoutError(
            f"the mask token is {parallel.mask_token_id}; the draft has {vocab_size} tokens",
            where=draft.path,
            hint="convert it again with --set mask_token_id=…",
        )
