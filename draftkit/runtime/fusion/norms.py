"""RMSNorms of transformers' models in one kernel, together with the sum that they read, and gates in another.

A norm of a sum too, rounded as these models round it. H width, I width of a gated layer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from draftkit.runtime.ops.backend import jit, next_power_of_2, tl, uses_triton

SAMPLE = 3  # rows of random input
WIDEST = 16384  # a row is held by one program


class NormForm(NamedTuple):
    """The eps of an RMSNorm, and whether its factor is 1 + its weight."""

    eps: float
    one_plus: bool


def norm_form(module: Any) -> NormForm | None:
    """The form of an RMSNorm; None for any other module, and for one that rounds elsewhere."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(module, nn.Module) or not isinstance(eps, float) or list(module.children()):
        return None  # before its parameters are asked for, which unpacks those of linear layers
    weight = getattr(module, "weight", None)
    alone = dict(module.named_parameters()).keys() == {"weight"}
    if not alone or not isinstance(weight, Tensor) or weight.dim() != 1:
        return None
    x = torch.randn(SAMPLE, len(weight), generator=torch.Generator().manual_seed(0)).to(weight.device, weight.dtype)
    try:
        own = module(x)
    except (TypeError, RuntimeError, AttributeError):  # it wants something else, a gate among others
        return None
    for one_plus in (False, True):
        if isinstance(own, Tensor) and torch.equal(own, rms_norm_reference(x, weight, eps, one_plus)):
            return NormForm(eps, one_plus)
    return None


class FusedNorm:
    """The forward of an RMSNorm `module`."""

    def __init__(self, module: nn.Module, form: NormForm):
        self._module, self._form = module, form
        self._parameters: dict[str, Tensor] = vars(module)["_parameters"]
        self._sum: tuple[Tensor, Tensor] | None = None

    def __call__(self, x: Tensor, *gate: Any, **named: Any) -> Tensor:
        """Norm as the module does; one that is gated too, as in Nemotron-H, runs as its own."""
        known, self._sum = self._sum, None
        weight = self._parameters["weight"]
        if gate or named or torch.is_grad_enabled() or x.dtype != weight.dtype:
            return type(self._module).forward(self._module, x, *gate, **named)
        if known is not None and known[0] is x:
            return known[1]
        return rms_norm(x, weight, self._form.eps, one_plus=self._form.one_plus)

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """`x` + `residual`, and its norm."""
        weight = self._parameters["weight"]
        if torch.is_grad_enabled() or not x.dtype == residual.dtype == weight.dtype:
            total = residual + x
            return total, type(self._module).forward(self._module, total)
        return add_rms_norm(x, residual, weight, self._form.eps, one_plus=self._form.one_plus)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """`x` + `residual`, whose norm is kept for the call that asks for it next."""
        self._sum = self.of_sum(x, residual)
        return self._sum[0]


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
    """The values that are normalized, which are a sum where there is a residual, and the result."""
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


_BLOCK = 1024


def gated(both: Tensor) -> Tensor:
    """silu(gate) · up [..., I] of `both` [..., 2I], the gate first; what silu gives is rounded before the product."""
    if uses_triton(both) and both.numel():
        return _gated(both.contiguous())
    return gated_reference(both)


def gated_reference(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return silu(gate) * up


def _gated(both: Tensor) -> Tensor:
    width = both.shape[-1] // 2
    out = both.new_empty(*both.shape[:-1], width)
    _gate_kernel[out.numel() // width, (width + _BLOCK - 1) // _BLOCK](
        both, out, width, BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False
    )
    return out


@jit
def _gate_kernel(both: tl.tensor, out: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr) -> None:
    """One program per row and block of columns."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(both + row * 2 * width + d, mask=d < width, other=0).to(tl.float32)
    up = tl.load(both + row * 2 * width + width + d, mask=d < width, other=0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + d, (activated * up).to(out.dtype.element_ty), mask=d < width)
