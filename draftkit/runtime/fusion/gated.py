"""The gate of an MLP in one kernel, rounded as transformers' models round it. I width."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu

from draftkit.runtime.ops.backend import jit, tl, uses_triton

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
