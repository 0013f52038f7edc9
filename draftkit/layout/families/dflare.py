"""DFlare: DFlash whose layers each weigh the captured states for themselves.

Source: Tencent/AngelSlim `models/draft/qwen_dflare.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from draftkit.layout.architecture import Capability
from draftkit.layout.block import BlockDraft
from draftkit.layout.schema import Shape


@dataclass(frozen=True, kw_only=True)
class DFlareSpec(BlockDraft):
    """A DFlare draft: no `fc`, but a row of `layer_fusion_weights` for each layer, which a softmax turns into shares
    of the captured states; and projections of the context's keys and values besides those of the block's rows."""

    NEEDS: ClassVar = (
        Capability(
            "layer-fusion", "a fusion of captured states in each layer", "has no class for DFlare",
            lambda draft: True,
        ),
    )  # fmt: skip

    @property
    def method(self) -> str:
        return "dflare"

    @property
    def title(self) -> str:
        return "A DFlare draft: a block drafter whose layers weigh the target's states each for itself"

    def fusion_tensors(self) -> dict[str, Shape]:
        layers = self.decoder.num_hidden_layers
        return {"layer_fusion_weights": (layers, self.states_read), "hidden_norm.weight": (self.target_hidden_size,)}

    def head_tensors(self) -> dict[str, Shape]:
        decoder = self.decoder
        rows = decoder.num_key_value_heads * decoder.head_dim
        tensors: dict[str, Shape] = {}
        for layer in range(decoder.num_hidden_layers):
            for name in ("k_proj_target", "v_proj_target"):
                module = f"layers.{layer}.self_attn.{name}"
                tensors[f"{module}.weight"] = (rows, self.target_hidden_size)
                if decoder.qkv_bias:
                    tensors[f"{module}.bias"] = (rows,)
        return tensors
