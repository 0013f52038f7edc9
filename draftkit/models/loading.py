"""From a unified draft on disk to a module ready to run."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from draftkit.errors import TargetError
from draftkit.layout.folder import Draft
from draftkit.layout.spec import EagleSpec
from draftkit.models.eagle import EagleModel


def load_eagle(draft: Draft, target: PreTrainedModel, *, attention: str) -> EagleModel:
    """Build an EAGLE-style draft in the target's dtype and on its device; borrowed weights are the target's own.

    Raises `TargetError` when the draft does not fit the target.
    """
    spec = draft.spec.architecture
    assert isinstance(spec, EagleSpec)
    _check_sizes(draft, spec, target)
    with torch.device("meta"):
        model = EagleModel(spec, attention)
    weights = {name: handle.load() for name, handle in draft.tensors.items()}
    for name, tensor in weights.items():
        weights[name] = tensor.to(target.device, target.dtype if tensor.is_floating_point() else tensor.dtype)
    # The folder was validated against the spec, and the module is built from the same spec: strict cannot fail.
    model.load_state_dict(weights, strict=True, assign=True)
    model.rotary = type(model.rotary)(model.rotary.config).to(target.device)  # its frequencies are not weights
    model.borrow(target.get_input_embeddings(), target.get_output_embeddings())
    return model.eval().requires_grad_(False)


def _check_sizes(draft: Draft, spec: EagleSpec, target: PreTrainedModel) -> None:
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
