"""Tiny random targets of today's architectures that vLLM's CPU build runs, and drafts of them; for `vllm.py`.

The sizes are those that its kernels take: latents of 512 and 64 numbers, experts with a gated activation. Drafts learn
the targets' own greedy texts by heart, so that some are accepted.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fixtures.checkpoints import mtp_targets  # noqa: F401  # registers MiMo
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from draftkit.data.sample_files import write_samples
from draftkit.data.samples import Sample, SamplesOrigin
from draftkit.layout.families.mtp import MtpSpec
from draftkit.layout.mtp import QWEN, head_kind
from draftkit.models.mtp import MtpModel, stored_mtp
from draftkit.requests import Request
from draftkit.train.config import TrainConfig
from draftkit.train.run import train_draft
from draftkit.train.settings import Optimization, Validation

VOCABULARY = 320
PROMPTS = (24, 9, 40, 17, 31, 12)  # tokens
LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
NGRAM, EAGLE3, OWN_HEAD = "n-gram", "EAGLE-3", "own head"
ASSISTANT, ORDERED_ASSISTANT = "assistant", "assistant, ordered embedding"
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 64, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_n_groups": 1, "mamba_chunk_size": 16}
GATED_DELTA = {
    "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64, "layer_types": [LINEAR, LINEAR, LINEAR, FULL] * 2,
}  # fmt: skip
LATENT = EXPERTS | {
    "kv_lora_rank": 512, "q_lora_rank": 64, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
GLM = EXPERTS | {
    "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "head_dim": 32, "use_qk_norm": True,
}  # fmt: skip
GEMMA4: dict[str, Any] = {
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "global_head_dim": 64, "sliding_window": 48,
    "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}  # fmt: skip
NEMOTRON = {
    "layer_types": [LINEAR, "mlp", FULL, LINEAR, "mlp", LINEAR, FULL, "mlp"], "mamba_num_heads": 4,
    "mamba_head_dim": 64, "ssm_state_size": 64, "n_groups": 2, "chunk_size": 16, "head_dim": 64,
}  # fmt: skip
GRANITE = MAMBA | {
    "layer_types": ["mamba", "attention"] * 4, "shared_intermediate_size": 64, "num_local_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip
OF_GEMMA = {
    "layer_types": [SLIDING, FULL] * 4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCABULARY,
}  # fmt: skip


@dataclass(frozen=True)
class TinyTarget:
    """A type of configuration with what its class is given beside `COMMON`.

    `drafts`: which are compared. `scale`: standard deviation of the weights, small enough that texts repeat.
    `plain_ops`: vLLM without its own operations: the CPU's norm is wrong on parts of a tensor (latents). `modules` of
    its own head, and the tokens that it drafts a round. Only vLLM's V2 runner drafts with several modules.
    """

    title: str
    kind: str
    sizes: dict[str, Any]
    drafts: tuple[str, ...] = (NGRAM,)
    scale: float = 0.12
    plain_ops: bool = False
    modules: int = 1
    head_drafts: tuple[int, ...] = (1, 3)


QWEN_MOE = EXPERTS | GATED_DELTA | {"shared_expert_intermediate_size": 64}
ROUTED = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}  # which transformers takes for granted
# The CPU build has no block size for latents and for the keys and values of an EAGLE-3 draft beside them.
TARGETS = (
    TinyTarget("Qwen3-Next (gated delta net, MoE)", "qwen3_next", QWEN_MOE, (NGRAM, EAGLE3, OWN_HEAD)),
    TinyTarget("Qwen3.5 (gated delta net)", "qwen3_5_text", GATED_DELTA, (OWN_HEAD,)),
    TinyTarget("GLM-4.5 (MoE)", "glm4_moe", GLM, (OWN_HEAD,)),
    TinyTarget("GLM-4.5 (MoE), two modules, V2", "glm4_moe", GLM, (OWN_HEAD,), modules=2, head_drafts=(2, 4)),
    TinyTarget("MiMo", "mimo", {}, (OWN_HEAD,)),
    TinyTarget("Nemotron-H (Mamba-2)", "nemotron_h", NEMOTRON, (NGRAM, EAGLE3)),
    TinyTarget("Falcon-H1 (Mamba-2 beside attention)", "falcon_h1", MAMBA | {"mamba_d_ssm": 256, "head_dim": 32}),
    TinyTarget("Granite-4 hybrid (Mamba-2, MoE)", "granitemoehybrid", GRANITE),
    TinyTarget("DeepSeek-V2 (MLA, MoE)", "deepseek_v2", LATENT, plain_ops=True),
    TinyTarget("DeepSeek-V3 (MLA, MoE)", "deepseek_v3", LATENT | ROUTED, (NGRAM, OWN_HEAD), plain_ops=True),
    # With larger weights the embedding outweighs the layers, whose outputs are normed, and a token repeats itself.
    TinyTarget("Gemma-4", "gemma4_text", GEMMA4 | OF_GEMMA, (NGRAM, ASSISTANT, ORDERED_ASSISTANT), scale=0.03),
)


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


def new_head(config: PretrainedConfig, modules: int) -> MtpModel:
    """A multi-token prediction head of so many modules, as published with targets of this configuration."""
    kind = head_kind(config.to_dict())
    assert kind is not None
    spec = MtpSpec(
        config={},
        weights=(),
        vocab_size=config.vocab_size,
        target_hidden_size=config.hidden_size,
        num_modules=modules,
        prefixes=kind.prefixes(modules, config.num_hidden_layers),
        parts=kind.parts,
        concatenation=kind.concatenation,
        hidden_state=kind.hidden_state,
        feedback=kind.feedback,
        zero_first_embedding=kind.zero_first_embedding,
        modules=kind.modules,
    )
    return MtpModel(spec, config, "sdpa", torch.float32)


def add_head(head: MtpModel, folder: Path) -> None:
    """Write a head into the folder of its target, which has one weight file."""
    path = folder / "model.safetensors"
    own = {name: tensor.contiguous() for name, tensor in stored_mtp(head, head.state_dict()).items()}
    save_file(load_file(path) | own, path, {"format": "pt"})
    count = "mtp_num_hidden_layers" if head.spec.prefixes == (QWEN.prefix,) else "num_nextn_predict_layers"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {count: head.spec.num_modules}, indent=2))


def save_assistant(target: PreTrainedModel, folder: Path, *, ordered: bool) -> None:
    """Write an assistant of a Gemma-4, as Google stores them.

    It tends to draft the target's last token again: its stream begins with the target's state, and its output layer is
    the target's. No recipe trains one.
    """
    generator = torch.Generator().manual_seed(1)
    width, layers, centroids = COMMON["hidden_size"], [SLIDING, SLIDING, FULL], 32
    text = COMMON | GEMMA4 | {
        "model_type": "gemma4_text", "num_hidden_layers": len(layers), "layer_types": layers,
        "num_kv_shared_layers": len(layers), "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
    }  # fmt: skip
    config = {
        "architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant", "text_config": text,
        "backbone_hidden_size": width, "use_ordered_embeddings": ordered, "num_centroids": centroids,
        "centroid_intermediate_top_k": centroids // 4, "tie_word_embeddings": True,
    }  # fmt: skip

    def drawn(*shape: int, scale: float = 0.1) -> Tensor:
        return torch.randn(*shape, generator=generator) * scale

    embedding = target.get_input_embeddings().weight.detach().clone()
    tensors = {
        "pre_projection.weight": torch.cat((drawn(width, width), torch.eye(width)), dim=1),
        "post_projection.weight": torch.eye(width) + drawn(width, width, scale=0.01),
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(width),
    }
    inner = COMMON["intermediate_size"]
    for number, kind in enumerate(layers):
        head = GEMMA4["global_head_dim" if kind == FULL else "head_dim"]
        queries = GEMMA4["num_attention_heads"] * head
        shapes: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (queries, width), "self_attn.o_proj": (width, queries), "self_attn.q_norm": (head,),
            "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner),
            "input_layernorm": (width,), "post_attention_layernorm": (width,), "pre_feedforward_layernorm": (width,),
            "post_feedforward_layernorm": (width,),
        }  # fmt: skip
        own = {name: drawn(*shape) for name, shape in shapes.items()}
        for name in ("self_attn.q_norm", "input_layernorm", "pre_feedforward_layernorm"):
            own[name] += 1
        tensors |= {f"model.layers.{number}.{name}.weight": tensor for name, tensor in own.items()}
        tensors[f"model.layers.{number}.layer_scalar"] = torch.ones(1)
    if ordered:
        tensors["masked_embedding.centroids.weight"] = embedding[:: VOCABULARY // centroids].clone()
        tensors["masked_embedding.token_ordering"] = torch.randperm(VOCABULARY, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"suppress_tokens": [7, 9]}))


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
    return train_on(recipe, target, data, options, out / "run")


def train_on(recipe: str, target: Path, data: Path, options: dict[str, object], out: Path) -> Path:
    """The folder of a draft that was trained on a file of samples for a while."""
    config = TrainConfig(
        recipe=recipe,
        target=str(target),
        data=str(data),
        out=str(out),
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
