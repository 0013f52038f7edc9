"""What the target teaches: its output layer as the recipes use it."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from draftkit.errors import TargetError
from draftkit.train.losses.head import OutputHead
from draftkit.train.losses.teacher import TargetHead

# Config keys that change logits after the output layer, and the value that does not.
CHANGES = {
    "final_logit_softcapping": None,
    "logits_soft_cap": None,
    "output_logit_soft_cap": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "logits_mup_width_multiplier": 1.0,
    "lm_head_multiplier": 1.0,
}


def target_head(target: PreTrainedModel, d2t_ids: Tensor | None, temperature: float = 1.0) -> TargetHead:
    """The target's output layer as a teacher. Raises `TargetError` where its logits are more than a product."""
    require_plain_logits(target, "target")
    layer = target.get_output_embeddings()
    return TargetHead(OutputHead(layer.weight.detach(), getattr(layer, "bias", None)), d2t_ids, temperature)


def require_plain_logits(model: PreTrainedModel, of: str) -> None:
    """Raise `TargetError` for a model, the target or the draft, whose logits are more than its output layer's."""
    config = model.config.get_text_config()
    for key, neutral in CHANGES.items():
        value = getattr(config, key, neutral)
        if value is not None and value != neutral:
            raise TargetError(f"the {of}'s logits are changed by {key} = {value}", expected="a plain output layer")
