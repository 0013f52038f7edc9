"""Tiny random targets of today's architectures that vLLM's CPU build runs, and drafts of them; for check_vllm.py.

The sizes are those that its kernels take: latents of 512 and 64 numbers, experts with a gated activation. Drafts learn
the targets' own greedy texts by heart, so that they are accepted now and then.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mtp_heads import add_head, new_head
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from draftkit.data.samples import Sample, SamplesOrigin, write_samples
from draftkit.requests import Request
from draftkit.train.config import Optimization, TrainConfig, Validation
from draftkit.train.run import train_draft

VOCABULARY = 320
PROMPTS = (24, 9, 40, 17, 31, 12)  # tokens
LINEAR, FULL = "linear_attention", "full_attention"
NGRAM, EAGLE3, OWN_HEAD = "n-gram", "EAGLE-3", "own head"
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"moe_intermediate_size": 64, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 32,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
GATED_DELTA = {
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "layer_types": [LINEAR, LINEAR, LINEAR, FULL] * 2,
}
LATENT = {
    **EXPERTS,
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}


@dataclass(frozen=True)
class TinyTarget:
    """A type of configuration with what its class is given beside `COMMON`.

    `drafts`: which are compared. `scale`: standard deviation of the weights, small enough that texts repeat.
    `plain_ops`: vLLM without its own operations, of which the CPU's norm is wrong on parts of a tensor (latents).
    `modules` of its own head, and the tokens that it drafts a round: with each module once, and again. Several draft in
    turn in vLLM's V2 runner alone.
    """

    title: str
    kind: str
    sizes: dict[str, Any]
    drafts: tuple[str, ...] = (NGRAM,)
    scale: float = 0.12
    plain_ops: bool = False
    modules: int = 1
    head_drafts: tuple[int, ...] = (1, 3)


GLM = {
    **EXPERTS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "head_dim": 32,
    "use_qk_norm": True,
}
TARGETS = (
    TinyTarget(
        "Qwen3-Next (gated delta net, MoE)",
        "qwen3_next",
        {**EXPERTS, **GATED_DELTA, "shared_expert_intermediate_size": 64},
        (NGRAM, EAGLE3, OWN_HEAD),
    ),
    TinyTarget("Qwen3.5 (gated delta net)", "qwen3_5_text", GATED_DELTA, (OWN_HEAD,)),
    TinyTarget("GLM-4.5 (MoE)", "glm4_moe", GLM, (OWN_HEAD,)),
    TinyTarget("GLM-4.5 (MoE), two modules, V2", "glm4_moe", GLM, (OWN_HEAD,), modules=2, head_drafts=(2, 4)),
    TinyTarget("MiMo", "mimo", {}, (OWN_HEAD,)),
    TinyTarget(
        "Nemotron-H (Mamba-2)",
        "nemotron_h",
        {
            "layer_types": [LINEAR, "mlp", FULL, LINEAR, "mlp", LINEAR, FULL, "mlp"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 64,
            "ssm_state_size": 64,
            "n_groups": 2,
            "chunk_size": 16,
            "head_dim": 64,
        },
        (NGRAM, EAGLE3),
    ),
    TinyTarget("Falcon-H1 (Mamba-2 beside attention)", "falcon_h1", {**MAMBA, "mamba_d_ssm": 256, "head_dim": 32}),
    TinyTarget(
        "Granite-4 hybrid (Mamba-2, MoE)",
        "granitemoehybrid",
        {
            **MAMBA,
            "layer_types": ["mamba", "attention"] * 4,
            "shared_intermediate_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    # The CPU build has no block size for latents and for the keys and values of an EAGLE-3 draft beside them.
    TinyTarget("DeepSeek-V2 (MLA, MoE)", "deepseek_v2", LATENT, plain_ops=True),
    TinyTarget(
        "DeepSeek-V3 (MLA, MoE)",
        "deepseek_v3",
        LATENT | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},  # which transformers takes for granted
        (NGRAM, OWN_HEAD),
        plain_ops=True,
    ),
)


class MimoConfig(Qwen2Config):
    """Of MiMo-7B, whose own code comes with its weights: what it computes is Qwen2, but for the head."""

    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):
    config_class = MimoConfig


AutoConfig.register("mimo", MimoConfig)
AutoModelForCausalLM.register(MimoConfig, MiMoForCausalLM)


def save_tiny_target(tiny: TinyTarget, folder: Path) -> None:
    """Write a random model whose norms differ and whose greedy texts have clear winners, with a head where that is
    wanted."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[tiny.kind](**(COMMON | {"tie_word_embeddings": False} | tiny.sizes))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _draw(model, tiny.scale)
    model.save_pretrained(folder)
    if OWN_HEAD in tiny.drafts:
        head = new_head(config, tiny.modules)
        _draw(head, tiny.scale)
        add_head(head, folder)


def _draw(model: nn.Module, scale: float) -> None:
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter.data, 0.5, 0.2)
        elif parameter.dim() > 1 and "A_log" not in name:
            nn.init.normal_(parameter.data, 0, scale)


def prompts(max_new_tokens: int) -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in PROMPTS]
    return [Request(str(i), tuple(tokens), max_new_tokens) for i, tokens in enumerate(drawn)]


LEARNED: dict[str, tuple[str, dict[str, object]]] = {
    EAGLE3: ("eagle3", {"layers": [2, 4, 5], "steps": 3}),
    OWN_HEAD: ("mtp", {"steps": 3}),
}


def train(draft: str, target: Path, texts: list[tuple[tuple[int, ...], list[int]]], out: Path) -> Path:
    """The folder of a draft that has learned these prompts and answers, by heart where it could."""
    recipe, options = LEARNED[draft]
    data = out / "samples.jsonl"
    out.mkdir()
    samples = [
        Sample.of(str(i), [*prompt, *answer], [(len(prompt), len(prompt) + len(answer))])
        for i, (prompt, answer) in enumerate(texts)
    ]
    write_samples(data, samples, SamplesOrigin(target=str(target), tokenizer_sha256="0" * 64))
    config = TrainConfig(
        recipe=recipe,
        target=str(target),
        data=str(data),
        out=str(out / "run"),
        tokens_per_row=512,
        device="cpu",
        target_dtype="float32",
        optimization=Optimization(max_steps=120, lr=3e-3, precision="float32"),
        validation=Validation(share=0.0),
        options=options,
    )
    trained = train_draft(config).draft
    assert trained is not None
    return trained
