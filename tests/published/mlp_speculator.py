"""MLP speculators of IBM."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from published.checkpoint import Published, Tensors, randoms


def mlp_config(**changes: Any) -> dict[str, Any]:
    """The config of llama3-8b-accelerator. None removes a key."""
    values: dict[str, Any] = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "emb_dim": 64,
        "inner_dim": 48,
        "model_type": "mlp_speculator",
        "n_candidates": 5,
        "n_predict": 4,
        "scale_input": True,
        "tie_weights": True,
        "top_k_tokens_per_head": [4, 3, 2, 2],
        "torch_dtype": "float16",
        "transformers_version": "4.38.2",
        "vocab_size": 320,
    }
    values |= changes
    return {key: value for key, value in values.items() if value is not None}


def untied(dtype: torch.dtype, steps: int, inner: int, hidden: int = 64, vocabulary: int = 320) -> Tensors:
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(steps):
        shapes |= {
            f"speculator.emb.{i}.weight": (vocabulary, inner),
            f"speculator.proj.{i}.weight": (inner, inner if i else hidden),
            f"speculator.head.{i}.weight": (vocabulary, inner),
            f"speculator.ln.{i}.weight": (inner,),
            f"speculator.ln.{i}.bias": (inner,),
        }
    return randoms(shapes, dtype, seed=6)


def original(name: str) -> str:
    """The tensor that this one repeats with tied weights, itself where it is the first."""
    module, step, kind = name.removeprefix("speculator.").split(".")
    first = min(int(step), 1) if module == "proj" else 0
    return f"speculator.{module}.{first}.{kind}"


def tied(dtype: torch.dtype, copies: tuple[str, ...] = ("",)) -> Tensors:
    """With `copies` of the modules named (of all: `""`), without the others."""
    tensors = untied(dtype, steps=4, inner=48)
    kept = [n for n in tensors if n == original(n) or any(n.startswith(f"speculator.{module}") for module in copies)]
    return {name: tensors[original(name)].clone() for name in kept}


def repeats(copies: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in tied(torch.float32, copies) if name != original(name))


FACTS = {
    "target_hidden_size": 64, "inner_size": 48, "vocab_size": 320, "num_heads": 4, "tied": True, "scale_input": True,
    "top_k_per_head": [4, 3, 2, 2], "num_candidates": 5,
}  # fmt: skip


def mlp(
    name: str, tensors: Any, config: dict[str, Any], count: int, facts: dict[str, Any], **options: Any
) -> Published:
    return Published(
        name=name, format="mlp-speculator", method="mlp-speculator", config=config, tensors=tensors, count=count,
        facts=facts, **options,
    )  # fmt: skip


UNTIED = {"tie_weights": False, "scale_input": False, "n_predict": 3, "top_k_tokens_per_head": [6, 4, 3]}
DEFAULTS: dict[str, Any] = dict.fromkeys(
    ("emb_dim", "n_candidates", "n_predict", "scale_input", "tie_weights", "top_k_tokens_per_head", "vocab_size")
)

PUBLISHED = [
    mlp("mlp-speculator", tied, mlp_config(), 20, FACTS, dropped=repeats(("",))),
    mlp("mlp-speculator-deduplicated", partial(tied, copies=()), mlp_config(), 6, FACTS),
    mlp(
        "mlp-speculator-some-copies", partial(tied, copies=("ln", "proj.3")), mlp_config(), 13, FACTS,
        dropped=repeats(("ln", "proj.3")),
    ),
    mlp(
        "mlp-speculator-bin", tied, mlp_config(), 20, FACTS, dropped=repeats(("",)), weights="pytorch_model.bin",
    ),
    mlp(
        "mlp-speculator-untied", partial(untied, steps=3, inner=48), mlp_config(**UNTIED), 15,
        {"tied": False, "scale_input": False, "num_heads": 3, "top_k_per_head": [6, 4, 3]},
    ),
    mlp(
        "mlp-speculator-inner-0", partial(untied, steps=3, inner=64), mlp_config(**UNTIED, inner_dim=0), 15,
        {"inner_size": 64},
    ),
    mlp(
        "mlp-speculator-defaults", partial(untied, steps=3, inner=8, hidden=4096, vocabulary=32000),
        mlp_config(**DEFAULTS, inner_dim=8), 15,
        {
            "target_hidden_size": 4096, "vocab_size": 32000, "num_heads": 3, "tied": False, "scale_input": False,
            "top_k_per_head": [5, 4, 3], "num_candidates": 5,
        },
        target=None,
    ),
]  # fmt: skip
