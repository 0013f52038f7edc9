"""The attention function that draftkit registers with transformers: slot cache in, softmax attention out."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import AttentionInterface

from draftkit.models.footprint import DEAF, cannot_follow
from draftkit.runtime.cache import CacheRows
from draftkit.runtime.ops.slot_attention import Scoring, attend

NAME = "draftkit"


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    kv: CacheRows | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    bidirectional: bool = False,
    anchored: bool = False,
    position_ids: Tensor | None = None,
    **rest: object,
) -> tuple[Tensor, None]:
    """Attend over the cached sequences, following the protocol of transformers' `AttentionInterface`.

    `query` [B, N, T, D], `key` and `value` [B, G, T, D] of the new rows, rotated; `kv` is the keyword argument given
    to the model call. `softcap` bounds scores (Gemma 2), `s_aux` [N] are sink logits (gpt-oss). `bidirectional` and
    `anchored` are those of `Scoring` (block drafters). The mask comes from `kv`; flags in `rest` do not change scores.
    Returns [B, T, N, D].

    Raises `TargetError` for a model that does not hand `kv` down, or whose scores depend on further tensors.
    """
    unknown = [name for name, argument in rest.items() if isinstance(argument, Tensor)]
    if attention_mask is not None:
        unknown.append("attention_mask")
    if unknown or kv is None:
        raise cannot_follow(module, f"passes {', '.join(unknown)}" if unknown else DEAF)
    keys, values = kv.update(int(module.layer_idx), key, value, sliding_window)  # type: ignore[arg-type]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scoring = Scoring(scale, sliding_window, softcap, s_aux, bidirectional, anchored)
    return attend(query, keys, values, kv.rows, scoring).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, slot_attention)
