"""Tiny random models of an architecture: of its own class, with its own configuration in which every size is small.

Sizes are known by their names (`SIZES`), which families share; what these do not tell of one is in `DETAILS`. Lengths
at which a model changes what it does (windows, chunks, the scale of a temperature, the length that rope was made for)
are `CROSSED`, so that a text of a few dozen tokens crosses all of them. Weights are random and large, so that greedy
decoding has clear winners.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from draftkit.targets.pretrained import (
    IMAGES,
    as_asked,
    auto_class,
    of_language_model,
    reading_images,
    trusts_remote_code,
)

VOCABULARY = 128
TEXT = range(4, 96)  # tokens that stand for text; those of images and other special ones are above
HIDDEN, HEADS, KV_HEADS, HEAD, ROTARY = 128, 4, 2, 32, 8  # ROTARY: of latent attention
LAYERS, MOST_LAYERS = 4, 12
CROSSED = 8
CHOSEN = 2  # experts
NEVER_MORE = (CROSSED, CHOSEN)  # than a configuration has
POSITIONS = 256

# The first name that matches decides. What matches none is left as it is.
SIZES: tuple[tuple[str, Any], ...] = (
    (r"(un)?padded_vocab_size|.*vocab_size(_per_layer_input)?|ngram_vocab_size_base|codebook_size", VOCABULARY),
    (r"pad_token_id", 0),
    (r"bos_token_id|decoder_start_token_id", 1),
    (r"eos_token_id|forced_eos_token_id|eod_token_id", None),
    (r"initializer_range", 0.2),
    (
        r"(num_hidden|num|n|num_decoder|decoder|encoder|num_encoder|num_blocks)_?layers?|layers|depth|num_blocks",
        "layers",
    ),
    (r"num_kv_shared_layers", "shared layers"),
    (r"(sliding|attention|keep)_window(_size)?|sliding_window_size|attention_chunk_size|local_attention", CROSSED),
    (r"(.*_)?floor(_scale)?|original_max_position_embeddings|mamba_chunk_size|chunk_size|block_size", CROSSED),
    (r"attn_logit_soft_?cap(ping)?", 2.0),
    (r"index_block_size", 4),
    (r"index_topk_blocks", 2),
    (r"(max|n)_(position_embeddings|positions|seq_len|target_positions)|context_length|n_ctx", POSITIONS),
    (r"num_key_value_heads|num_kv_heads|.*_num_key_value_heads|kv_n_heads", KV_HEADS),
    (r"linear_num_key_heads", 2),
    (r"(.*_)?num_attention_heads|n_heads?|num_heads|(encoder|decoder)_attention_heads|attention_heads", HEADS),
    (r"linear_num(_value)?_heads|(encoder|decoder)_num_heads", HEADS),
    (r"kv_lora_rank", 24),
    (r"q_lora_rank|o_lora_rank", 40),
    (r"qk_nope_head_dim", 16),
    (r"qk_rope_head_dim", ROTARY),
    (r"qk_head_dim", 24),
    (r"v_head_dim", 12),
    (r"index_head_dim|index_n_heads", 16),
    (r"index_topk", 16),
    (r"linear_(key_|value_)?head_dim", 16),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads", 8),
    (r"mamba_d_head|mamba_head_dim", 32),
    (r"mamba_d_ssm|mamba_d_inner|d_inner", 2 * HIDDEN),
    (r"mamba_d_state|ssm_state_size|state_size", 16),
    (r"mamba_dt_rank|time_step_rank", 8),
    (r"global_head_dim", HEAD // 2),
    (r"head_dim|(attention_|swa_)head_dim|attention_head_size|kv_channels|d_kv|d_head|dim_head", HEAD),
    (r"rotary_dim", HEAD // 2),
    (r"(n_routed|num_local|num|moe_num)_experts", 4),
    (r"(num_experts_per_tok(en)?|moe_topk|moe_top_k|moe_k|n_activated_experts|top_k_experts)", CHOSEN),
    (r"(n|moe_num|num)_shared_experts", 1),
    (r"n_group|topk_group|num_expert_groups?", 1),
    (r"first_k_dense_replace|num_dense_layers", 1),
    (r".*intermediate_size(_mlp)?|.*ffn_(dim|hidden_size)|n_inner|d_ff|dim_ff|dff|mlp_dim|share_expert_dim", 96),
    (
        r"(.*_)?hidden_size|d_model|n_embd|emb_dim|embedding_(dim|size)|.*embed_dim|word_embed_proj_dim|lru_width",
        HIDDEN,
    ),
    (r"projection_dim|(projector|adapter|projection)_.*_dim|out_hidden_size|(vision_)?output_dim", HIDDEN),
    (r"image_size|img_size", 28),
    (r"patch_size", 14),
)
NEEDED = r"(pad|bos)_token_id|head_dim|num_key_value_heads|num_kv_heads"  # even where there is none
KINDS = ("layer_types", "layers_block_type", "block_types")  # of the layers, said in a field or a property
NUMBERS_OF_LAYERS = r".*_(layers|indices|idxs|indexes|layer_ids)"
SPECIAL_TOKENS = r".*(token|_id$|_index$).*"
# What says nothing of the architecture, or follows from the rest.
LEFT_OUT = (
    r"_.*|architectures|auto_map|quantization_config|(torch_)?dtype|name_or_path|id2label|label2id|use_cache|"
    r"transformers_version|per_layer_config|ignore_keys_at_rope_validation"
)

# What the rules do not know, by the type of a configuration.
DETAILS: dict[str, dict[str, Any]] = {
    "dots3_note_text": {  # whose layers with a window have sizes of their own
        "head_dim": 24,
        "swa_num_attention_heads": HEADS,
        "swa_num_key_value_heads": HEADS,
        "swa_q_lora_rank": 40,
        "swa_kv_lora_rank": 24,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 12,
    },
    "longcat_flash": {"head_dim": ROTARY},
    "mamba2": {"num_heads": 8},
}


def tiny_config(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration with small sizes, at least one layer of every kind that it has, and without quantization.

    Raises whatever its class raises for sizes that do not go together.
    """
    kind = type(config)
    try:
        usual = vars(kind())
    except Exception:  # of code that comes with a model
        usual = {}
    shrink = _Shrink(config)
    values: dict[str, Any] = {}
    for name, value in _stated(config, usual).items():
        if isinstance(value, PretrainedConfig):
            values[name] = tiny_config(value)
        elif (small := shrink(name, value)) != usual.get(name, ...):  # the class makes the others, some from these
            values[name] = small
    if values.get("kv_lora_rank"):  # latent attention: each head has keys of its own
        values["num_key_value_heads"] = HEADS
    tiny = kind(**values | DETAILS.get(kind.model_type, {}))
    return reading_images(tiny) if getattr(config, IMAGES, False) else tiny


def _stated(config: PretrainedConfig, usual: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a configuration is made of, not those that its class makes of them, as of the `usual` one."""
    held = vars(config)
    names = [*held]
    if type(config).__module__.startswith("transformers."):
        declared = [field.name for field in dataclasses.fields(config)]
        names = [*declared, *(name for name in names if name not in usual and name not in declared)]
    return {
        name: held[name] if name in held else _of(config, name) for name in names if not re.fullmatch(LEFT_OUT, name)
    }


class _Shrink:
    """Shrinks the values of a configuration: it is called with the name and the value of each."""

    def __init__(self, config: PretrainedConfig):
        self.whole = _of(config, "num_hidden_layers")
        self.rotary = ROTARY if _of(config, "qk_rope_head_dim") else HEAD
        self.partial = _of(config, "partial_rotary_factor")
        self.layers, self.shared = self._layers(config)
        self.special = 0

    def __call__(self, name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return self._inside(value)
        if isinstance(value, list | tuple):
            return self._each(name, list(value))
        if isinstance(value, bool | str) or value == 0 or (value is None and not re.fullmatch(NEEDED, name)):
            return value
        for pattern, size in SIZES:
            if re.fullmatch(pattern, name):
                return value if isinstance(value, float) > isinstance(size, float) else self._size(size, value)
        return self._token(value) if re.fullmatch(SPECIAL_TOKENS, name) else value

    def _token(self, value: Any) -> Any:
        """A special token's id, beyond those of text."""
        if not isinstance(value, int) or value <= VOCABULARY:
            return value
        self.special += 1
        return TEXT.stop + 4 + self.special % 24

    def _size(self, size: Any, value: Any) -> Any:
        if isinstance(size, str):
            return self.layers if size == "layers" else self.shared
        return min(size, value) if size in NEVER_MORE and value is not None else size

    def _inside(self, values: Mapping[Any, Any]) -> dict[Any, Any]:
        small = {name: self(str(name), value) for name, value in values.items()}
        half = int(self.rotary * (values.get("partial_rotary_factor") or self.partial or 1)) // 2
        if self.rotary == ROTARY:
            small.pop("partial_rotary_factor", None)  # which follows from other sizes
        if "mrope_section" in values:
            small["mrope_section"] = _in_proportion(values["mrope_section"], half)
        for factors in {"short_factor", "long_factor"} & values.keys():
            small[factors] = [values[factors][i * len(values[factors]) // half] for i in range(half)]
        return small

    def _each(self, name: str, values: list[Any]) -> list[Any]:
        if re.fullmatch(SPECIAL_TOKENS, name):
            return [self._token(value) for value in values]
        if self._numbers_layers(name, values):
            return [layer for layer in values if layer < self.layers]
        if len(values) == self.whole or name in KINDS:
            return [self(name, value) for value in values[: self.layers]]
        return values

    def _numbers_layers(self, name: str, values: list[Any]) -> bool:
        """Whether a list says which of the layers it means."""
        if not re.fullmatch(NUMBERS_OF_LAYERS, name) or not self.whole or not values:
            return False
        whole_numbers = all(isinstance(value, int) and not isinstance(value, bool) for value in values)
        return whole_numbers and all(a < b for a, b in pairwise([*values, self.whole]))

    def _layers(self, config: PretrainedConfig) -> tuple[int, int]:
        """How many layers hold one of each kind, and how many of them have keys and values of others."""
        if not self.whole:
            return LAYERS, 0
        kinds = [list(found) for name in KINDS if (found := _of(config, name))]
        for name, value in vars(config).items():
            if isinstance(value, list | tuple) and self._numbers_layers(name, list(value)):
                kinds.append([layer in value for layer in range(self.whole)])
            elif isinstance(value, list | tuple) and len(value) == self.whole:
                kinds.append([str(item) for item in value])
        wanted = max((_until_all(of_layers) for of_layers in kinds), default=1)
        layers = min(max(wanted, LAYERS), MOST_LAYERS, self.whole)
        if not _of(config, "num_kv_shared_layers"):
            return layers, 0
        return min(2 * layers, self.whole), min(layers, self.whole - layers)


def _of(config: PretrainedConfig, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except (AttributeError, RuntimeError):  # one value for each layer
        return None


def _until_all(kinds: Sequence[Any]) -> int:
    """The length of the shortest beginning in which every kind is."""
    return max(kinds.index(kind) for kind in kinds) + 1


def _in_proportion(sections: Sequence[int], half: int) -> list[int]:
    """Sections of rotated pairs that are `half` together, about as large to each other as those given."""
    first = [round(section * half / sum(sections)) for section in sections[:-1]]
    return [*first, half - sum(first)]


def random_model(config: PretrainedConfig, attention: str, *, seed: int, scale: float) -> PreTrainedModel:
    """A model for inference on the CPU, as draftkit loads one; `attention` names the function of its language model.

    `seed` and `scale` as of `draw_weights`.
    """
    torch.default_generator.manual_seed(seed)
    with torch.device("cpu"), as_asked(config):
        model: PreTrainedModel = auto_class(config).from_config(
            deepcopy(config),  # which keeps the name of its attention
            dtype=torch.float32,
            attn_implementation=of_language_model(config, attention),
            trust_remote_code=trusts_remote_code(),
        )
    draw_weights(model, seed, scale)
    return model.eval()


@torch.no_grad()
def draw_weights(model: PreTrainedModel, seed: int, scale: float) -> None:
    """Random matrices of the standard deviation `scale`, and vectors as the model's class makes them, with noise.

    Draws from torch's generator of the CPU, which it seeds.
    """
    torch.default_generator.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2 and not re.search("A_log|norm|dt_", name):
            parameter.normal_(0, scale)
        elif parameter.dim() == 1 and parameter.is_floating_point():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.requires_grad_(False).tie_weights()
