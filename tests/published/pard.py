"""PARD and PARD-2."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from published.causal_lm import llama, qwen2, qwen3, saved
from published.checkpoint import Published, Tensors, randoms


def projection(dtype: torch.dtype, size: int, bias: bool = False) -> Tensors:
    """`warp_model.bin`."""
    shapes: dict[str, tuple[int, ...]] = {"target_proj.weight": (64, size)}
    if bias:
        shapes["target_proj.bias"] = (64,)
    return randoms(shapes, dtype, seed=8)


def pard(name: str, config: dict[str, Any], count: int, token: int | None = 300, **options: Any) -> Published:
    facts = {"parallel": {"mask_token_id": token, "mask_state": False}, "target_features": None, "config": config}
    return Published(
        name=name, format="pard", method="pard", config=config, tensors=partial(saved, config=config), count=count,
        facts=facts, **options,
    )  # fmt: skip


def pard2(name: str, config: dict[str, Any], features: tuple[list[int], int, float, bool], **options: Any) -> Published:
    layers, size, scale, bias = features
    facts = {
        "target_features": {"layer_ids": layers, "size": size, "scale": scale, "projection_bias": bias},
        "parallel.mask_token_id": 300,
        "config": config,
    }
    warp = {"warp_model.bin": partial(projection, size=size, bias=bias)}
    return Published(
        name=name, format="pard2", method="pard-2", config=config, tensors=partial(saved, config=config),
        count=12 + bias, side_files=warp, facts=facts, **options,
    )  # fmt: skip


MULTI = {
    "pard_token": 300, "spd_type": "pard2", "pard2": True, "pard2_scale": 0.02, "pard2_proj_bias": False,
    "pard2_target_dim": 256, "pard2_target_layers": [-1, -8, -4, -2],
}  # fmt: skip
OLDER = {
    "pard_token": 300, "pard2": True, "pard_scale": 0.05, "proj_bias": True, "pard_target_dim": 64,
    "target_layers": [-1],
}  # fmt: skip

PUBLISHED = [
    pard("pard-llama", llama(pard_token=300, spd_type="pard"), 11),
    pard("pard-qwen2", qwen2(pard_token=300, spd_type="pard"), 14),
    pard("pard-qwen3", qwen3(pard_token=300), 13),
    # It does not come back as it was: the token that it lacked is written.
    pard("pard-no-token", llama(pard_token=-1, spd_type="pard"), 11, overrides={"mask_token_id": "300"}, back=False),
    pard2("pard2", llama(**MULTI), ([-1, -8, -4, -2], 256, 0.02, False)),
    pard2("pard2-older-keys", llama(**OLDER), ([-1], 64, 0.05, True)),
    pard2("pard2-oldest-scale", llama(**(OLDER | {"pard_scale": None, "feat_scale": 0.1})), ([-1], 64, 0.1, True)),
    pard2(
        "pard2-defaults",
        llama(pard_token=300, spd_type="pard2", pard2_target_dim=128, pard2_target_layers=[-1, 3]),
        ([-1, 3], 128, 0.02, False),
    ),
]
