"""Where top-k and top-p cut: the smallest logit that is kept, by programs that share a row's vocabulary.

A search among the logits' order, in which each pass asks of 64 values at once how many logits, or how much mass, lie at
or above each, and goes on between two of them: three passes for the 16 bits of a bfloat16, for top-k and for top-p
each. Every pass is one launch, whose programs first join what those of the last have found. R rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftkit.runtime.batch import SamplingTensors
from draftkit.runtime.ops.backend import jit, next_power_of_2, tl
from draftkit.runtime.ops.row_peaks import aligned_row, split

_VALUES = 64  # that a pass asks of
_BLOCK, _CHUNK = 2048, 128  # tokens of a program, and at a time
_NEAREST = {  # by type: bits of a float32 that are not used, and passes until one value is left
    torch.bfloat16: (16, 3),
    torch.float16: (13, 4),
    torch.float32: (0, 6),
}
_KTH, _FROM_KTH, _MASS, _NUCLEUS, _DONE = range(5)


def row_floor(logits: Tensor, peak: Tensor, parameters: SamplingTensors) -> tuple[Tensor, Tensor]:
    """The floor of each row of `logits` [..., V], computed by Triton from the `peak` [...] of the row.

    It is the floor after min-p, then top-k, then top-p on what is left by those two. With it comes the logarithm of the
    mass above it, as in `RowPeaks`; both are float32 [...]."""
    logits = logits.contiguous()
    size, rows = logits.shape[-1], peak.numel()
    shift, passes = _NEAREST[logits.dtype]
    block, blocks = split(size, _BLOCK)
    sums = torch.empty(2, rows, blocks, _VALUES, dtype=torch.float32, device=logits.device)
    ranges = torch.empty(2, rows, 2, dtype=torch.int64, device=logits.device)
    wanted = torch.empty(2, rows, dtype=torch.float32, device=logits.device)
    floor, log_sum = torch.empty(2, *peak.shape, dtype=torch.float32, device=logits.device)
    stages = [_KTH, *[_FROM_KTH] * (passes - 1), _MASS, *[_NUCLEUS] * (passes - 1), _DONE]
    for i, stage in enumerate(stages):
        now, before = i % 2, 1 - i % 2
        _floor_kernel[rows, 1 if stage == _DONE else blocks](
            logits,
            parameters.scale,
            parameters.top_k,
            parameters.top_p,
            parameters.drop,
            peak,
            sums[before],
            ranges[before],
            wanted[before],
            sums[now],
            ranges[now],
            wanted[now],
            floor,
            log_sum,
            rows // len(parameters.scale),
            size,
            blocks,
            STAGE=stage,
            FIRST_NUCLEUS=stage == _NUCLEUS and stages[i - 1] == _MASS,
            SHIFT=shift,
            VALUES=_VALUES,
            BLOCK=block,
            CHUNK=min(_CHUNK, block),
            BLOCKS=next_power_of_2(blocks),
            num_warps=8,
            enable_fp_fusion=False,
        )
    return floor, log_sum


@jit(varying=("share",))
def _floor_kernel(
    logits: tl.tensor,
    scales: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    drops: tl.tensor,
    peaks: tl.tensor,
    last_sums: tl.tensor,
    last_ranges: tl.tensor,
    last_wanted: tl.tensor,
    sums: tl.tensor,
    ranges: tl.tensor,
    wanted: tl.tensor,
    floors: tl.tensor,
    log_sums: tl.tensor,
    share: tl.tensor,
    size: tl.tensor,
    blocks: tl.tensor,
    STAGE: tl.constexpr,
    FIRST_NUCLEUS: tl.constexpr,
    SHIFT: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """One program per row and block, and a last one per row. Of the last pass: what it found at or above each of its
    values, by block; the range [low, high] of the order that it asked of; and how much is wanted above the floor."""
    row = tl.program_id(0)
    request = row // share
    peak = tl.load(peaks + row)
    scale = tl.load(scales + request)
    value = tl.arange(0, VALUES)
    infinity = float("inf")
    if STAGE == 0:
        top_k = tl.load(top_ks + request)
        low = _order(tl.full([], -infinity, tl.float32), SHIFT)
        high = _order(peak, SHIFT)
        want = tl.where(top_k < size, top_k.to(tl.float32), infinity)
    else:
        block = tl.arange(0, BLOCKS)
        of_blocks = last_sums + (row * blocks + block[:, None]) * VALUES + value[None, :]
        found = tl.sum(tl.load(of_blocks, mask=(block < blocks)[:, None], other=0.0), axis=0)
        low = tl.load(last_ranges + row * 2)
        high = tl.load(last_ranges + row * 2 + 1)
        want = tl.load(last_wanted + row)
        if FIRST_NUCLEUS:  # of the mass above the floor that min-p and top-k leave
            top_p = tl.load(top_ps + request)
            want = tl.where(top_p < 1, top_p * tl.sum(tl.where(value == 0, found, 0.0), axis=0), infinity)
        step = (high - low) // VALUES + 1
        # The last value that enough lies above. Where the wanted is infinite, nothing is cut.
        at = tl.max(tl.where(found >= want, value, 0), axis=0)
        reached = tl.sum(tl.where(value == at, found, 0.0), axis=0)
        low += at * step
        high = tl.minimum(high, low + step - 1)
        if STAGE == 2:
            kth = tl.where(want < infinity, _value(low, SHIFT), -infinity)
            floor = tl.maximum(peak - tl.load(drops + request), kth)
            low = _order(floor, SHIFT)
            high = _order(peak, SHIFT)
            want = infinity
            tl.store(floors + row, floor)
        if STAGE == 4:
            floor = tl.load(floors + row)
            tl.store(floors + row, tl.where(want < infinity, tl.maximum(floor, _value(low, SHIFT)), floor))
            tl.store(log_sums + row, tl.where(scale == 0, 0.0, tl.log(reached)))
    if STAGE < 4:
        if tl.program_id(1) == 0:
            tl.store(ranges + row * 2, low)
            tl.store(ranges + row * 2 + 1, high)
            tl.store(wanted + row, want)
        step = (high - low) // VALUES + 1
        asked = low + value * step
        total = tl.zeros([VALUES, CHUNK], tl.float32)
        begins, before = aligned_row(row, size)
        for first in range(0, BLOCK, CHUNK):
            place = tl.program_id(1) * BLOCK + first + tl.arange(0, CHUNK)
            inside = (place >= before) & (place < before + size)
            x = tl.load(logits + begins + place, mask=inside, other=-infinity).to(tl.float32)
            x = tl.where(x == x, x, -infinity)
            weight = inside.to(tl.float32) if STAGE < 2 else tl.where(x > -infinity, tl.exp((x - peak) * scale), 0.0)
            total += tl.where(_order(x, SHIFT)[None, :] >= asked[:, None], weight[None, :], 0.0)
        result = sums + (row * blocks + tl.program_id(1)) * VALUES + value
        tl.store(result, tl.sum(total, axis=1))


@jit
def _order(x: tl.tensor, SHIFT: tl.constexpr) -> Any:
    """An int64 for each float32, in their order; of one between two of the type that logits are of, that of the next
    above."""
    bits = x.to(tl.int32, bitcast=True)
    size = (bits & 0x7FFFFFFF).to(tl.int64)
    return (tl.where(bits < 0, -size, size) + ((1 << SHIFT) - 1)) >> SHIFT


@jit
def _value(order: tl.tensor, SHIFT: tl.constexpr) -> Any:
    """The float32 of an `_order`."""
    size = tl.abs(order) << SHIFT
    x = size.to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(order < 0, -x, x)
