"""EAGLE-1, EAGLE-2 and HASS (the quirks of their configs are cases of test_convert.py)."""

from __future__ import annotations

from functools import partial
from typing import Any

import pico
import torch

from published.checkpoint import Published, Tensors


def _tensors(dtype: torch.dtype, **options: Any) -> Tensors:
    return pico.eagle_tensors(dtype=dtype, **options)


PUBLISHED = [
    Published(
        name="eagle", format="eagle", method="eagle", config=pico.eagle_config(), tensors=_tensors, count=10,
        facts={"fusion_bias": False, "embed_tokens": "draft", "aux_layer_ids": None}, weights="pytorch_model.bin",
    ),
    Published(
        name="eagle-vicuna", format="eagle", method="eagle", config=pico.eagle_config(bias=None),
        tensors=partial(_tensors, bias=True), count=11, facts={"fusion_bias": True}, weights="pytorch_model.bin",
    ),
    Published(
        name="eagle-qwen2", format="eagle", method="eagle", config=pico.eagle_config(qkv_bias=True, model_type="qwen2"),
        tensors=partial(_tensors, bias=True, qkv_bias=True), count=14, facts={"decoder.qkv_bias": True},
        weights="pytorch_model.bin",
    ),
]  # fmt: skip
