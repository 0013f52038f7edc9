"""The numbers of `draftkit.runtime.ops.random` in Triton, bit for bit.

Kernels that draw noise are launched with `enable_fp_fusion=False`: a fused multiply-add would round differently.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftkit.runtime.ops import random
from draftkit.runtime.ops.backend import jit, tl, uses_triton
from draftkit.runtime.ops.random import Stream

_BLOCK = 128


def uniform(stream: Stream) -> Tensor:
    """One number in [0, 1) per row, float32 [...]."""
    if uses_triton(stream.positions) and stream.positions.numel():
        return _uniform(stream)
    return random.uniform(stream)


def stream_arguments(stream: Stream) -> tuple[Tensor | int, ...]:
    """The arguments `seeds, positions, origins, purpose` of a kernel's signature."""
    seeds, positions, origins, purpose = stream
    return seeds.contiguous(), positions.contiguous(), origins.contiguous(), int(purpose)


def _uniform(stream: Stream) -> Tensor:
    out = torch.empty(stream.positions.shape, dtype=torch.float32, device=stream.positions.device)
    grid = ((out.numel() + _BLOCK - 1) // _BLOCK,)
    _uniform_kernel[grid](*stream_arguments(stream), out, out.numel(), BLOCK=_BLOCK, enable_fp_fusion=False)
    return out


@jit(varying=("size",))
def _uniform_kernel(
    seeds: tl.tensor,
    positions: tl.tensor,
    origins: tl.tensor,
    purpose: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < size
    seed = tl.load(seeds + row, mask=inside, other=0)
    position = tl.load(positions + row, mask=inside, other=0)
    origin = tl.load(origins + row, mask=inside, other=0)
    tl.store(out + row, to_uniform(seed, position, origin, purpose), mask=inside)


@jit
def to_uniform(seed: tl.tensor, position: tl.tensor, origin: tl.tensor, purpose: tl.tensor) -> Any:
    """`random.uniform` of one stream row or a block of them."""
    word, _, _, _ = _words(seed, position.to(tl.int32) * 0, position, origin, purpose)
    return (word >> 8).to(tl.float32) * 5.9604644775390625e-08


@jit
def exponential(
    seed: tl.tensor, position: tl.tensor, origin: tl.tensor, purpose: tl.tensor, counters: tl.tensor
) -> Any:
    """`random.exponential` of one stream row at tokens 4·c … 4·c+3, for int32 `counters` c [N]: float32 [N, 4]."""
    w0, w1, w2, w3 = _words(seed, counters, position, origin, purpose)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [counters.shape[0], 4])
    x = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    exponent, fraction = _decompose(((~words).to(tl.float32) + 0.5) * 2.3283064365386963e-10)
    small = x < 0.25
    return -_log1p(tl.where(small, 0.0, exponent), tl.where(small, -x, fraction))


@jit
def natural_log(x: tl.tensor) -> Any:
    """`random.natural_log`."""
    exponent, fraction = _decompose(x)
    return _log1p(exponent, fraction)


@jit
def _words(seed: tl.tensor, index: tl.tensor, position: tl.tensor, origin: tl.tensor, purpose: tl.tensor) -> Any:
    """Four uint32 words for each entry of `index` int32; the other arguments broadcast to it."""
    zero = index * 0
    return tl.philox(seed, index, zero + position.to(tl.int32), zero + origin.to(tl.int32), zero + purpose)


@jit
def _decompose(x: tl.tensor) -> Any:
    bits = x.to(tl.int32, bitcast=True) + (0x3F800000 - 0x3F3504F3)
    exponent = (bits >> 23) - 127
    mantissa = (bits & 0x007FFFFF) + 0x3F3504F3
    return exponent.to(tl.float32), mantissa.to(tl.float32, bitcast=True) - 1.0


@jit
def _log1p(exponent: tl.tensor, f: tl.tensor) -> Any:
    p = f * -0.07634492963552475 + 0.12761574983596802
    p = p * f + -0.13160182535648346
    p = p * f + 0.14201758801937103
    p = p * f + -0.16623356938362122
    p = p * f + 0.20001226663589478
    p = p * f + -0.2500081956386566
    p = p * f + 0.3333333134651184
    square = f * f
    tail = f * square * p + exponent * -2.12194440e-4
    tail = tail - square * 0.5
    return f + tail + exponent * 0.693359375
