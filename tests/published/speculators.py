"""The speculators library: EAGLE-3 and P-EAGLE (0.9), its first EAGLE-1 layout, and EAGLE-1 converted for vLLM V0.

The nested configs have every key that transformers writes for their class.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pico
import torch

from published.checkpoint import Published, Tensors, random, randoms
from published.layers import VD, D, H, I, Shapes, V, layer, vocabulary_map

INPUT, HIDDEN = "input_layernorm", "hidden_norm"
Config = dict[str, Any]

LLAMA: Config = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": D,
    "hidden_act": "silu",
    "hidden_size": H,
    "initializer_range": 0.02,
    "intermediate_size": I,
    "max_position_embeddings": 512,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": V,
}
QWEN3: Config = {key: value for key, value in LLAMA.items() if key not in ("mlp_bias", "pretraining_tp")} | {
    "bos_token_id": None,
    "eos_token_id": None,
    "layer_types": ["full_attention"],
    "max_window_layers": 28,
    "model_type": "qwen3",
    "sliding_window": None,
    "use_sliding_window": False,
}
# As transformers 4 wrote it; the files of 2025 are like this.
OLD_LLAMA: Config = {key: value for key, value in LLAMA.items() if key != "rope_parameters"} | {
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "torch_dtype": "float16",
}
SLIDING = {"layer_types": ["sliding_attention"], "sliding_window": 64, "use_sliding_window": True}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 512,
}  # fmt: skip


def serving(algorithm: str) -> Config:
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1}
        ],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "meta-llama/Llama-3.1-8B-Instruct"},
    }


def eagle3_config(layer: Config | None = None, **changes: Any) -> Config:
    values: Config = {
        "architectures": ["Eagle3DraftModel"],
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "draft_vocab_size": VD,
        "dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "embed_requires_grad": False,
        "fc_norm": False,
        "norm_before_fc": False,
        "norm_before_residual": True,
        "norm_output": False,
        "speculators_config": serving("eagle3"),
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": LLAMA | (layer or {}),
        "transformers_version": "5.19.0",
    }
    return values | changes


def peagle_config(layer: Config | None = None, **changes: Any) -> Config:
    values = {
        "architectures": ["PEagleDraftModel"],
        "auto_map": {"": "config.PEagleSpeculatorConfig"},
        "embed_requires_grad": True,
        "mask_token_id": 319,
        "norm_before_residual": False,
        "speculators_config": serving("peagle"),
        "speculators_model_type": "peagle",
    }
    return eagle3_config(layer) | values | changes


def attention_biases(layers: Shapes) -> Shapes:
    return {f"{name[:-7]}.bias": shape[:1] for name, shape in layers.items() if "self_attn" in name}


def eagle3_tensors(
    dtype: torch.dtype,
    *,
    layers: int = 1,
    captured: int = 3,
    width: int = H,
    vocabulary: int = VD,
    embed: bool = True,
    mask: bool = False,
    joint: bool = False,
    per_layer: bool = False,
    bias: bool = False,
    qk_norm: bool = False,
) -> Tensors:
    shapes = layer("layers.0.", norms=(INPUT, HIDDEN), wide=True, qk_norm=qk_norm)
    for index in range(1, layers):
        shapes |= layer(f"layers.{index}.", norms=(INPUT,), qk_norm=qk_norm)
    if bias:
        shapes |= attention_biases(shapes)
    shapes |= {"fc.weight": (H, captured * width), "norm.weight": (H,), "lm_head.weight": (vocabulary, H)}
    if embed:
        shapes["embed_tokens.weight"] = (V, H)
    if joint:
        shapes["input_norm.weight"] = (captured * width,)
    if per_layer:
        shapes |= {f"fc_norm.{i}.weight": (width,) for i in range(captured)}
    if mask:
        shapes["mask_hidden"] = (1, 1, captured * width)
    return randoms(shapes, dtype, seed=21) | (vocabulary_map(vocabulary) if vocabulary < V else {})


def legacy_config(**changes: Any) -> Config:
    values: Config = {
        "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
        "auto_map": {"": "eagle.EagleSpeculatorConfig"},
        "fusion_bias": False,
        "layernorms": False,
        "speculators_config": serving("eagle"),
        "speculators_model_type": "eagle",
        "speculators_version": "0.1.0",
        "torch_dtype": "float32",
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "transformer_layer_config": OLD_LLAMA,
        "transformers_version": "4.53.1",
    }
    return values | changes


def legacy_tensors(dtype: torch.dtype, *, layernorms: bool = False, bias: bool = False) -> Tensors:
    shapes = {"fusion_fc.weight": (H, 2 * H)} | layer("transformer.", norms=(INPUT,) * layernorms)
    if bias:
        shapes["fusion_fc.bias"] = (H,)
    if layernorms:
        shapes |= {"embedding_layernorm.weight": (H,), "pre_lm_head_layernorm.weight": (H,)}
    return randoms(shapes, dtype, seed=23)


def v0_config(outer: Config | None = None, **model: Any) -> Config:
    inner = pico.eagle_config(bias=None, pretraining_tp=1) | {"rope_scaling": None} | model
    return {"model_type": "eagle", "model": inner} | (outer or {})


def v0_tensors(
    dtype: torch.dtype,
    *,
    rows: int = V,
    token_map: int = 0,
    norms: bool = False,
    prefixed: bool = False,
    **options: bool,
) -> Tensors:
    tensors = pico.eagle_tensors(dtype=dtype, **options)
    generator = torch.Generator().manual_seed(24)
    names = ("enorm.weight", "hnorm.weight", "layers.0.input_layernorm.weight", "norm.weight")
    tensors |= {name: random((H,), dtype, generator) for name in names if norms}
    if prefixed:
        tensors = {name if name.startswith("fc.") else f"model.model.{name}": t for name, t in tensors.items()}
    head = random((rows, H), dtype, generator)
    tensors["model.lm_head.weight" if prefixed else "lm_head.weight"] = head
    if token_map:  # by frequency, not ascending
        tensors["token_map"] = torch.randperm(V, generator=generator)[:token_map]
    return tensors


def eagle3(
    name: str, config: Config, count: int, facts: Config, *, method: str = "eagle3", **options: Any
) -> Published:
    kept = {key: options.pop(key) for key in ("target", "lossy", "back") if key in options}
    dropped = ("t2d",) if options.get("vocabulary", VD) < V else ()
    tensors = partial(eagle3_tensors, **options)
    return Published(name, "speculators", method, config, tensors, count, facts, dropped=dropped, **kept)


def legacy(name: str, config: Config, count: int, facts: Config, **options: Any) -> Published:
    return Published(name, "speculators-eagle", "eagle", config, partial(legacy_tensors, **options), count, facts)


def v0(name: str, config: Config, count: int, facts: Config, **options: Any) -> Published:
    return Published(name, "vllm-eagle", "eagle", config, partial(v0_tensors, **options), count, facts)


PUBLISHED = [
    eagle3(
        "speculators-eagle3", eagle3_config(), 16,
        {
            "norm_before_residual": True, "aux_layer_ids": [2, 4, 5], "embed_tokens": "draft", "feature_norm": "none",
            "feedback": "pre_norm", "decoder.rope.base": 500000.0, "decoder.sliding_window": None,
        },
    ),
    # What `speculators train` writes without options: sliding window, a norm before fc, the normed state fed back.
    eagle3(
        "speculators-eagle3-trained",
        eagle3_config(SLIDING, norm_before_fc=True, norm_output=True), 17,
        {"feature_norm": "joint", "feedback": "post_norm", "decoder.sliding_window": 64}, joint=True,
    ),
    eagle3(
        "speculators-eagle3-qwen3", eagle3_config() | {"transformer_layer_config": QWEN3}, 18,
        {"decoder.qk_norm": True, "decoder.sliding_window": None}, qk_norm=True,
    ),
    eagle3(
        "speculators-eagle3-full-vocabulary", eagle3_config(draft_vocab_size=V), 14, {"draft_vocab_size": V},
        vocabulary=V,
    ),
    eagle3(
        "speculators-eagle3-knobs",
        eagle3_config(
            {"attention_bias": True, "num_hidden_layers": 2, "rope_parameters": LLAMA3_ROPE},
            fc_norm=True, eagle_aux_hidden_state_layer_ids=[1, 2, 4, 8],
        ),
        37,  # 16, four fc_norm, nine of a second layer, eight biases
        {
            "decoder.num_hidden_layers": 2, "decoder.qkv_bias": True, "decoder.output_bias": True,
            "aux_layer_ids": [1, 2, 4, 8], "feature_norm": "per_layer", "decoder.rope.base": 500000.0,
            "decoder.rope.scaling": {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"},
        },
        layers=2, captured=4, per_layer=True, bias=True,
    ),
    # Transformers 4 and Eagle3Converter: null ids, rope_theta, no embedding where the source had none.
    eagle3(
        "speculators-eagle3-converted",
        eagle3_config(
            architectures=["Eagle3Speculator"], eagle_aux_hidden_state_layer_ids=None, norm_before_residual=False,
            speculators_version="0.1.0",
        ) | {"transformer_layer_config": OLD_LLAMA},
        15,
        {"norm_before_residual": False, "aux_layer_ids": [2, 4, 5], "embed_tokens": "target", "decoder.rope.base": 1e4},
        embed=False,
    ),
    eagle3(
        "speculators-eagle3-wide-target", eagle3_config(target_hidden_size=2 * H), 16, {"target_hidden_size": 2 * H},
        width=2 * H, target={"hidden_size": 2 * H}, back=False,  # a loss there: the library's own class has no such fc
    ),
    eagle3(
        "speculators-eagle3-multimodal",
        eagle3_config({"rope_parameters": {"rope_theta": 5e6, "rope_type": "default", "mrope_section": [4, 2, 2]}}), 16,
        {"decoder.rope.scaling": {"rope_type": "default", "mrope_section": [4, 2, 2]}},
    ),
    eagle3(
        "speculators-peagle", peagle_config({"num_hidden_layers": 2}), 26,
        {"parallel": {"mask_token_id": 319, "mask_state": True}, "embed_tokens": "draft"},
        method="p-eagle", layers=2, mask=True,
    ),
    eagle3(
        "speculators-peagle-qwen3",
        peagle_config(fc_norm=True) | {"transformer_layer_config": QWEN3 | SLIDING}, 22,
        {"feature_norm": "per_layer", "decoder.qk_norm": True, "decoder.sliding_window": 64},
        method="p-eagle", mask=True, per_layer=True, qk_norm=True,
    ),
    legacy("speculators-eagle", legacy_config(), 9, {"fusion_bias": False, "embed_tokens": "target"}),
    legacy(
        "speculators-eagle-layernorms", legacy_config(layernorms=True, fusion_bias=True), 13,
        {"fusion_bias": True, "embedding_norm": True, "hidden_norm": False, "input_norm": True, "final_norm": True},
        layernorms=True, bias=True,
    ),
    v0("vllm-eagle", v0_config(bias=False), 11, {"lm_head": "draft", "fusion_bias": False, "final_norm": False}),
    v0(
        "vllm-eagle-prefixed", v0_config(eagle_fc_bias=True), 12, {"fusion_bias": True, "embed_tokens": "draft"},
        prefixed=True, bias=True,
    ),
    v0(
        "vllm-eagle-token-map", v0_config({"truncated_vocab_size": VD}), 12, {"draft_vocab_size": VD},
        rows=VD, token_map=VD,
    ),
    v0(
        "vllm-eagle-norms", v0_config(add_para_norm=True, skip_prenorm=False, skip_output_norm=False), 15,
        {"embedding_norm": True, "hidden_norm": True, "input_norm": True, "final_norm": True, "feedback": "post_norm"},
        norms=True,
    ),
]  # fmt: skip
