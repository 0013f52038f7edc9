"""Per row of logits: what turns them into probabilities without storing any.

B requests, T rows each, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftkit.runtime.batch import SamplingTensors
from draftkit.runtime.ops.backend import jit, next_power_of_2, tl, uses_triton

_MAX_BLOCK = 8192


class RowStatistics(NamedTuple):
    """All [B, T]. `peak` float32: the largest logit, `best` int64: the first token that has it. `floor` float32: the
    smallest logit that is kept. `log_sum` float32: log Σ exp((logit − peak) / temperature) over the kept ones, 0 where
    greedy. NaN counts as −∞.
    """

    peak: Tensor
    best: Tensor
    floor: Tensor
    log_sum: Tensor


def row_statistics(logits: Tensor, parameters: SamplingTensors) -> RowStatistics:
    """The statistics of `logits` [B, T, V] of any float type, each request's rows under its own parameters.

    Two implementations may differ by rounding in what they sum, so that a token exactly at a top-p cut can fall on
    either side; each request's distribution is decided by one call and used as it is.
    """
    if uses_triton(logits) and logits.shape[:2].numel():
        return _row_statistics(logits.contiguous(), parameters)
    return row_statistics_reference(logits, parameters)


def row_statistics_reference(logits: Tensor, parameters: SamplingTensors) -> RowStatistics:
    logits = logits.float()
    logits = torch.where(logits.isnan(), -torch.inf, logits)
    scale = parameters.scale[:, None]
    peak, best = logits.amax(-1), logits.argmax(-1)
    floor = _floor(logits, peak, parameters) if parameters.truncates else torch.full_like(peak, -torch.inf)
    weights = ((logits - peak[..., None]) * scale[..., None]).exp()
    total = torch.where(logits >= floor[..., None], weights, 0).sum(-1)
    return RowStatistics(peak, best, floor, torch.where(scale == 0, 0, total.log()))


def _floor(logits: Tensor, peak: Tensor, parameters: SamplingTensors) -> Tensor:
    """The smallest logit that min-p, then top-k, then top-p on what is left by those two, keep: [B, T]."""
    ordered = logits.sort(-1, descending=True).values
    last = (parameters.top_k[:, None].long().clamp(max=logits.shape[-1]) - 1).expand(peak.shape)
    floor = torch.maximum(peak - parameters.drop[:, None], ordered.gather(-1, last[..., None])[..., 0])
    weights = ((ordered - peak[..., None]) * parameters.scale[:, None, None]).double().exp()
    mass = torch.where(ordered >= floor[..., None], weights, 0).cumsum(-1)
    top_p = parameters.top_p[:, None]
    needed = (mass < top_p[..., None] * mass[..., -1:]).sum(-1, keepdim=True).clamp(max=logits.shape[-1] - 1)
    nucleus = ordered.gather(-1, needed)[..., 0]
    return torch.where(top_p < 1, torch.maximum(floor, nucleus), floor)


def _row_statistics(logits: Tensor, parameters: SamplingTensors) -> RowStatistics:
    rows, size = logits.shape[:2], logits.shape[2]
    peak, floor, log_sum = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(3))
    best = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _statistics_kernel[(rows.numel(),)](
        logits,
        parameters.scale,
        parameters.top_k,
        parameters.top_p,
        parameters.drop,
        peak,
        best,
        floor,
        log_sum,
        rows[1],
        size,
        TRUNCATES=parameters.truncates,
        BLOCK=min(next_power_of_2(size), _MAX_BLOCK),
        num_warps=8,
        enable_fp_fusion=False,
    )
    return RowStatistics(peak, best, floor, log_sum)


@jit(varying=("rows_per_request",))
def _statistics_kernel(
    logits: tl.tensor,
    scales: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    drops: tl.tensor,
    peaks: tl.tensor,
    bests: tl.tensor,
    floors: tl.tensor,
    log_sums: tl.tensor,
    rows_per_request: tl.tensor,
    size: tl.tensor,
    TRUNCATES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program per row; what it reads again comes from the L2 cache."""
    row = tl.program_id(0)
    request = row // rows_per_request
    logits += row.to(tl.int64) * size
    scale = tl.load(scales + request)
    peak, best, lowest = _extremes(logits, size, BLOCK)
    floor = tl.full([], -float("inf"), tl.float32)
    if TRUNCATES:
        top_k = tl.load(top_ks + request)
        top_p = tl.load(top_ps + request)
        floor = peak - tl.load(drops + request)
        if top_k < size:
            kth = _value_reaching(logits, size, lowest, peak, top_k.to(tl.float32), peak, scale, True, BLOCK)
            floor = tl.maximum(floor, kth)
        if top_p < 1:
            mass, smallest = _mass_above(logits, size, floor, peak, scale, BLOCK)
            nucleus = _value_reaching(logits, size, smallest, peak, top_p * mass, peak, scale, False, BLOCK)
            floor = tl.maximum(floor, nucleus)
    mass, _ = _mass_above(logits, size, floor, peak, scale, BLOCK)
    tl.store(peaks + row, peak)
    tl.store(bests + row, best)
    tl.store(floors + row, floor)
    tl.store(log_sums + row, tl.where(scale == 0, 0.0, tl.log(mass)))


@jit
def _load_logits(logits: tl.tensor, token: tl.tensor, size: tl.tensor) -> Any:
    """float32 logits, −∞ for NaN and beyond the vocabulary."""
    x = tl.load(logits + token, mask=token < size, other=-float("inf")).to(tl.float32)
    return tl.where(x == x, x, -float("inf"))


@jit
def _extremes(logits: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> Any:
    """Largest logit, the first token that has it, and the smallest finite logit."""
    infinity = float("inf")
    peak = tl.full([], -infinity, tl.float32)
    best = tl.full([], 0, tl.int32)
    lowest = tl.full([], infinity, tl.float32)
    for first in range(0, size, BLOCK):
        x = _load_logits(logits, first + tl.arange(0, BLOCK), size)
        top, index = tl.max(x, axis=0, return_indices=True)
        best = tl.where(top > peak, first + index, best)
        peak = tl.maximum(peak, top)
        lowest = tl.minimum(lowest, tl.min(tl.where(x > -infinity, x, infinity), axis=0))
    return peak, best, lowest


@jit
def _mass_above(
    logits: tl.tensor, size: tl.tensor, floor: tl.tensor, peak: tl.tensor, scale: tl.tensor, BLOCK: tl.constexpr
) -> Any:
    """Σ exp((x − peak)·scale) over finite x ≥ floor, and the smallest such x."""
    mass = tl.full([], 0.0, tl.float32)
    smallest = peak
    for first in range(0, size, BLOCK):
        x = _load_logits(logits, first + tl.arange(0, BLOCK), size)
        kept = (x >= floor) & (x > -float("inf"))
        mass += tl.sum(tl.where(kept, tl.exp((x - peak) * scale), 0.0), axis=0)
        smallest = tl.minimum(smallest, tl.min(tl.where(kept, x, peak), axis=0))
    return mass, smallest


@jit
def _value_reaching(
    logits: tl.tensor,
    size: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    needed: tl.tensor,
    peak: tl.tensor,
    scale: tl.tensor,
    COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> Any:
    """The largest logit x in [low, high] such that the logits ≥ x number `needed`, or have that much mass.

    Bisection over values; both ends always are logits of the row, so it ends after some ten passes.
    """
    while low < high:
        middle = low * 0.5 + high * 0.5
        pivot = tl.where(middle > low, middle, high)
        weight = tl.full([], 0.0, tl.float32)
        above = high
        below = low
        for first in range(0, size, BLOCK):
            x = _load_logits(logits, first + tl.arange(0, BLOCK), size)
            upper = x >= pivot
            if COUNTS:
                weight += tl.sum(upper.to(tl.float32), axis=0)
            else:
                weight += tl.sum(tl.where(upper, tl.exp((x - peak) * scale), 0.0), axis=0)
            above = tl.minimum(above, tl.min(tl.where(upper, x, high), axis=0))
            below = tl.maximum(below, tl.max(tl.where(upper, low, x), axis=0))
        reached = weight >= needed
        low = tl.where(reached, above, low)
        high = tl.where(reached, high, below)
    return low
