"""Shapes of the tensors that EAGLE-like layouts share, at the sizes of `pico`."""

from __future__ import annotations

import pico
import torch

Shapes = dict[str, tuple[int, ...]]
H, I, D, HEADS, KEYS = pico.HIDDEN, 96, 16, 4, 2  # noqa: E741
V, VD = pico.VOCABULARY, pico.DRAFT_VOCABULARY


def layer(
    prefix: str, *, norms: tuple[str, ...], wide: bool = False, qk_norm: bool = False, head_dim: int = D
) -> Shapes:
    """One decoder layer; `wide` attention reads embedding and hidden state. `norms` beside the one before the MLP."""
    read = 2 * H if wide else H
    shapes: Shapes = {
        "self_attn.q_proj.weight": (HEADS * head_dim, read),
        "self_attn.k_proj.weight": (KEYS * head_dim, read),
        "self_attn.v_proj.weight": (KEYS * head_dim, read),
        "self_attn.o_proj.weight": (H, HEADS * head_dim),
        "mlp.gate_proj.weight": (I, H),
        "mlp.up_proj.weight": (I, H),
        "mlp.down_proj.weight": (H, I),
        "post_attention_layernorm.weight": (H,),
    }
    shapes |= {f"{norm}.weight": (H,) for norm in norms}
    if qk_norm:
        shapes |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    return {prefix + name: shape for name, shape in shapes.items()}


def vocabulary_map(draft_vocabulary: int, *, mask: bool = True) -> dict[str, torch.Tensor]:
    """`d2t` and `t2d` of a seeded subset of the vocabulary; SpecForge's zeros and ones for all of it."""
    kept = torch.randperm(V, generator=torch.Generator().manual_seed(3))[:draft_vocabulary].sort().values
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[kept] = True
    return {"d2t": kept - torch.arange(draft_vocabulary)} | ({"t2d": t2d} if mask else {})
