"""Tiny random models of every architecture that transformers can decode text with, for `sweep_targets.py`.

A configuration is the class's own default with every size made small by its name (`SIZES`); what that cannot know of an
architecture is in `DETAILS`. Weights are random and large, so that greedy decoding has clear winners.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

VOCABULARY = 128
TEXT = range(4, 96)  # tokens that stand for text; those of images and other special ones are above
HIDDEN, HEADS, KV_HEADS, HEAD = 128, 4, 2, 32
LAYERS = 4
WINDOW = 8
POSITIONS = 256

# The first name that matches decides. None leaves the class's default.
SIZES: tuple[tuple[str, Any], ...] = (
    (r"(un)?padded_vocab_size|.*vocab_size(_per_layer_input)?|ngram_vocab_size_base|codebook_size", VOCABULARY),
    (r"pad_token_id", 0),
    (r"bos_token_id|decoder_start_token_id", 1),
    (r"eos_token_id|forced_eos_token_id|sep_token_id|eod_token_id", None),
    (r"initializer_range", 0.2),
    (
        r"(num_hidden|num|n|num_decoder|decoder|encoder|num_encoder|num_blocks)_?layers?|layers|depth|num_blocks",
        "layers",
    ),
    (r"(sliding|attention|keep)_window(_size)?|sliding_window_size|attention_chunk_size|local_attention", WINDOW),
    (r"(max|n)_(position_embeddings|positions|seq_len|target_positions)|context_length|n_ctx", POSITIONS),
    (r"num_key_value_heads|num_kv_heads|.*_num_key_value_heads|kv_n_heads", KV_HEADS),
    (r"linear_num_key_heads", 2),
    (r"(.*_)?num_attention_heads|n_heads?|num_heads|(encoder|decoder)_attention_heads|attention_heads", HEADS),
    (r"linear_num(_value)?_heads|(encoder|decoder)_num_heads", HEADS),
    (r"kv_lora_rank", 24),
    (r"q_lora_rank|o_lora_rank", 40),
    (r"qk_nope_head_dim", 16),
    (r"qk_rope_head_dim", 8),
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
    (r"head_dim|(attention_|swa_|global_)head_dim|attention_head_size|kv_channels|d_kv|d_head|dim_head", HEAD),
    (r"rotary_dim", HEAD // 2),
    (r"chunk_size|mamba_chunk_size|block_size", 8),
    (r"(n_routed|num_local|num|moe_num)_experts", 4),
    (r"(num_experts_per_tok|moe_topk|moe_top_k|moe_k|n_activated_experts)", 2),
    (r"(n|moe_num|num)_shared_experts", 1),
    (r"n_group|topk_group|num_expert_groups?", 1),
    (r"first_k_dense_replace|num_dense_layers", 1),
    (r".*intermediate_size(_mlp)?|.*ffn_(dim|hidden_size)|n_inner|d_ff|dim_ff|dff|mlp_dim|share_expert_dim", 96),
    (
        r"(.*_)?hidden_size|d_model|n_embd|emb_dim|embedding_(dim|size)|.*embed_dim|word_embed_proj_dim|lru_width",
        HIDDEN,
    ),
    (r"projection_dim|projector_.*_dim|out_hidden_size|output_dim|vision_output_dim|projection_hidden_dim", HIDDEN),
    (r"image_size|img_size", 28),
    (r"patch_size", 14),
)
LISTS = (
    r"layer_types|.*layers_block_type|mlp_layer_types|no_rope_layers|block_types|attn_layers|.*_per_layer|layer_.*|"
    r"indexer_types"
)

NEEDED = (
    r"^(pad|bos)_token_id$|^head_dim$|expert|num_key_value_heads|num_kv_heads|moe_"  # even where the default is None
)

# What the rules do not know, by the type of a configuration.
SLIDING, FULL = "sliding_attention", "full_attention"
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
GEMMA4 = {"head_dim": HEAD, "global_head_dim": HEAD // 2, "layer_types": [SLIDING, FULL, SLIDING, FULL]}
GEMMA4_SHARED = {**GEMMA4, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
DETAILS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "chameleon": {"vocabulary_map": {"<image>": 100, "IMGIMGA": 101}},
    "cohere_compass_text": {
        "layer_types": [SLIDING, FULL] * 2,
        "rope_parameters": {SLIDING: ROPE | {"mrope_section": [4, 6, 6]}, FULL: ROPE | {"mrope_section": [4, 6, 6]}},
    },
    "dbrx": {"attn_config": {"kv_n_heads": KV_HEADS, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "diffusion_gemma_text": {"top_k_experts": 2},
    "dots3_note_vision_encoder": {"adapter_in_dim": HIDDEN, "adapter_out_dim": HIDDEN},
    "dots3_note_text": {
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": 24,
        "swa_num_attention_heads": HEADS,
        "swa_num_key_value_heads": HEADS,
        "swa_q_lora_rank": 40,
        "swa_kv_lora_rank": 24,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 12,
    },
    "ernie4_5_vl_moe_text": {"rope_parameters": ROPE | {"mrope_section": [6, 6, 4]}},
    "gemma3n_text": {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": [SLIDING, FULL] * 2},
    "gemma4_text": GEMMA4_SHARED,
    "gemma4_unified_text": GEMMA4_SHARED,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "glm4v_text": {"rope_parameters": ROPE | {"mrope_section": [4, 6, 6]}},
    "glm4v_moe_text": {"rope_parameters": ROPE | {"mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5}},
    "glm5_next_text": {"qk_rope_head_dim": 0},
    "glm_ocr_text": {"rope_parameters": ROPE | {"mrope_section": [4, 6, 6]}},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "granite4_vision": {"deepstack_layer_map": [], "downsample_rate": "1/2"},
    "hunyuan_vl_text": {"rope_parameters": ROPE | {"mrope_section": [4, 4, 4, 4]}},
    "lfm2_moe": {"layer_types": ["conv", FULL, "conv", FULL]},
    "longcat_flash": {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "head_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": 32},
    "modernbert-decoder": {"sep_token_id": 3, "cls_token_id": 2},
    "paddleocr_vl_text": {"rope_parameters": ROPE | {"mrope_section": [4, 6, 6]}},
    "qwen2_vl_text": {"rope_parameters": ROPE | {"mrope_section": [4, 6, 6]}},
    "qwen2_5_vl_text": {"rope_parameters": ROPE | {"mrope_section": [4, 6, 6]}},
    "qwen2_5_omni_text": {"rope_parameters": ROPE | {"mrope_section": [4, 6, 6]}},
    "qwen3_omni_moe_text": {"rope_parameters": ROPE | {"mrope_section": [4, 6, 6]}},
    "qwen3_vl_text": {"rope_parameters": ROPE | {"mrope_section": [4, 6, 6]}},
    "qwen3_vl_moe_text": {"rope_parameters": ROPE | {"mrope_section": [4, 6, 6]}},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"is_decoder": True, "axial_pos_shape": [16, 16], "axial_pos_embds_dim": [64, 64]},
    "step3p7_text": {"sliding_window": WINDOW},
    "zamba": {"layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid", "mamba"], "num_hidden_layers": 6},
    "zaya": {"num_experts_per_tok": 1},
}


def model_types() -> list[str]:
    """Every type of configuration that transformers has a causal LM for, or one of several kinds of input to text."""
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES})


def auto_class(config: PretrainedConfig) -> Any:
    """What loads the model that decodes text with a configuration: of several kinds of input, its text side alone."""
    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForMultimodalLM


def tiny_config(model_type: str) -> PretrainedConfig:
    """A configuration of the type with small sizes, and a layer of every kind that its default has."""
    return _tiny(CONFIG_MAPPING[model_type])


def _tiny(config_class: type[PretrainedConfig]) -> PretrainedConfig:
    default = config_class()
    values: dict[str, Any] = {}
    layers = _layers(default)
    for field in dataclasses.fields(config_class):
        value = _of(default, field.name)
        if isinstance(value, PretrainedConfig):
            values[field.name] = _tiny(type(value))
        elif isinstance(value, list) and re.fullmatch(LISTS, field.name) and len(value) >= layers:
            values[field.name] = value[:layers]
        elif field.name == "per_layer_config":
            continue  # follows from the others
        elif isinstance(value, dict) and "mrope_section" in value:
            values[field.name] = value | {"mrope_section": [4, 6, 6]}
        elif value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            known = next((size for pattern, size in SIZES if re.fullmatch(pattern, field.name)), ...)
            if known == "layers":
                known = layers
            if known is not ... and (value is not None or re.search(NEEDED, field.name)):
                values[field.name] = known
            elif isinstance(value, int) and value > VOCABULARY and re.search(r"token|_id$|_index$", field.name):
                values[field.name] = TEXT.stop + 4 + len(values) % 24
    if "kv_lora_rank" in values:  # latent attention: each head has keys of its own
        values["num_key_value_heads"] = HEADS
    return config_class(**values | DETAILS.get(config_class.model_type, {}))


def _of(config: PretrainedConfig, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except (AttributeError, RuntimeError):  # one value for each layer
        return None


def _layers(default: PretrainedConfig) -> int:
    """How many layers hold one of each kind."""
    kinds = [_of(default, name) for name in ("layer_types", "layers_block_type", "block_types")]
    kinds = [list(k) for k in kinds if k]
    wanted = next((next(n for n in range(1, len(k) + 1) if set(k[:n]) == set(k)) for k in kinds), LAYERS)
    return min(max(wanted, LAYERS), 8)


def tiny_model(config: PretrainedConfig, seed: int, scale: float) -> PreTrainedModel:
    """A model with random weights of standard deviation `scale`, and vectors as its class makes them, with noise."""
    torch.manual_seed(seed)
    whole = AutoModelForMultimodalLM if type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING else AutoModelForCausalLM
    model = whole.from_config(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2 and not re.search("A_log|norm|dt_", name):
            parameter.normal_(0, scale)
        elif parameter.dim() == 1 and parameter.is_floating_point():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.tie_weights()
    return model
