"""From a unified draft on disk to a module ready to run, in the target's dtype and on its device.

Weights that the spec borrows are the target's own. All raise `TargetError` when the draft does not fit the target,
`LayoutError` when its mask token is none of its tokens, and `NonFiniteError` for weights with NaN or infinity.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftkit.convert.quantization import dequantized
from draftkit.errors import LayoutError, TargetError
from draftkit.layout.folder import Draft
from draftkit.models.rounded_inputs import round_inputs
from draftkit.targets.finite import require_finite

Module = TypeVar("Module", bound=nn.Module)


def load_weights(
    draft: Draft, target: PreTrainedModel, prefix: str = "", dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """The tensors whose names start with `prefix`, without it; in the target's dtype where there is no other."""
    weights = {
        name: tensor.to(target.device, dtype or target.dtype if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in load_stored(draft, "cpu", prefix).items()
    }
    require_finite(((prefix + name, tensor) for name, tensor in weights.items()), draft.path)
    return weights


def load_stored(draft: Draft, device: torch.device | str, prefix: str = "") -> dict[str, Tensor]:
    """The same tensors as `load_weights`, unchecked and in their stored dtypes, quantized ones in float32."""
    found = {name.removeprefix(prefix): t.load() for name, t in draft.tensors.items() if name.startswith(prefix)}
    return {name: tensor.to(device) for name, tensor in dequantized(found, draft.spec.stored_as).items()}


def load_into(
    module: Module, draft: Draft, target: PreTrainedModel, prefix: str = "", dtype: torch.dtype | None = None
) -> Module:
    """The module, built on the meta device, with the draft's weights whose names start with `prefix`; it rounds its
    inputs where the draft's quantization does. Frozen, in evaluation mode."""
    fill(module, load_weights(draft, target, prefix, dtype))
    round_inputs(module, draft, prefix)
    return module


def fill(module: Module, weights: dict[str, Tensor]) -> Module:
    """The module, built on the meta device, with its weights; frozen, in evaluation mode."""
    # The folder was validated against the spec, and the module is built from the same spec: strict cannot fail.
    module.load_state_dict(weights, strict=True, assign=True)
    return module.eval().requires_grad_(False)


def check_sizes(draft: Draft, target_hidden_size: int, target: PreTrainedModel) -> None:
    """Raise `TargetError` unless the draft is for hidden states and a vocabulary of the target's sizes."""
    config = target.config.get_text_config()
    for what, mine, theirs in (
        ("hidden states", target_hidden_size, config.hidden_size),
        ("tokens", draft.spec.architecture.vocab_size, config.vocab_size),
    ):
        if mine != theirs:
            raise TargetError(
                f"the draft is for a target with {mine} {what}; this one has {theirs}",
                where=draft.path,
                hint=f"evaluate it with its own target: {draft.provenance.target or 'see the model card'}",
            )


def check_mask_token(draft: Draft) -> None:
    """Raise `LayoutError` where the mask token is none of the draft's tokens."""
    parallel, vocab_size = draft.spec.architecture.parallel, draft.spec.architecture.vocab_size
    if parallel is not None and not 0 <= parallel.mask_token_id < vocab_size:
        raise LayoutError(
            f"the mask token is {parallel.mask_token_id}; the draft has {vocab_size} tokens",
            where=draft.path,
            hint="convert it again with --set mask_token_id=…",
        )
