"""Plain causal language models: what transformers writes for several families, and for fp8."""

from __future__ import annotations

import json
import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from published.checkpoint import Published, Tensors


def llama(**changes: Any) -> dict[str, Any]:
    """The config of a Llama 3.2 1B. None removes a key."""
    values: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 128,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0",
        "use_cache": True,
        "vocab_size": 320,
    }
    return _changed(values, changes)


def qwen2(**changes: Any) -> dict[str, Any]:
    """The config of a Qwen2.5 0.5B."""
    values: dict[str, Any] = {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
        "max_window_layers": 21,
        "model_type": "qwen2",
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 512,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.1",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 320,
    }
    return _changed(values, changes)


def qwen3(**changes: Any) -> dict[str, Any]:
    """The config of a Qwen3 0.6B."""
    own = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 16,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "rope_scaling": None,
        "sliding_window": None,
        "transformers_version": "4.51.0",
    }
    return _changed(qwen2() | own, changes)


def _changed(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    values = values | changes
    removed = [key for key, value in changes.items() if value is None]
    return {key: value for key, value in values.items() if key not in removed}


def saved(dtype: torch.dtype, config: dict[str, Any], seed: int = 5) -> Tensors:
    """The weights that transformers saves for a config, random."""
    return {name: tensor.to(dtype) for name, tensor in _saved(json.dumps(config), seed).items()}


@cache
def _saved(config: str, seed: int) -> Tensors:
    values = json.loads(config)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    with tempfile.TemporaryDirectory() as folder:
        model.float().save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def with_head(dtype: torch.dtype, config: dict[str, Any]) -> Tensors:
    """A tied model whose file has the head too."""
    tensors = saved(dtype, config)
    return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}


def fp8(dtype: torch.dtype, config: dict[str, Any]) -> Tensors:
    """Linear weights in fp8 with one scale for each block of 32 × 32, as Qwen publishes them with 128 × 128."""
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, tensor in saved(dtype, config).items():
        if "_proj" in name:
            tensors[name] = tensor.to(torch.float8_e4m3fn)
            blocks = [-(-size // 32) for size in tensor.shape]
            tensors[name.replace(".weight", ".weight_scale_inv")] = torch.rand(blocks, generator=generator)
        else:
            tensors[name] = tensor
    return tensors


def with_rope_buffers(dtype: torch.dtype, config: dict[str, Any]) -> Tensors:
    """As JackFram/llama-68m lies on the Hub: every layer with its frequencies."""
    tensors = saved(dtype, config)
    frequencies = 1 / 10000 ** (torch.arange(0, 16, 2) / 16)
    return tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": frequencies}


def pythia(dtype: torch.dtype, config: dict[str, Any]) -> Tensors:
    """As EleutherAI's Pythia lies on the Hub: every layer with its causal mask and its frequencies."""
    attention = "gpt_neox.layers.0.attention."
    mask = torch.ones(1, 1, 512, 512, dtype=torch.bool).tril()
    return saved(dtype, config) | {
        f"{attention}bias": mask,
        f"{attention}masked_bias": torch.tensor(-1e9).to(dtype),
        f"{attention}rotary_emb.inv_freq": 1 / 10000 ** (torch.arange(0, 4, 2) / 4),
    }


def base_model(dtype: torch.dtype, config: dict[str, Any], module: str) -> Tensors:
    """A model saved without its head, whose tensors lack the name of the module around them."""
    return {name.removeprefix(module): tensor for name, tensor in saved(dtype, config).items()}


def gpt2(dtype: torch.dtype, config: dict[str, Any]) -> Tensors:
    """As openai-community/gpt2 lies on the Hub: no prefix, and every layer with its causal mask in float32."""
    mask = torch.ones(512, 512).tril()[None, None]
    return base_model(dtype, config, "transformer.") | {"h.0.attn.bias": mask}


FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "modules_to_not_convert": ["lm_head"],
    "quant_method": "fp8",
    "weight_block_size": [32, 32],
}
GEMMA = {
    "architectures": ["GemmaForCausalLM"], "model_type": "gemma", "vocab_size": 320, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 1,
    "head_dim": 16, "hidden_act": "gelu", "max_position_embeddings": 512, "torch_dtype": "bfloat16",
}  # fmt: skip
OPT = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "vocab_size": 320, "hidden_size": 64, "ffn_dim": 96,
    "num_hidden_layers": 1, "num_attention_heads": 4, "word_embed_proj_dim": 64, "max_position_embeddings": 512,
    "do_layer_norm_before": True, "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1,
}  # fmt: skip
GPT_NEOX = {
    "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "vocab_size": 320, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 512,
    "rotary_pct": 0.25, "rotary_emb_base": 10000, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 320, "n_embd": 64, "n_layer": 1,
    "n_head": 4, "n_positions": 512, "n_ctx": 512, "bos_token_id": 319, "eos_token_id": 319,
}  # fmt: skip
BLOOM = {
    "architectures": ["BloomForCausalLM"], "model_type": "bloom", "vocab_size": 320, "hidden_size": 64, "n_layer": 1,
    "n_head": 4, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3,
}  # fmt: skip
MOE = qwen3(
    architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", num_experts=2, num_experts_per_tok=1,
    moe_intermediate_size=32, decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True, tie_word_embeddings=False,
)  # fmt: skip


def causal_lm(name: str, config: dict[str, Any], count: int, tensors: Any = saved, **options: Any) -> Published:
    facts = {"config": config, "vocab_size": 320, "parallel": None, "target_features": None}
    return Published(
        name=name, format="causal-lm", method="draft-model", config=config, count=count,
        tensors=partial(tensors, config=config), facts=facts, **options,
    )  # fmt: skip


PUBLISHED = [
    causal_lm("llama-tied", llama(), 11),
    causal_lm("llama-tied-with-head", llama(), 12, with_head),
    causal_lm("llama-own-head", llama(tie_word_embeddings=False), 12),
    causal_lm("llama-bin", llama(tie_word_embeddings=False), 12, weights="pytorch_model.bin"),
    causal_lm("mistral", llama(architectures=["MistralForCausalLM"], model_type="mistral", rope_scaling=None), 11),
    causal_lm("qwen2", qwen2(), 14),
    causal_lm("qwen3", qwen3(), 13),
    causal_lm("qwen3-fp8", qwen3(quantization_config=FP8), 20, fp8),
    causal_lm("qwen3-moe", MOE, 18),
    causal_lm("gemma", GEMMA, 11),
    causal_lm("opt", OPT, 20),
    # transformers does not write buffers either.
    causal_lm(
        "llama-68m",
        llama(rope_scaling=None, rope_theta=None),
        12,
        with_rope_buffers,
        dropped=("model.layers.0.self_attn.rotary_emb.inv_freq",),
        back=False,
    ),
    causal_lm(
        "pythia",
        GPT_NEOX,
        19,
        pythia,
        dropped=tuple(f"gpt_neox.layers.0.attention.{n}" for n in ("bias", "masked_bias", "rotary_emb.inv_freq")),
        back=False,
    ),
    # Written back with the names that transformers gives the causal LM, which loads both.
    causal_lm("gpt2", GPT2, 17, gpt2, dropped=("h.0.attn.bias",), back=False),
    causal_lm("opt-base", OPT, 20, partial(base_model, module="model."), back=False),
    causal_lm("bloom-base", BLOOM, 17, partial(base_model, module="transformer."), back=False),
]
