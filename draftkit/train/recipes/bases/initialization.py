"""New drafts: sizes and first weights from the target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from draftkit.data.states.online import final_norm
from draftkit.errors import LayoutError, TargetError
from draftkit.layout.architecture import Rope
from draftkit.layout.decoder import Decoder, rope_of_config
from draftkit.models.dflash import BlockLayer, DFlashModel
from draftkit.targets.pretrained import load_modules
from draftkit.targets.rope import TARGETS_ALONE
from draftkit.targets.states import decoder_layers, decoder_of
from draftkit.targets.tokens import TargetEmbeddings

INITIAL_STD = 0.02
HEAD_SIZE, KV_HEADS = 128, 8
NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")  # Qwen3 has them, Llama has not
CONVOLUTIONS = ("attention_conv.", "mlp_conv.")  # only drafts have them


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


@torch.no_grad()
def begin_as_target(draft: DFlashModel, target: PreTrainedModel) -> bool:
    """Give a new draft the target's last layers and final norm, and the last of the captured states as its context.

    The draft then continues the target from that state. False, and nothing is changed, where the target has no such
    layers in full precision: they need the names and sizes of a dense decoder's, as in Llama and Qwen3.
    """
    choose = partial(_last_layers, draft=draft)
    try:
        if isinstance(target, TargetEmbeddings) or any(parameter.is_meta for parameter in target.parameters()):
            parts = load_modules(Path(target.name_or_path), choose, torch.float32)
        else:
            parts = choose(target)
    except TargetError:  # quantized, or stored otherwise than transformers reads it
        return False
    if not parts:
        return False
    *layers, norm = parts
    for mine, theirs in zip(cast("list[BlockLayer]", list(draft.layers)), layers, strict=True):
        _take(mine, theirs)
    draft.norm.weight.copy_(_scale(norm))
    draft.fc.weight.zero_()
    draft.fc.weight[:, -draft.spec.target_hidden_size :].fill_diagonal_(1.0)
    return True


def _last_layers(model: PreTrainedModel, draft: DFlashModel) -> Sequence[nn.Module]:
    """The last layers, as many as the draft has, and the norm behind them; nothing where there are too few."""
    wanted = _shapes(draft.layers[0])
    fitting = [layer for layer in decoder_layers(decoder_of(model)) if _fits(_shapes(layer), wanted)]
    count = len(draft.layers)
    return [*fitting[-count:], final_norm(model)] if len(fitting) >= count else []


def _shapes(layer: nn.Module) -> dict[str, torch.Size]:
    named = layer.named_parameters()
    return {name: parameter.shape for name, parameter in named if not name.startswith(CONVOLUTIONS)}


def _fits(theirs: dict[str, torch.Size], mine: dict[str, torch.Size]) -> bool:
    """Whether a layer has all that a draft's has, in the same sizes, but for norms of queries and keys, and no more
    than biases."""
    more = {name for name in theirs.keys() - mine.keys() if not name.endswith("_proj.bias")}
    return not more and all(theirs.get(name, shape if name in NORMS else None) == shape for name, shape in mine.items())


def _take(mine: BlockLayer, theirs: nn.Module) -> None:
    """A layer's weights. Its first norm's go into the projections behind it, which the context passes as well, and
    without that norm."""
    before = _scale(theirs.get_submodule("input_layernorm"))
    for name in ("q_proj", "k_proj", "v_proj"):
        projection = mine.self_attn.get_submodule(name).get_parameter("weight")
        projection.copy_(theirs.get_parameter(f"self_attn.{name}.weight") * before)
    for name in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
        mine.get_parameter(f"{name}.weight").copy_(theirs.get_parameter(f"{name}.weight"))
    mine.post_attention_layernorm.weight.copy_(_scale(theirs.get_submodule("post_attention_layernorm")))
    own = dict(theirs.named_modules())
    for part in ("q", "k"):
        norm = mine.self_attn.get_submodule(f"{part}_norm").get_parameter("weight")
        if (name := f"self_attn.{part}_norm") in own:
            norm.copy_(_scale(own[name]))
        else:  # the norm gives the length that queries and keys of random states have without it
            norm.fill_(mine.self_attn.get_submodule(f"{part}_proj").get_parameter("weight").pow(2).sum(1).mean().sqrt())


def _scale(norm: nn.Module) -> Tensor:
    """What an RMS norm multiplies with, whether it stores that or what is to be added to 1."""
    return norm(torch.ones_like(norm.get_parameter("weight"))).float()
