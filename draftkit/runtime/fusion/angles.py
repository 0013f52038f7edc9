"""Cosines and sines of rotary positions in one kernel, rounded as transformers' models round them. B sequences, T rows,
D head width."""

from __future__ import annotations

import torch
from torch import Tensor

from draftkit.runtime.ops.backend import jit, next_power_of_2, tl, uses_triton


def angles(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of `positions` int64 [B, T] times `frequencies` float32 [D / 2], twice side by side, times
    `scale`: [B, T, D] of `dtype`."""
    if uses_triton(positions) and positions.numel():
        return _angles(positions.contiguous(), frequencies, scale, dtype)
    return angles_reference(positions, frequencies, scale, dtype)


def angles_reference(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    turned = positions[..., None].float() * frequencies.float()
    turned = torch.cat((turned, turned), dim=-1)
    return (turned.cos() * scale).to(dtype), (turned.sin() * scale).to(dtype)


def _angles(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    half = len(frequencies)
    cos, sin = (positions.new_empty(*positions.shape, 2 * half, dtype=dtype) for _ in range(2))
    _angles_kernel[(positions.numel(),)](
        positions, frequencies, cos, sin, scale, HALF=half, BLOCK=next_power_of_2(half), num_warps=1,
        enable_fp_fusion=False,
    )  # fmt: skip
    return cos, sin


@jit
def _angles_kernel(
    positions: tl.tensor,
    frequencies: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    scale: tl.tensor,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < HALF
    turned = tl.load(positions + row).to(tl.float32) * tl.load(frequencies + d, mask=inside, other=0.0).to(tl.float32)
    cosine = (tl.cos(turned) * scale).to(cos.dtype.element_ty)
    sine = (tl.sin(turned) * scale).to(sin.dtype.element_ty)
    at = row * 2 * HALF + d
    tl.store(cos + at, cosine, mask=inside)
    tl.store(cos + at + HALF, cosine, mask=inside)
    tl.store(sin + at, sine, mask=inside)
    tl.store(sin + at + HALF, sine, mask=inside)
