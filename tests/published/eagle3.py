"""EAGLE-3 with a flat config: SafeAILab, SpecForge and SGLang, AngelSlim, ModelOpt's two exporters, NeMo Automodel.

The configs are those of the repositories: SafeAILab/EAGLE `traineagle3/config.json`, sgl-project/SpecForge `configs/`,
Tencent/AngelSlim `train/configs/`, NVIDIA/Model-Optimizer `hf_spec_configs.py`, `unified_export_megatron.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pico
import torch

from published.checkpoint import Published, Tensors, randoms
from published.layers import VD, H, V, layer, vocabulary_map

REFERENCE_NORMS = ("hidden_norm", "input_layernorm")


def eagle3(
    dtype: torch.dtype,
    *,
    first: str = "midlayer.",
    deeper: dict[str, str] | None = None,
    aux: int = 3,
    target_hidden: int = H,
    head_dim: int = 16,
    draft_vocabulary: int = VD,
    embed: bool = False,
    head: bool = True,
    d2t: bool = True,
    t2d: bool = True,
    qk_norm: bool = False,
    extra: dict[str, tuple[int, ...]] | None = None,
    without: tuple[str, ...] = (),
) -> Tensors:
    """EAGLE-3. `deeper`: prefix of a further layer → the name of its first norm. `extra`: shapes of more tensors."""
    shapes = layer(first, norms=REFERENCE_NORMS, wide=True, qk_norm=qk_norm, head_dim=head_dim)
    for prefix, norm in (deeper or {}).items():
        shapes |= layer(prefix, norms=(norm,), qk_norm=qk_norm, head_dim=head_dim)
    shapes |= {"fc.weight": (H, aux * target_hidden), "norm.weight": (H,)}
    if head:
        shapes["lm_head.weight"] = (draft_vocabulary, H)
    if embed:
        shapes["embed_tokens.weight"] = (V, H)
    tensors = randoms(shapes | (extra or {}), dtype, seed=31)
    if d2t:
        tensors |= vocabulary_map(draft_vocabulary, mask=t2d)
    return {name: tensor for name, tensor in tensors.items() if name not in without}


def quantised(dtype: torch.dtype) -> Tensors:
    """ModelOpt's fp8 export: matrices of the layer with a scale for the weight and one for its input."""
    tensors = eagle3(dtype, first="layers.0.", t2d=False)
    for name in [name for name in tensors if name.startswith("layers.0.") and tensors[name].ndim == 2]:
        tensors[name] = (tensors[name].float() * 100).to(torch.float8_e4m3fn)
        for scale in ("weight_scale", "input_scale"):
            tensors[name.replace("weight", scale)] = torch.tensor(0.01)
    return tensors


def config(**changes: Any) -> dict[str, Any]:
    """Sizes of pico under the keys of transformers 4; `...` removes a key."""
    values: dict[str, Any] = {
        "hidden_act": "silu", "hidden_size": H, "initializer_range": 0.02, "intermediate_size": 96,
        "max_position_embeddings": 2048, "model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 1, "rms_norm_eps": 1e-05, "use_cache": True, "vocab_size": V, "draft_vocab_size": VD,
    }  # fmt: skip
    values |= changes
    return {key: value for key, value in values.items() if value is not ...}


SPECFORGE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"], "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.28.1",
}  # fmt: skip
SPECFORGE_LLAMA_70B: dict[str, Any] = SPECFORGE | {
    "eos_token_id": [2, 3, 4], "head_dim": 16, "max_position_embeddings": 4096, "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 4096,
        "rope_type": "llama3",
    },
}  # fmt: skip
SPECFORGE_QWEN3: dict[str, Any] = SPECFORGE | {
    "attention_bias": False, "attention_dropout": 0.0, "head_dim": 32, "max_position_embeddings": 40960,
    "max_window_layers": 36, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": None, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_sliding_window": False,
    "pad_token_id": ...,
}  # fmt: skip
SPECFORGE_QWEN_VL: dict[str, Any] = SPECFORGE_QWEN3 | {
    "head_dim": 16, "target_model_type": "qwen2_5_vl", "pretraining_tp": 1, "sliding_window": 32768,
    "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]},
}  # fmt: skip
SPECFORGE_31: dict[str, Any] = SPECFORGE_QWEN3 | {
    "head_dim": 16,
    "fc_norm": True,
    "norm_output": True,
    "rope_theta": 1000000.0,
}
YARN: dict[str, Any] = {
    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096, "rope_type": "yarn",
}  # fmt: skip

ANGELSLIM: dict[str, Any] = {
    "architectures": ["Eagle3LlamaForCausalLM"], "target_model_type": "qwen3", "torch_dtype": "bfloat16",
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 16,
    "max_position_embeddings": 40960, "max_window_layers": 36, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False, "transformers_version": "4.51.0",
    "use_sliding_window": False,
}  # fmt: skip
ANGELSLIM_VL: dict[str, Any] = ANGELSLIM | {
    "target_model_type": "qwen3_vl", "rope_theta": 5000000, "modal_type": "VLM", "image_token_id": 5,
    "video_token_id": 6, "vision_end_token_id": 7, "vision_start_token_id": 8, "dtype": "bfloat16",
    "rope_scaling": {
        "type": "default", "rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2],
    },
}  # fmt: skip
ANGELSLIM_HUNYUAN: dict[str, Any] = ANGELSLIM | {
    "add_classification_head": False, "target_model_type": "hunyuan_v1_dense", "attention_head_dim": 16,
    "cla_share_factor": 2, "class_num": 0, "dense_list": [64, 0], "eod_token_id": 9, "im_end_id": 5,
    "im_newline_id": 11, "im_start_id": 4, "mask_init_id": 12, "mlp_bias": False, "norm_type": "rms",
    "org_vocab_size": 320, "pad_id": 3, "pad_token_id": 3, "pool_type": "last", "pretraining_tp": 1,
    "rope_scaling": {
        "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "type": "dynamic",
    },
    "rope_theta": 10000.0, "sep_token_id": 7, "text_end_id": 7, "text_start_id": 6, "use_cla": False,
    "use_qk_norm": True, "use_rotary_pos_emb": True, "tie_word_embeddings": True,
}  # fmt: skip

MODELOPT_EAGLE: dict[str, Any] = {
    "eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
    "next_layer_regular": True, "parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1,
}  # fmt: skip
MODELOPT: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"], "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.53.2", "rope_scaling": None,
    "attention_bias": False, "attention_dropout": 0.0, "head_dim": 16, "mlp_bias": False, "pretraining_tp": None,
    "rope_theta": 500000.0, "eagle_config": MODELOPT_EAGLE,
}  # fmt: skip
MEGATRON: dict[str, Any] = MODELOPT | {
    "bos_token_id": None, "eos_token_id": None, "max_position_embeddings": 512, "rope_theta": 500000.0,
    "rope_scaling": SPECFORGE_LLAMA_70B["rope_scaling"], "pretraining_tp": 1,
}  # fmt: skip
FP8: dict[str, Any] = {
    "quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "producer": {"name": "modelopt"},
}  # fmt: skip

modelopt = partial(eagle3, first="layers.0.", t2d=False)
with_mask = partial(Published, dropped=("t2d",))
whole: dict[str, Any] = {"draft_vocab_size": V}

SAFEAILAB = [
    with_mask(
        name="eagle3", format="eagle3", method="eagle3", config=pico.eagle3_config(), tensors=eagle3, count=15,
        facts={"aux_layer_ids": [2, 4, 5], "embed_tokens": "target", "decoder.rope.base": 10000.0},
        weights="pytorch_model.bin",
    ),
    with_mask(
        name="eagle3-70b", format="eagle3", method="eagle3", config=pico.eagle3_config(target_hidden_size=32),
        tensors=partial(eagle3, target_hidden=32, embed=True), count=16, target={"hidden_size": 32},
        facts={"target_hidden_size": 32, "embed_tokens": "draft"}, weights="pytorch_model.bin",
    ),
    Published(
        name="eagle3-whole-vocabulary", format="eagle3", method="eagle3", config=pico.eagle3_config(**whole),
        tensors=partial(eagle3, draft_vocabulary=V, d2t=False), count=13, facts={"draft_vocab_size": V},
    ),
]  # fmt: skip
SPECFORGES = [
    with_mask(
        name="specforge", format="specforge", method="eagle3", config=config(**SPECFORGE), tensors=eagle3, count=15,
        facts={"aux_layer_ids": [2, 4, 5], "final_norm": True, "feedback": "pre_norm"},
    ),
    with_mask(
        name="specforge-llama-70b", format="specforge", method="eagle3", config=config(**SPECFORGE_LLAMA_70B),
        tensors=eagle3, count=15, facts={"decoder.rope.base": 5e5, "decoder.rope.scaling.rope_type": "llama3"},
    ),
    with_mask(
        name="specforge-qwen3", format="specforge", method="eagle3", config=config(**SPECFORGE_QWEN3),
        tensors=partial(eagle3, head_dim=32), count=15, facts={"decoder.head_dim": 32, "decoder.rope.base": 1e6},
    ),
    with_mask(
        name="specforge-qwen-vl", format="specforge", method="eagle3", config=config(**SPECFORGE_QWEN_VL),
        tensors=eagle3, count=15, facts={
            "decoder.rope.scaling": {"rope_type": "default", "mrope_section": [4, 2, 2]},
            "decoder.sliding_window": None,
        },
    ),
    with_mask(
        name="specforge-yarn", format="specforge", method="eagle3", config=config(**SPECFORGE, rope_scaling=YARN),
        tensors=eagle3, count=15, facts={"decoder.rope.scaling": YARN},
    ),
    with_mask(
        name="specforge-gpt-oss", format="specforge", method="eagle3", tensors=partial(eagle3, embed=True), count=16,
        config=config(**SPECFORGE, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}, head_dim=16),
        facts={"aux_layer_ids": [2, 4, 6], "embed_tokens": "draft"}, target=None,
    ),
    Published(
        name="specforge-whole-vocabulary", format="specforge", method="eagle3",
        config=config(**SPECFORGE, **whole), tensors=partial(eagle3, draft_vocabulary=V), count=15,
        facts={"draft_vocab_size": V}, dropped=("t2d", "d2t"),
    ),
    with_mask(
        name="specforge-3.1", format="specforge", method="eagle3", config=config(**SPECFORGE_31),
        tensors=partial(eagle3, extra={f"fc_norm.{i}.weight": (H,) for i in range(3)}), count=18,
        facts={"feature_norm": "per_layer", "feedback": "post_norm", "final_norm": True},
    ),
    with_mask(
        name="sglang-two-layers", format="specforge", method="eagle3",
        config=config(
            **SPECFORGE, num_hidden_layers=2, num_aux_hidden_states=4, norm_before_fc=True,
            eagle_config={"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 2, 4, 6]},
        ),
        tensors=partial(
            eagle3, aux=4, deeper={"layers.1.": "hidden_norm"}, extra={"input_norm.weight": (4 * H,)}
        ), count=25,
        facts={"aux_layer_ids": [1, 3, 5, 7], "decoder.num_hidden_layers": 2, "feature_norm": "joint"}, target=None,
    ),
]  # fmt: skip
ANGELSLIMS = [
    with_mask(
        name="angelslim", format="angelslim", method="eagle3", config=config(**ANGELSLIM),
        tensors=partial(eagle3, embed=True), count=16,
        facts={"decoder.rope.base": 10000.0, "decoder.rope.declared_base": 1e6},
    ),
    with_mask(
        name="angelslim-tied", format="angelslim", method="eagle3",
        config=config(**ANGELSLIM | {"tie_word_embeddings": True, "model_type": "qwen3"}),
        tensors=partial(eagle3, embed=True), count=16, facts={"lm_head": "draft"},
    ),
    with_mask(
        name="angelslim-vl", format="angelslim", method="eagle3", config=config(**ANGELSLIM_VL),
        tensors=partial(eagle3, embed=True), count=16,
        facts={"decoder.rope.base": 5e6, "decoder.rope.scaling.mrope_interleaved": True},
    ),
    with_mask(
        name="angelslim-hunyuan", format="angelslim", method="eagle3", config=config(**ANGELSLIM_HUNYUAN),
        tensors=partial(eagle3, embed=True), count=16,
        facts={"decoder.rope.scaling": {"rope_type": "dynamic", "factor": 1.0}},
    ),
    with_mask(
        name="angelslim-early-stop", format="angelslim", method="eagle3", lossy=True,
        config=config(**ANGELSLIM, early_stop_method="confidence_progress_remain"),
        tensors=partial(eagle3, embed=True, extra={"fc.weight": (H + 3, 3 * H)}), count=16,
    ),
]  # fmt: skip
MODELOPTS = [
    Published(
        name="modelopt", format="modelopt", method="eagle3", config=config(**MODELOPT), tensors=modelopt, count=14,
        facts={"aux_layer_ids": [2, 4, 5], "decoder.rope.base": 5e5, "norm_before_residual": False}, target=None,
    ),
    Published(
        name="modelopt-whole-vocabulary", format="modelopt", method="eagle3", config=config(**MODELOPT, **whole),
        tensors=partial(modelopt, draft_vocabulary=V, d2t=False), count=13,
    ),
    Published(
        name="modelopt-without-head", format="modelopt", method="eagle3", config=config(**MODELOPT, **whole),
        tensors=partial(modelopt, draft_vocabulary=V, d2t=False, head=False), count=12, facts={"lm_head": "target"},
    ),
    Published(
        name="modelopt-two-layers", format="modelopt", method="eagle3", config=config(**MODELOPT, num_hidden_layers=2),
        tensors=partial(modelopt, deeper={"layers.1.": "input_layernorm"}), count=23,
        facts={"decoder.num_hidden_layers": 2},
    ),
    Published(
        name="modelopt-medusa", format="modelopt", method="eagle3", lossy=True,
        config=config(**MODELOPT | {"eagle_config": MODELOPT_EAGLE | {"parallel_draft_step": 2}}),
        tensors=partial(modelopt, extra={
            "parallel_draft_heads.0.medusa_layers.0.linear.weight": (H, H),
            "parallel_draft_heads.0.medusa_layers.0.linear.bias": (H,),
            "parallel_draft_heads.lm_head.weight": (VD, H),
        }), count=17, dropped=(
            "parallel_draft_heads.0.medusa_layers.0.linear.weight",
            "parallel_draft_heads.0.medusa_layers.0.linear.bias", "parallel_draft_heads.lm_head.weight",
        ),
    ),
    Published(
        name="modelopt-last-state", format="modelopt", method="eagle3",
        config=config(**MODELOPT | {"eagle_config": MODELOPT_EAGLE | {
            "use_aux_hidden_state": False, "eagle_aux_hidden_state_layer_ids": [],
        }}),
        tensors=partial(modelopt, without=("fc.weight", "layers.0.hidden_norm.weight")), count=12,
        facts={"aux_layer_ids": None, "hidden_norm": False}, target=None,
    ),
    Published(
        name="modelopt-raw-output", format="modelopt", method="eagle3",
        config=config(**MODELOPT | {"eagle_config": MODELOPT_EAGLE | {"use_last_layernorm": False}}),
        tensors=partial(modelopt, without=("norm.weight",)), count=13, facts={"final_norm": False},
    ),
    Published(
        name="modelopt-fp8", format="modelopt", method="eagle3", config=config(**MODELOPT, quantization_config=FP8),
        tensors=quantised, count=28, json_files={"hf_quant_config.json": FP8},
    ),
    Published(
        name="modelopt-fp8-old", format="modelopt", method="eagle3", config=config(**MODELOPT),
        tensors=quantised, count=28,
        json_files={"hf_quant_config.json": {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}},
    ),
    Published(
        name="qwen3-class", format="modelopt", method="eagle3",
        config=config(
            architectures=["Eagle3Qwen3ForCausalLM"], tie_word_embeddings=False, torch_dtype="bfloat16",
            layer_types=["sliding_attention"], sliding_window=512, use_sliding_window=True, norm_before_residual=True,
            eagle_aux_hidden_state_layer_ids=[1, 3], num_aux_hidden_states=2, rope_theta=1e6,
        ) | {"model_type": "qwen3"},
        tensors=partial(modelopt, qk_norm=True, aux=2), count=16, target=None,
        facts={"decoder.qk_norm": True, "decoder.sliding_window": 512, "norm_before_residual": True},
    ),
    Published(
        name="megatron", format="modelopt-megatron", method="eagle3", config=config(**MEGATRON),
        tensors=partial(eagle3, t2d=False), count=14, facts={"aux_layer_ids": [2, 4, 5]},
    ),
    Published(
        name="megatron-whole-vocabulary", format="modelopt-megatron", method="eagle3",
        config=config(**MEGATRON, **whole), tensors=partial(eagle3, draft_vocabulary=V, d2t=False, embed=True),
        count=14,
    ),
    Published(
        name="megatron-deep", format="modelopt-megatron", method="eagle3",
        config=config(**MEGATRON | {"architectures": ["LlamaForCausalLMEagle3Deep"], "num_hidden_layers": 3}),
        tensors=partial(
            eagle3, first="midlayer.0.", deeper={"midlayer.1.": "hidden_norm", "midlayer.2.": "hidden_norm"}, t2d=False
        ), count=32, facts={"decoder.num_hidden_layers": 3},
    ),
]  # fmt: skip
PUBLISHED = [*SAFEAILAB, *SPECFORGES, *ANGELSLIMS, *MODELOPTS]
