"""P-EAGLE as SpecForge trains it, and EAGLE-3 and P-EAGLE as NeMo Automodel does.

The configs follow sgl-project/SpecForge `configs/qwen3-8b-peagle.json`, and what `nemo_automodel/recipes/llm/`
`train_eagle3.py` and `peagle_recipe.py` write: the target's whole config, and the draft's keys.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from published.checkpoint import Published, Tensors, randoms
from published.eagle3 import SPECFORGE_QWEN3, config, eagle3
from published.layers import H, V, layer

LAYERS = {f"layers.{i}.": "input_layernorm" for i in range(1, 4)}
specforge = partial(
    eagle3, first="layers.0.", deeper=LAYERS, embed=True, head_dim=32, extra={"mask_hidden": (1, 1, 3 * H)}
)
SPECFORGE: dict[str, Any] = SPECFORGE_QWEN3 | {
    "architectures": ["PEagleDraftModel"], "num_hidden_layers": 4, "norm_before_residual": False,
}  # fmt: skip

TARGET: dict[str, Any] = {
    "architectures": ["LlamaEagle3DraftModel"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_implementation": "eager", "bos_token_id": None, "chunk_size_feed_forward": 0, "dtype": "bfloat16",
    "eos_token_id": None, "head_dim": 16, "id2label": {"0": "LABEL_0"}, "is_encoder_decoder": False,
    "layer_types": ["sliding_attention", "full_attention"] * 4, "max_window_layers": 28, "model_type": "qwen3",
    "output_attentions": False, "output_hidden_states": False, "pad_token_id": None, "problem_type": None,
    "return_dict": True, "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "sliding_window": 512,
    "target_hidden_size": H, "tie_word_embeddings": False, "transformers_version": "5.8.0",
    "use_sliding_window": True, "fc_norm": False, "norm_output": False, "parallel_drafting": False,
    "num_hidden_layers": 8,
}  # fmt: skip
PARALLEL: dict[str, Any] = {
    "parallel_drafting": True, "mask_token_id": 300, "num_depths": 8, "down_sample_ratio": 0.7,
    "down_sample_ratio_min": 0.2, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
TOP = ("lm_head.weight", "d2t", "t2d", "mask_hidden")


def automodel(dtype: torch.dtype, **options: Any) -> Tensors:
    tensors = eagle3(dtype, first="layers.0.", embed=True, **options)
    return {name if name in TOP else f"model.{name}": tensor for name, tensor in tensors.items()}


def automodel_eagle(dtype: torch.dtype) -> Tensors:
    """EAGLE-1 with the usual norms in its two layers, and one of the output."""
    shapes = layer("layers.0.", norms=("input_layernorm",)) | layer("layers.1.", norms=("input_layernorm",))
    return randoms(
        shapes | {"fc.weight": (H, 2 * H), "norm.weight": (H,), "embed_tokens.weight": (V, H)}, dtype, seed=43
    )


deep: dict[str, Any] = {"deeper": {"layers.1.": "input_layernorm"}}
PUBLISHED = [
    Published(
        name="specforge-peagle", format="specforge-peagle", method="p-eagle", config=config(**SPECFORGE),
        tensors=specforge, count=16 + 3 * 9 + 1, dropped=("t2d",), overrides={"mask_token_id": "300"},
        facts={"parallel.mask_token_id": 300, "embed_tokens": "draft", "decoder.num_hidden_layers": 4},
    ),
    Published(
        name="specforge-peagle-without-table", format="specforge-peagle", method="p-eagle", config=config(**SPECFORGE),
        tensors=partial(specforge, embed=False), count=16 + 3 * 9, dropped=("t2d",), overrides={"mask_token_id": "300"},
        facts={"parallel.mask_token_id": 300, "embed_tokens": "target"},
    ),
    Published(
        name="specforge-peagle-scaled", format="specforge-peagle", method="p-eagle",
        config=config(**SPECFORGE | {
            "norm_before_residual": True, "draft_vocab_size": V, "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        }),
        tensors=partial(specforge, draft_vocabulary=V), count=44, dropped=("t2d", "d2t"),
        overrides={"mask_token_id": "300"},
        facts={"norm_before_residual": True, "decoder.rope.scaling": None, "decoder.rope.base": 1e6},
    ),
    Published(
        name="automodel", format="automodel", method="eagle3", config=config(**TARGET), tensors=automodel, count=16,
        dropped=("t2d",), facts={"decoder.num_hidden_layers": 1, "decoder.sliding_window": None},
    ),
    Published(
        name="automodel-eagle", format="automodel-eagle", method="eagle", tensors=automodel_eagle, count=21,
        config=config(**TARGET | {"architectures": ["LlamaEagleDraftModel"], "draft_num_hidden_layers": 2}),
        facts={
            "input_norm": True, "final_norm": True, "feedback": "post_norm", "embed_tokens": "draft",
            "lm_head": "target", "decoder.num_hidden_layers": 2, "decoder.sliding_window": None,
            "decoder.rope.base": 1e6,
        },
    ),
    Published(
        name="automodel-3.1", format="automodel", method="eagle3",
        config=config(**TARGET | {"fc_norm": True, "norm_output": True}),
        tensors=partial(automodel, extra={f"fc_norm.{i}.weight": (H,) for i in range(3)}), count=19, dropped=("t2d",),
        facts={"feature_norm": "per_layer", "feedback": "post_norm"},
    ),
    Published(
        name="automodel-peagle", format="automodel", method="p-eagle", config=config(**TARGET | PARALLEL),
        tensors=partial(automodel, **deep, extra={"mask_hidden": (1, 1, 3 * H)}), count=26, dropped=("t2d",),
        facts={"parallel.mask_token_id": 300, "decoder.num_hidden_layers": 2, "decoder.rope.base": 1e6},
    ),
    Published(
        name="automodel-peagle-for-vllm", format="automodel", method="p-eagle",
        config=config(**TARGET | PARALLEL | {"architectures": ["LlamaForCausalLMEagle3"], "pard_token": 300}),
        tensors=partial(eagle3, first="layers.0.", embed=True, **deep, extra={"mask_hidden": (1, 3 * H)}), count=26,
        dropped=("t2d",), facts={"parallel.mask_token_id": 300},
    ),
]  # fmt: skip
