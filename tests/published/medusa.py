"""Medusa heads: the original file, what whole models hold, and vLLM's layout."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from published.causal_lm import llama, saved
from published.checkpoint import Published, Tensors, randoms

# As published: 2 heads are stated, 5 are stored.
CONFIG = {
    "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
    "medusa_num_heads": 2,
    "medusa_num_layers": 1,
    "transformers_version": "4.31.0",
}
TARGET = llama(tie_word_embeddings=False)
VLLM = {
    "architectures": ["MedusaModel"],
    "hidden_size": 64,
    "max_paths": 64,
    "max_seq_len": 1048576,
    "model_type": "medusa",
    "num_heads": 5,
    "num_hidden_layers": 1,
    "topk": 10,
    "torch_dtype": "float16",
    "transformers_version": "4.41.2",
    "truncated_vocab_size": 320,
    "vocab_size": 320,
}


def original(dtype: torch.dtype, layers: int = 1, matrices: bool = True, prefix: str = "") -> Tensors:
    """`medusa_lm_head.pt`: the blocks of a head are one module, repeated."""
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(5):
        shapes |= {f"{head}.0.linear.weight": (64, 64), f"{head}.0.linear.bias": (64,)}
        if matrices:
            shapes[f"{head}.{layers}.weight"] = (320, 64)
    tensors = randoms(shapes, dtype, seed=7)
    for head in range(5):
        for layer in range(1, layers):
            for kind in ("weight", "bias"):
                tensors[f"{head}.{layer}.linear.{kind}"] = tensors[f"{head}.0.linear.{kind}"]
    return {prefix + name: tensor for name, tensor in tensors.items()}


def vllm(dtype: torch.dtype, rows: int = 320, bias: bool = False, shared: bool = False) -> Tensors:
    shapes: dict[str, tuple[int, ...]] = {f"blocks.{head}.layers.0.weight": (64, 64) for head in range(5)}
    if bias:
        shapes |= {f"blocks.{head}.layers.0.bias": (64,) for head in range(5)}
    names = ["lm_head.weight"] if shared else [f"lm_heads.{head}.weight" for head in range(5)]
    return randoms(shapes | dict.fromkeys(names, (rows, 64)), dtype, seed=9)


def with_map(tensors: Tensors) -> Tensors:
    kept = torch.randperm(320, generator=torch.Generator().manual_seed(4))[:128]
    return tensors | {"token_map": kept}


def truncated(dtype: torch.dtype, **options: Any) -> Tensors:
    return with_map(vllm(dtype, **options))


def whole_model(dtype: torch.dtype) -> Tensors:
    """A fine-tuned target with its heads (Medusa-2)."""
    return saved(dtype, TARGET) | original(dtype, prefix="medusa_head.")


def medusa(name: str, config: dict[str, Any], tensors: Any, count: int, **options: Any) -> Published:
    facts = {"num_heads": 5, "target_hidden_size": 64, "vocab_size": 320} | options.pop("facts", {})
    return Published(
        name=name, format="medusa", method="medusa", config=config, tensors=tensors, count=count, facts=facts, **options
    )


PUBLISHED = [
    medusa(
        "medusa", CONFIG, original, 15, weights="medusa_lm_head.pt",
        facts={"num_layers": 1, "bias": True, "lm_head": "draft", "draft_vocab_size": 320},
    ),
    medusa("medusa-safetensors", CONFIG, original, 15, weights="medusa_lm_head.safetensors"),
    medusa(
        "medusa-two-layers", CONFIG | {"medusa_num_layers": 2}, partial(original, layers=2), 25,
        weights="medusa_lm_head.pt", facts={"num_layers": 2},
    ),
    medusa(
        "medusa-legacy", CONFIG | {"version": "2"}, partial(original, matrices=False), 10,
        weights="medusa_lm_head.pt", facts={"lm_head": "target"},
    ),
    medusa("medusa-modelopt", CONFIG, partial(original, prefix="medusa_heads."), 15, weights="pytorch_model.bin"),
    medusa(
        "medusa-whole-model", TARGET | {"medusa_num_heads": 5, "medusa_num_layers": 1}, whole_model, 27,
        dropped=tuple(saved(torch.float32, TARGET)), facts={"num_layers": 1},
    ),
    medusa("medusa-vllm", VLLM, vllm, 10, facts={"bias": False, "lm_head": "draft"}),
    medusa("medusa-vllm-bias", VLLM | {"medusa_fc_bias": True}, partial(vllm, bias=True), 15, facts={"bias": True}),
    medusa(
        "medusa-vllm-shared", VLLM | {"original_lm_head": True}, partial(vllm, shared=True), 6,
        facts={"lm_head": "shared"},
    ),
    medusa(
        "medusa-vllm-first-head", VLLM | {"original_lm_head": True}, vllm, 10, facts={"lm_head": "shared"},
        dropped=tuple(f"lm_heads.{head}.weight" for head in range(1, 5)),
    ),
    medusa(
        "medusa-vllm-truncated", VLLM | {"original_lm_head": True, "truncated_vocab_size": 128},
        partial(truncated, rows=128, shared=True), 7, facts={"draft_vocab_size": 128, "lm_head": "shared"},
    ),
    medusa(
        "medusa-vllm-uncut", VLLM | {"original_lm_head": True, "truncated_vocab_size": 128},
        partial(truncated, shared=True), 7, facts={"draft_vocab_size": 128},
    ),
    medusa("medusa-vllm-unused-map", VLLM, truncated, 11, facts={"draft_vocab_size": 320}, dropped=("token_map",)),
]  # fmt: skip
