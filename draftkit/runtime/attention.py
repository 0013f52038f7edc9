"""The attention function that draftkit registers with transformers: slot cache in, softmax attention out."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from draftkit.errors import TargetError
from draftkit.runtime.cache import CacheRows

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
    position_ids: Tensor | None = None,
    **rest: object,
) -> tuple[Tensor, None]:
    """Attend over the cached sequences, following the protocol of transformers' `AttentionInterface`.

    `query` [B, N, T, D], `key` and `value` [B, G, T, D] of the new rows, rotated; `kv` is the keyword argument given
    to the model call. `softcap` bounds scores (Gemma 2), `s_aux` [N] are sink logits (gpt-oss). The mask comes from
    `kv`; flags in `rest` do not change scores. Returns [B, T, N, D].

    Raises `TargetError` for a model that does not hand `kv` down, or whose scores depend on further tensors.
    """
    unknown = [name for name, argument in rest.items() if isinstance(argument, Tensor)]
    if attention_mask is not None:
        unknown.append("attention_mask")
    if unknown or kv is None:
        problem = f"passes {', '.join(unknown)}" if unknown else "drops the model call's keyword arguments"
        raise TargetError(
            f"{type(module).__name__} {problem}, which draftkit's attention function cannot follow",
            expected="keys, values and keyword arguments as in transformers' Llama",
            hint="this target is not supported yet",
        )
    keys, values, mask = kv.update(int(module.layer_idx), key, value, sliding_window)  # type: ignore[arg-type]
    if softcap is None and s_aux is None:
        out = scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling, enable_gqa=True)
    else:
        out = _explicit_attention(query, keys, values, mask, scaling, softcap, s_aux)
    return out.transpose(1, 2), None


def _explicit_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention written out, for the score functions that the fused kernel lacks."""
    groups = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    scores = query @ keys.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:  # one more score per head, which takes weight and gives no value
        column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.float().softmax(-1)[..., : keys.shape[2]]
    return weights.to(values.dtype) @ values


AttentionInterface.register(NAME, slot_attention)
