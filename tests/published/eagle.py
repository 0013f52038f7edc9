"""EAGLE-1, EAGLE-2 and HASS (the quirks of their configs are cases of test_convert.py); SGLang and ModelOpt."""

from __future__ import annotations

from functools import partial
from typing import Any

import pico
import torch

from published.checkpoint import Published, Tensors, randoms
from published.eagle3 import MEGATRON, MODELOPT_EAGLE, config
from published.layers import VD, H, V, layer, vocabulary_map


def _tensors(dtype: torch.dtype, **options: Any) -> Tensors:
    return pico.eagle_tensors(dtype=dtype, **options)


def megatron(dtype: torch.dtype, *, norms: bool = False, draft_vocabulary: int = V) -> Tensors:
    """ModelOpt's EAGLE-1, with all of its optional norms or with none, and a head for a reduced vocabulary."""
    shapes = layer("layers.0.", norms=("input_layernorm",) * norms) | {"fc.weight": (H, 2 * H)}
    if norms:
        shapes |= {"enorm.weight": (H,), "hnorm.weight": (H,), "norm.weight": (H,)}
    if draft_vocabulary == V:
        return randoms(shapes, dtype, seed=41)
    tensors = randoms(shapes | {"lm_head.weight": (draft_vocabulary, H)}, dtype, seed=41)
    return tensors | vocabulary_map(draft_vocabulary, mask=False)


SGLANG: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle"]}
EAGLE_CONFIG: dict[str, Any] = MODELOPT_EAGLE | {
    "use_aux_hidden_state": False, "eagle_aux_hidden_state_layer_ids": [],
    "use_input_layernorm_in_first_layer": False, "use_last_layernorm": False,
}  # fmt: skip
NORMED: dict[str, Any] = EAGLE_CONFIG | {
    "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": True,
}  # fmt: skip

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
    Published(
        name="sglang-eagle", format="sglang-eagle", method="eagle", config=pico.eagle_config(**SGLANG, rope_theta=5e5),
        tensors=partial(_tensors, bias=True), count=11, facts={"fusion_bias": True},
    ),
    Published(
        name="sglang-eagle-without-bias", format="sglang-eagle", method="eagle",
        config=pico.eagle_config(**SGLANG, rope_theta=5e5), tensors=_tensors, count=10, facts={"fusion_bias": False},
        back=False,  # SGLang would leave fc.bias as initialised, so zeros are written
    ),
    Published(
        name="megatron-eagle", format="modelopt-eagle", method="eagle",
        config=config(**MEGATRON | SGLANG | {"eagle_config": EAGLE_CONFIG, "draft_vocab_size": V}), tensors=megatron,
        count=9, facts={"final_norm": False, "feedback": "pre_norm", "input_norm": False, "embed_tokens": "target"},
    ),
    Published(
        name="megatron-eagle-normed", format="modelopt-eagle", method="eagle",
        config=config(**MEGATRON | SGLANG | {"eagle_config": NORMED}),
        tensors=partial(megatron, norms=True, draft_vocabulary=VD), count=15,
        facts={
            "embedding_norm": True, "hidden_norm": True, "input_norm": True, "final_norm": True,
            "feedback": "post_norm", "lm_head": "draft", "draft_vocab_size": VD,
        },
    ),
]  # fmt: skip
