"""The target's hidden states for a row of packed documents: computed by the target itself, in this process.

N tokens of a row, F width of the captured features, H target width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from draftkit.errors import TargetError
from draftkit.models.finite import HINT, first_non_finite
from draftkit.models.target import AuxLayers, Target


class States(NamedTuple):
    """`features` [1, N, F], None where nothing is captured; `last` [1, N, H], after the final norm."""

    features: Tensor | None
    last: Tensor


class OnlineStates:
    """Runs the target, loaded by `load_training_target`."""

    def __init__(self, model: PreTrainedModel, aux_layers: AuxLayers | None):
        self._target = Target(model, aux_layers)

    @torch.no_grad()
    def states(self, tokens: Tensor, positions: Tensor, documents: Tensor) -> States:
        target = self._target
        inputs = {
            "input_ids": tokens,
            "position_ids": positions,
            "attention_mask": attention_masks(target.model.config, documents, target.dtype),
        }
        with target.captured() as found:
            output = target.decoder(**inputs, use_cache=False)
        last = output.last_hidden_state
        if not torch.isfinite(last).all():
            place = first_non_finite(target.decoder, lambda: target.decoder(**inputs, use_cache=False))
            began = "" if place is None else f", from {place[0]} on, at position {int(positions[0, place[1]])}"
            raise TargetError(f"the target's hidden states are not finite{began}", hint=HINT)
        aux_layers = target.aux_layers
        return States(None if aux_layers is None else torch.cat([found[i] for i in aux_layers.states], dim=-1), last)


def attention_masks(config: PretrainedConfig, documents: Tensor, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
    """Document masks as transformers' decoders take them: one, or one for each kind of layer.

    `documents` int64 [1, N]. A mask [1, 1, N, N] is added to scores; positions see those before them in their document,
    within the sliding window where the layers have one.
    """
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None) or None
    kinds = set(getattr(text, "layer_types", None) or ["full_attention" if window is None else "sliding_attention"])
    windows = {"full_attention": None, "sliding_attention": window}
    masks = {kind: visible_within(documents, dtype, windows[kind]) for kind in sorted(kinds)}
    return masks if len(masks) > 1 else next(iter(masks.values()))


def visible_within(documents: Tensor, dtype: torch.dtype, window: int | None = None) -> Tensor:
    """[1, 1, N, N]: what is added to the scores of positions over positions."""
    size = documents.shape[1]
    at = torch.arange(size, device=documents.device)
    seen = (documents[0][:, None] == documents[0]) & (at <= at[:, None])
    if window is not None:
        seen &= at > at[:, None] - window
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)[None, None]
