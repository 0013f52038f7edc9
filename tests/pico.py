"""Pico models and checkpoints: real architectures and file layouts, tiny sizes, random weights.

The one place that makes them; every test that needs a checkpoint takes it from here.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftkit.layout.decoder import Decoder, Rope
from draftkit.layout.families.eagle import EagleSpec

VOCABULARY = 320
DRAFT_VOCABULARY = 128
HIDDEN = 64
LAYERS = 8

# What `eagle_tensors()` with `eagle_config()` are, and `eagle3_tensors()` with `eagle3_config()` for the pico target.
EAGLE_SPEC = EagleSpec(
    decoder=Decoder(
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        hidden_act="silu",
        rms_norm_eps=1e-5,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_window=None,
        rope=Rope(base=10000.0, declared_base=None, scaling=None, max_position_embeddings=2048),
    ),
    vocab_size=VOCABULARY,
    draft_vocab_size=VOCABULARY,
    target_hidden_size=HIDDEN,
    aux_layer_ids=None,
    token_entry="fusion",
    concatenation="embedding_hidden",
    fusion_bias=False,
    feature_norm="none",
    embedding_norm=False,
    hidden_norm=False,
    input_norm=False,
    norm_before_residual=False,
    final_norm=False,
    feedback="pre_norm",
    logit_scale=1.0,
    embed_tokens="draft",
    lm_head="target",
    parallel=None,
)
EAGLE3_SPEC = replace(
    EAGLE_SPEC,
    draft_vocab_size=DRAFT_VOCABULARY,
    aux_layer_ids=(2, 4, 5),
    token_entry="attention",
    embedding_norm=True,
    hidden_norm=True,
    final_norm=True,
    embed_tokens="target",
    lm_head="draft",
)


def llama_config(**changes: object) -> LlamaConfig:
    values: dict[str, object] = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "initializer_range": 0.2,  # large, so that greedy decoding has clear winners
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**(values | changes))


def llama(seed: int = 0, **changes: object) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(llama_config(**changes)).eval().requires_grad_(False)


def overflowing(model: LlamaForCausalLM, token: int) -> LlamaForCausalLM:
    """The model, whose weights stay finite, made to overflow in the MLP of its first layer at one token.

    That token alone has something in the first place of its embedding.
    """
    layer = model.model.layers[0]
    model.get_input_embeddings().weight[:, 0] = 0
    model.get_input_embeddings().weight[token, 0] = 10
    layer.self_attn.o_proj.weight[0] = 0
    layer.mlp.gate_proj.weight[0, 0] = layer.mlp.up_proj.weight[0, 0] = 1e30
    return model


def save_llama(folder: Path, seed: int = 0, **changes: object) -> Path:
    llama(seed, **changes).save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path) -> Path:
    """A byte-level tokenizer without merges, whose ids all lie in the vocabulary."""
    pieces = ["<pad>", "<s>", "</s>", *sorted(ByteLevel.alphabet())]
    tokenizer = Tokenizer(BPE({piece: index for index, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder


def _layer(
    prefix: str, wide: int, dtype: torch.dtype, qkv_bias: bool = False, kv_heads: int = 2
) -> dict[str, torch.Tensor]:
    keys = kv_heads * 16
    shapes = {
        "self_attn.q_proj.weight": (64, wide),
        "self_attn.k_proj.weight": (keys, wide),
        "self_attn.v_proj.weight": (keys, wide),
        "self_attn.o_proj.weight": (HIDDEN, 64),
        "mlp.gate_proj.weight": (96, HIDDEN),
        "mlp.up_proj.weight": (96, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, 96),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    if qkv_bias:
        shapes |= {"self_attn.q_proj.bias": (64,), "self_attn.k_proj.bias": (keys,), "self_attn.v_proj.bias": (keys,)}
    return {prefix + name: _random(shape, dtype) for name, shape in shapes.items()}


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    scale = 1.0 if len(shape) == 1 else 0.2
    return (torch.randn(shape) * scale).to(dtype)


def eagle_tensors(
    *,
    bias: bool = False,
    embed: bool = True,
    layers: int = 1,
    qkv_bias: bool = False,
    kv_heads: int = 2,
    dtype: torch.dtype = torch.float16,
) -> dict[str, torch.Tensor]:
    """EAGLE-1 under its published names."""
    torch.manual_seed(11)
    tensors = {"fc.weight": _random((HIDDEN, 2 * HIDDEN), dtype)}
    if embed:
        tensors["embed_tokens.weight"] = _random((VOCABULARY, HIDDEN), dtype)
    if bias:
        tensors["fc.bias"] = _random((HIDDEN,), dtype)
    for index in range(layers):
        tensors |= _layer(f"layers.{index}.", HIDDEN, dtype, qkv_bias, kv_heads)
        if index:
            tensors[f"layers.{index}.input_layernorm.weight"] = _random((HIDDEN,), dtype)
    return tensors


def eagle_config(**changes: object) -> dict[str, object]:
    """As SafeAILab's LLaMA3 files: `bias` is about fc.bias, no rope_theta, max_position 2048. None removes a key."""
    values: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.28.1",
        "use_cache": True,
        "vocab_size": VOCABULARY,
    }
    values |= changes
    return {key: value for key, value in values.items() if value is not None}


def eagle3_tensors(
    *,
    embed: bool = False,
    draft_vocabulary: int = DRAFT_VOCABULARY,
    target_hidden: int = HIDDEN,
    dtype: torch.dtype = torch.float16,
) -> dict[str, torch.Tensor]:
    """EAGLE-3 under its published names; d2t keeps a seeded subset of the vocabulary."""
    torch.manual_seed(12)
    kept = torch.randperm(VOCABULARY)[:draft_vocabulary].sort().values
    t2d = torch.zeros(VOCABULARY, dtype=torch.bool)
    t2d[kept] = True
    tensors = _layer("midlayer.", 2 * HIDDEN, dtype) | {
        "midlayer.hidden_norm.weight": _random((HIDDEN,), dtype),
        "midlayer.input_layernorm.weight": _random((HIDDEN,), dtype),
        "fc.weight": _random((HIDDEN, 3 * target_hidden), dtype),
        "norm.weight": _random((HIDDEN,), dtype),
        "lm_head.weight": _random((draft_vocabulary, HIDDEN), dtype),
        "d2t": kept - torch.arange(draft_vocabulary),
        "t2d": t2d,
    }
    if embed:
        tensors["embed_tokens.weight"] = _random((VOCABULARY, HIDDEN), dtype)
    return tensors


def eagle3_config(**changes: object) -> dict[str, object]:
    return eagle_config(**({"bias": None, "draft_vocab_size": DRAFT_VOCABULARY} | changes))


def save_target_config(folder: Path, **changes: object) -> Path:
    """A target without weights: its config.json, which is all that a conversion reads of it."""
    llama_config(**changes).save_pretrained(folder)
    return folder


def write_checkpoint(
    folder: Path, config: dict[str, object], tensors: dict[str, torch.Tensor], *, safetensors: bool = False
) -> Path:
    """A checkpoint folder as published: config.json, and pytorch_model.bin or model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if safetensors:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        torch.save(tensors, folder / "pytorch_model.bin")
    return folder
