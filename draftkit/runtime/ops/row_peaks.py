"""The largest logit of each row, by programs that share a row's vocabulary.

Where V is no multiple of 16, rows begin where no wide load can. A row's blocks are then counted from the last such
place before it, so that all blocks but the first and the last are read by wide loads. R rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftkit.runtime.ops.backend import jit, next_power_of_2, tl, uses_triton

_BLOCK = 4096
_MOST_BLOCKS = 128  # of a row, whose results one program joins
_ALIGNED = 16  # logits, of which a wide load takes a whole part from its beginning on


class RowPeaks(NamedTuple):
    """All [...] as the rows. `peak` float32: the largest logit, NaN counting as −∞; `best` int64: the first token that
    has it; `finite` bool: no logit is NaN, and the largest is finite; `floor` float32: −∞, as nothing is cut; `log_sum`
    float32: log Σ exp((logit − peak) · scale), 0 where the scale is, of any value without one."""

    peak: Tensor
    best: Tensor
    finite: Tensor
    floor: Tensor
    log_sum: Tensor


def best_token(logits: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The most likely token of rows of `logits` [R, V], as `ids` int64 [V] name it: int64 [R]; and whether the largest
    logit is a number: bool [R]. Of a row with NaN, some token."""
    if uses_triton(logits) and logits.shape[0]:
        peaks = row_peaks(logits, None, ids)
        return peaks.best, peaks.finite
    peak, best = logits.max(-1)
    return best if ids is None else ids[best], peak.isfinite()


def row_peaks(logits: Tensor, scale: Tensor | None, ids: Tensor | None = None) -> RowPeaks:
    """The peaks of `logits` [..., V], computed by Triton.

    Each of `scale` float32 [B] holds for as many rows as there are to one of B. `best` is named by `ids` int64 [V]."""
    logits = logits.contiguous()
    shape, size = logits.shape[:-1], logits.shape[-1]
    rows = shape.numel()
    block, blocks = split(size, _BLOCK)
    peak, mass = logits.new_empty(2, rows, blocks, dtype=torch.float32)
    best = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    share = 1 if scale is None else rows // len(scale)
    _block_peaks_kernel[rows, blocks](
        logits, scale, peak, best, mass, share, size, BLOCK=block, num_warps=4, enable_fp_fusion=False
    )
    of_rows = RowPeaks(
        peak=torch.empty(shape, dtype=torch.float32, device=logits.device),
        best=torch.empty(shape, dtype=torch.int64, device=logits.device),
        finite=torch.empty(shape, dtype=torch.bool, device=logits.device),
        floor=torch.empty(shape, dtype=torch.float32, device=logits.device),
        log_sum=torch.empty(shape, dtype=torch.float32, device=logits.device),
    )
    _join_peaks_kernel[(rows,)](
        peak, best, mass, scale, ids, *of_rows, share, blocks, BLOCKS=next_power_of_2(blocks), num_warps=1,
        enable_fp_fusion=False,
    )  # fmt: skip
    return of_rows


def split(size: int, block: int) -> tuple[int, int]:
    """How a row of a vocabulary is split among programs: places per block, and blocks; `aligned_row` says which place
    is the first."""
    size += _ALIGNED - 1 if size % _ALIGNED else 0
    block = min(next_power_of_2(size), max(block, next_power_of_2((size + _MOST_BLOCKS - 1) // _MOST_BLOCKS)))
    return block, (size + block - 1) // block


@jit(varying=("share",))
def _block_peaks_kernel(
    logits: tl.tensor,
    scales: tl.tensor,
    peaks: tl.tensor,
    bests: tl.tensor,
    masses: tl.tensor,
    share: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program per row and block; a block with NaN says so by a token below 0."""
    row = tl.program_id(0)
    begins, before = aligned_row(row, size)
    first = tl.program_id(1) * BLOCK
    place = first + tl.arange(0, BLOCK)
    if (first >= before) & (first + BLOCK <= before + size):  # a mask of single tokens would make all loads narrow
        x = tl.load(logits + begins + place)
    else:
        inside = (place >= before) & (place < before + size)
        x = tl.load(logits + begins + place, mask=inside, other=-float("inf"))
    x = x.to(tl.float32)
    broken = tl.max((x != x).to(tl.int32), axis=0)
    x = tl.where(x == x, x, -float("inf"))
    peak, index = tl.max(x, axis=0, return_indices=True)
    best = tl.maximum(first + index - before, 0)
    result = row * tl.num_programs(1) + tl.program_id(1)
    if scales is not None:  # −∞ − (−∞) is NaN
        weights = tl.where(x > -float("inf"), tl.exp((x - peak) * tl.load(scales + row // share)), 0.0)
        tl.store(masses + result, tl.sum(weights, axis=0))
    tl.store(peaks + result, peak)
    tl.store(bests + result, tl.where(broken > 0, -1 - best, best))


@jit(varying=("share",))
def _join_peaks_kernel(
    peaks: tl.tensor,
    bests: tl.tensor,
    masses: tl.tensor,
    scales: tl.tensor,
    ids: tl.tensor,
    peak_of: tl.tensor,
    best_of: tl.tensor,
    finite_of: tl.tensor,
    floor_of: tl.tensor,
    log_sum_of: tl.tensor,
    share: tl.tensor,
    blocks: tl.tensor,
    BLOCKS: tl.constexpr,
) -> None:
    """One program per row."""
    row = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    inside = block < blocks
    each = tl.load(peaks + row * blocks + block, mask=inside, other=-float("inf"))
    peak, first = tl.max(each, axis=0, return_indices=True)
    marked = tl.load(bests + row * blocks + block, mask=inside, other=0)
    best = tl.load(bests + row * blocks + first)
    best = tl.where(best < 0, -1 - best, best).to(tl.int64)
    if ids is not None:
        best = tl.load(ids + best)
    finite = (tl.min(marked, axis=0) >= 0) & (peak > -float("inf")) & (peak < float("inf"))
    tl.store(peak_of + row, peak)
    tl.store(best_of + row, best)
    tl.store(finite_of + row, finite)
    tl.store(floor_of + row, -float("inf"))
    if scales is not None:
        scale = tl.load(scales + row // share)
        mass = tl.load(masses + row * blocks + block, mask=inside, other=0.0)
        total = tl.sum(tl.where(each > -float("inf"), mass * tl.exp((each - peak) * scale), 0.0), axis=0)
        tl.store(log_sum_of + row, tl.where(scale == 0, 0.0, tl.log(total)))


@jit
def aligned_row(row: tl.tensor, size: tl.tensor) -> Any:
    """The last place before a row of `size` logits at which a wide load can begin, and how many logits that is before
    the row."""
    begins = row.to(tl.int64) * size
    aligned = begins // 16 * 16
    return aligned, (begins - aligned).to(tl.int32)
