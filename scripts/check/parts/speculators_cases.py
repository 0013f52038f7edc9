"""What scripts/check/speculators.py tries: drafts of the library's own, and sources for its converter."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from draftkit import zoo

ROWS, DEPTHS, WIDTH, VOCABULARY, DRAFT_VOCABULARY = 24, 3, 192, 4096, 512  # the widths are those of zoo:target

LLAMA = {
    "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 256,
    "num_hidden_layers": 1, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}  # fmt: skip
QWEN3 = LLAMA | {"model_type": "qwen3"}
SLIDING = {"layer_types": ["sliding_attention"], "sliding_window": 6, "use_sliding_window": True}
LINEAR = {"rope_type": "linear", "rope_theta": 500000.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Made:
    """A draft that the library makes: its type, its decoder layers, and the other options of its config."""

    layers: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    kind: str = "eagle3"

    def inputs(self) -> dict[str, torch.Tensor]:
        """Random tokens and features; for P-EAGLE the rows of a pass: every depth at every anchor with room for it."""
        captured = len(self.options.get("eagle_aux_hidden_state_layer_ids", range(3)))
        generator = torch.Generator().manual_seed(1)
        tensors = {
            "tokens": torch.randint(0, VOCABULARY, (1, ROWS), generator=generator),
            "features": torch.randn(1, ROWS, captured * WIDTH, generator=generator),
        }
        if self.kind == "peagle":
            rows = [(anchor, depth) for depth in range(DEPTHS) for anchor in range(ROWS - depth)]
            tensors["anchors"], tensors["depths"] = torch.tensor(rows).T.contiguous()
        return tensors

    def job(self, target: str) -> dict[str, Any]:
        """What the worker is told to make."""
        options = {"draft_vocab_size": DRAFT_VOCABULARY} | self.options
        return {"do": "make", "kind": self.kind, "layer": self.layers, "options": options, "target": target}


DRAFTS = {
    "eagle3": Made(LLAMA),
    "full vocabulary": Made(LLAMA, {"draft_vocab_size": VOCABULARY}),
    "norm_before_residual": Made(LLAMA, {"norm_before_residual": True}),
    "norm_before_fc, norm_output": Made(LLAMA, {"norm_before_fc": True, "norm_output": True}),
    "fc_norm, 4 layers": Made(LLAMA, {"fc_norm": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 5, 10]}),
    "qwen3": Made(QWEN3),
    "2 layers, biases": Made(LLAMA | {"num_hidden_layers": 2, "attention_bias": True}),
    "sliding window": Made(LLAMA | SLIDING),
    "qwen3, sliding window": Made(QWEN3 | SLIDING, {"norm_output": True}),
    "linear rope": Made(LLAMA | {"rope_parameters": LINEAR}),
    "llama3 rope": Made(LLAMA | {"rope_parameters": LLAMA3}),
    "peagle, 2 layers": Made(LLAMA | {"num_hidden_layers": 2}, {"mask_token_id": 7}, "peagle"),
    "peagle, qwen3, fc_norm": Made(QWEN3 | SLIDING, {"mask_token_id": 7, "fc_norm": True}, "peagle"),
}

SAME, REFUSED = "the same draft", "the library fails"


@dataclass(frozen=True)
class Source:
    """A checkpoint for Eagle3Converter: the embedded EAGLE-3 draft with changes (None takes a tensor away).

    `outcome`: how what draftkit says of the result must begin.
    """

    outcome: str
    tensors: dict[str, torch.Tensor | None] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        embedded = zoo.path("eagle3")
        tensors = torch.load(embedded / "pytorch_model.bin", weights_only=True) | self.tensors
        config = json.loads((embedded / "config.json").read_text()) | self.config
        folder.mkdir()
        torch.save({name: t for name, t in tensors.items() if t is not None}, folder / "pytorch_model.bin")
        (folder / "config.json").write_text(json.dumps(config))
        return folder


def second_layer() -> dict[str, torch.Tensor | None]:
    shapes = {
        "self_attn.q_proj": (192, 192), "self_attn.k_proj": (64, 192), "self_attn.v_proj": (64, 192),
        "self_attn.o_proj": (192, 192), "mlp.gate_proj": (512, 192), "mlp.up_proj": (512, 192),
        "mlp.down_proj": (192, 512), "input_layernorm": (192,), "post_attention_layernorm": (192,),
    }  # fmt: skip
    return {f"layers.1.{name}.weight": torch.ones(shape) for name, shape in shapes.items()}


IDS = {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}
UNTRACEABLE = "another draft, noted: Eagle3Converter drops q_norm, k_norm and the ids in eagle_config"
SOURCES = {
    "SafeAILab": Source(SAME),
    "with embed_tokens": Source(SAME, {"embed_tokens.weight": torch.ones(VOCABULARY, WIDTH, dtype=torch.float16)}),
    "ModelOpt: d2t without t2d": Source("the draft has 2048 of 4096 tokens, and no d2t says which", {"t2d": None}),
    "fc_norm": Source(
        "config.json asks for a norm before fc, and fc_norm.0.weight is missing",
        {f"fc_norm.{i}.weight": torch.ones(WIDTH) for i in range(3)},
        {"fc_norm": True},
    ),
    "2 layers": Source("config.json has 2 layers, and the weights have 1", second_layer(), {"num_hidden_layers": 2}),
    "4 captured layers": Source(REFUSED, {"fc.weight": torch.ones(WIDTH, 4 * WIDTH)}),
    "q_norm and k_norm": Source(UNTRACEABLE, {f"midlayer.self_attn.{n}_norm.weight": torch.ones(32) for n in "qk"}),
    "ids in eagle_config": Source(UNTRACEABLE, config={"eagle_config": IDS}),
}
