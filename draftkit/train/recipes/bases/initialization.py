"""New drafts: sizes from the target."""

from __future__ import annotations

import math
from dataclasses import replace

from transformers import PretrainedConfig, PreTrainedModel

from draftkit.errors import LayoutError
from draftkit.layout.architecture import Rope
from draftkit.layout.decoder import Decoder, rope_of_config
from draftkit.targets.rope import TARGETS_ALONE

INITIAL_STD = 0.02
HEAD_SIZE, KV_HEADS = 128, 8


def fresh_decoder(
    target: PreTrainedModel, num_layers: int, sliding_window: int | None = None, sink_tokens: int = 0
) -> Decoder:
    """Decoder layers with the target's sizes, rotary base and activation, whatever its own layers are."""
    config = target.config.get_text_config()
    wide = getattr(config, "intermediate_size", None)
    heads, kv_heads, head_dim = _heads(config)
    return Decoder(
        hidden_size=config.hidden_size,
        intermediate_size=wide if isinstance(wide, int) else 4 * config.hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        hidden_act="silu",
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_window=sliding_window,
        sink_tokens=sink_tokens,
        rope=_rope(config.to_dict()),
    )


def _heads(config: PretrainedConfig) -> tuple[int, int, int]:
    """Heads, those of keys and values, and their width: the target's, or 128 numbers for each head and up to 8 heads of
    keys and values where it has latent attention or none (as SpecForge has them for DeepSeek V3)."""
    heads = getattr(config, "num_attention_heads", None)
    if heads is None or getattr(config, "kv_lora_rank", None) is not None:
        head_dim = min(HEAD_SIZE, config.hidden_size)
        heads = config.hidden_size // head_dim
        return heads, math.gcd(heads, KV_HEADS), head_dim
    own = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, getattr(config, "num_key_value_heads", None) or heads, own


def _rope(config: dict[str, object]) -> Rope:
    """The target's, of several kinds of layers that of full attention; the draft rotates all of each head, on one
    axis."""
    rope = config.get("rope_parameters")
    if isinstance(rope, dict):
        rope = rope.get("full_attention", rope)
        config = config | {"rope_parameters": {key: value for key, value in rope.items() if key not in TARGETS_ALONE}}
    return replace(rope_of_config(config), declared_base=None)


def check_layers(ids: tuple[int, ...], target: PreTrainedModel) -> None:
    """Raise `LayoutError` for layers that the target does not have, or that are not distinct and ascending."""
    most = target.config.get_text_config().num_hidden_layers
    if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] > most:
        raise LayoutError(
            f"target layers {list(ids)}",
            expected=f"distinct ids from 0 to {most}, ascending",
            hint=f"set options.layers, as {sorted({1, most // 2, most - 1})}",
        )
