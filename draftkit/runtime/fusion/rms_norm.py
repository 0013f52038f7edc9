"""Root-mean-square normalization in one kernel, of a sum too, rounded as transformers' models round it. H width."""

from __future__ import annotations

import torch
from torch import Tensor

from draftkit.runtime.ops.backend import jit, next_power_of_2, tl, uses_triton

WIDEST = 16384  # a row is held by one program


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, one_plus: bool = False) -> Tensor:
    """The rows of `x` [..., H] over the root of their mean square, times `weight` [H] of the same dtype.

    What is normalized is rounded to that dtype before it is multiplied, as in Llama; with `one_plus` the factor is
    1 + `weight`, and the product alone is rounded, as in Gemma.
    """
    if uses_triton(x) and x.numel() and x.shape[-1] <= WIDEST:
        return _rms_norm(x, None, weight, eps, one_plus)[1]
    return _rms_norm_by_torch(x, weight, eps, one_plus)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, one_plus: bool = False
) -> tuple[Tensor, Tensor]:
    """`x` + `residual`, both [..., H] of one dtype, and `rms_norm` of it."""
    if uses_triton(x) and x.numel() and x.shape[-1] <= WIDEST:
        return _rms_norm(x, residual, weight, eps, one_plus)
    total = residual + x
    return total, _rms_norm_by_torch(total, weight, eps, one_plus)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, one_plus: bool) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * (1.0 + weight.float())).to(x.dtype) if one_plus else weight * normed.to(x.dtype)


def _rms_norm_by_torch(x: Tensor, weight: Tensor, eps: float, one_plus: bool) -> Tensor:
    if one_plus or x.dtype != torch.float32:  # torch rounds once, at the end
        return rms_norm_reference(x, weight, eps, one_plus)
    return torch.rms_norm(x, weight.shape, weight, eps)


def _rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, one_plus: bool) -> tuple[Tensor, Tensor]:
    """What is normalized, the sum where there is a residual, and the result."""
    x = x.contiguous()
    out, width = torch.empty_like(x), x.shape[-1]
    total = None if residual is None else torch.empty_like(x)
    block = next_power_of_2(width)
    _rms_norm_kernel[(x.numel() // width,)](
        x,
        None if residual is None else residual.contiguous(),
        weight,
        total,
        out,
        eps,
        width,
        ONE_PLUS=one_plus,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 8),
        enable_fp_fusion=False,
    )
    return x if total is None else total, out


@jit
def _rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    width: tl.tensor,
    ONE_PLUS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program per row."""
    at = tl.program_id(0).to(tl.int64) * width
    d = tl.arange(0, BLOCK)
    value = tl.load(x + at + d, mask=d < width, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + at + d, mask=d < width, other=0.0).to(tl.float32)
        value = value.to(out.dtype.element_ty).to(tl.float32)
        tl.store(total + at + d, value.to(out.dtype.element_ty), mask=d < width)
    factor = tl.load(weight + d, mask=d < width, other=0.0).to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    if not ONE_PLUS:
        normed = normed.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + at + d, (normed * (factor + ONE_PLUS)).to(out.dtype.element_ty), mask=d < width)
