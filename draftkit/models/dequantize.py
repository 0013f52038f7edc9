"""Plain weights from fp8 ones and their scales: draftkit computes in the target's dtype.

Engines also round the inputs of such layers, so that their acceptance may differ a little from the one measured here.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from draftkit.io.dtypes import QUANTIZED, torch_dtype
from draftkit.layout.quantization import SCALES, weight_block


def dequantized(tensors: Mapping[str, Tensor], quantization: Mapping[str, object] | None) -> dict[str, Tensor]:
    """The tensors with every fp8 weight [out, in] in fp32, times its scale, and without the scales."""
    if quantization is None:
        return dict(tensors)
    fp8 = [torch_dtype(name) for name in QUANTIZED]
    block = weight_block(quantization)
    plain = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if tensor.dtype in fp8:
            scales = (f"{module}.{scale}" for scale in SCALES if "weight_scale" in scale)
            scale = next(tensors[name] for name in scales if name in tensors)
            plain[name] = tensor.float() * _expanded(scale.float(), tensor, block)
        elif kind not in SCALES:
            plain[name] = tensor
    return plain


def _expanded(scale: Tensor, weight: Tensor, block: tuple[int, int] | None) -> Tensor:
    """A scale for all of the weight, for each row [out] or [out, 1], or for each block, as a factor that broadcasts."""
    if scale.numel() == 1:
        return scale.view(())
    if scale.ndim == 1 or scale.shape == (len(weight), 1):
        return scale.view(-1, 1)
    for dim, (size, count) in enumerate(zip(weight.shape, scale.shape, strict=True)):
        rows = block[dim] if block else -(-size // count)
        scale = scale.repeat_interleave(rows, dim).narrow(dim, 0, size)
    return scale
