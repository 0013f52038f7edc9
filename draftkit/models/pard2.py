"""PARD-2: a causal language model whose input embeddings carry a projection of the target's features.

Shapes: B sequences, T rows, F feature width, H draft width, V draft vocabulary. Source: AMD-AGI/PARD `pard2_infer.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from draftkit.models.target import KeyValues, Target


class Pard2Model:
    """`lm` with `scale` · `target_proj`(feature) [H] added to each token's embedding."""

    def __init__(self, lm: Target, target_proj: nn.Linear, scale: float):
        self.lm = lm
        self.target_proj = target_proj
        self.scale = scale

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor, features: Tensor, positions: Tensor, kv: KeyValues, *, last_only: bool = False
    ) -> Tensor:
        """Logits [B, T or 1, V] of tokens int64 [B, T] with the target's `features` [B, T, F] of the tokens before."""
        embeddings = self.lm.model.get_input_embeddings()(tokens) + self.target_proj(features) * self.scale
        return self.lm.forward(tokens, positions, kv, last_only=last_only, embeddings=embeddings).logits
