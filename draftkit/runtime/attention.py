"""The attention function that draftkit registers with transformers: slot cache in, softmax attention out.

B sequences, N query heads, G key/value heads, T rows, D and E widths of keys and values; R and P widths of latents.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from draftkit.runtime.cache import CacheRows
from draftkit.runtime.ops.slot_attention import Scoring
from draftkit.targets.attention import Sight, required, sight_of

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
    sink_tokens: int = 0,
    indices: Tensor | None = None,
    **rest: object,
) -> tuple[Tensor, None]:
    """Attend over the cached sequences, following the protocol of transformers' `AttentionInterface`.

    `query` [B, N, T, D], `key` and `value` [B, G, T, D] of the new rows, rotated; `kv` is the keyword argument given to
    the model call. `softcap` bounds scores (Gemma 2), `s_aux` [N] are sink logits (gpt-oss). `bidirectional` and
    `anchored` are those of `Scoring` (block drafters), as are `sink_tokens`, and `indices` its `chosen`
    (DeepSeek-V3.2). The mask comes from `kv`, but for that of a whole prompt with images, its `seen`; flags in `rest`
    do not change scores. Returns [B, T, N, D].

    Raises `TargetError` for a model that does not hand `kv` down, or whose scores depend on further tensors.
    """
    kv = required(kv, module, attention_mask, rest)
    query = _tempered(module, query, kv)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    chunk = chunk_of(module)
    window, sink_tokens = sight_of(module, Sight(sliding_window, sink_tokens))
    seen = attention_mask if kv.whole else None
    scoring = Scoring(scale, window, softcap, s_aux, bidirectional, anchored, chunk, indices, sink_tokens, seen)
    return attend_slots(module, query, key, value, kv, scoring), None


def attend_slots(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, kv: CacheRows, scoring: Scoring
) -> Tensor:
    """What `slot_attention` returns, of a module whose `scoring` is known."""
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    with torch.cuda.device_of(query) if query.is_cuda else nullcontext():  # of a target that is spread over devices
        if layer in kv.latents.waiting:
            out = _attend_latents(module, query, kv, layer, scoring)
        else:
            keys, values = kv.update(layer, key, value, scoring.window)
            out = kv.attend(query, keys, values, scoring)
    return out.transpose(1, 2).contiguous()


def chunk_of(module: nn.Module) -> int | None:
    """The chunk within which a layer sees, which transformers says in the mask alone (Llama 4)."""
    config: Any = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    return config.attention_chunk_size if kinds and kinds[module.layer_idx] == "chunked_attention" else None


def _tempered(module: Any, query: Tensor, kv: CacheRows) -> Tensor:
    """The queries of a layer without rope, which Llama 4 scales by their positions (arXiv 2501.19399)."""
    if not getattr(getattr(module, "config", None), "attn_temperature_tuning", False) or module.use_rope:
        return query
    positions = kv.rows.on(query.device).places.view(query.shape[0], 1, -1, 1).clamp(min=0).float()
    scales = torch.log1p(((positions + 1.0) / module.floor_scale).floor()) * module.attn_scale + 1.0
    return (query * scales).to(query.dtype)


def _attend_latents(module: Any, query: Tensor, kv: CacheRows, layer: int, scoring: Scoring) -> Tensor:
    """Multi-head latent attention over cached latents: [B, N, T, E].

    Keys and values are linear in the latents, and `expand_kv` of a module makes them. So queries are taken to the
    latents' space instead, and what they gather there to that of values, as in DeepSeek-V2 (arXiv 2405.04434, 2.1.2).
    """
    content, rotary = kv.latents.waiting.pop(layer)  # [B, 1, T, R] and [B, 1, T, P]
    rank, width = content.shape[3], content.shape[3] + rotary.shape[3]
    each = torch.eye(width, device=content.device, dtype=content.dtype)[None, None]
    to_keys, to_values = module.expand_kv(each[..., :rank], each[..., rank:])  # [1, N, R + P, D] and [1, N, R + P, E]
    latents, _ = kv.update(layer, torch.cat((content, rotary), dim=-1), content[..., :0], scoring.window)
    gathered = kv.attend(query @ to_keys.transpose(2, 3), latents, latents[..., :rank], scoring)
    return gathered @ to_values[:, :, :rank]


AttentionInterface.register(NAME, slot_attention)
