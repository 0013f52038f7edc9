"""Per row of logits: what turns them into probabilities without storing any.

B requests, T rows each, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draftkit.runtime.batch import SamplingTensors
from draftkit.runtime.ops.backend import uses_triton
from draftkit.runtime.ops.row_floor import row_floor
from draftkit.runtime.ops.row_peaks import row_peaks


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
        peak, best, _, floor, log_sum = row_peaks(logits, parameters.scale)
        if parameters.truncates:
            floor, log_sum = row_floor(logits, peak, parameters)
        return RowStatistics(peak, best, floor, log_sum)
    return row_statistics_reference(logits, parameters)


def row_statistics_reference(logits: Tensor, parameters: SamplingTensors) -> RowStatistics:
    logits = logits.float().nan_to_num(-torch.inf, torch.inf, -torch.inf)
    scale = parameters.scale[:, None]
    peak, best = logits.amax(-1), logits.argmax(-1)
    floor = _floor(logits, peak, parameters) if parameters.truncates else torch.full_like(peak, -torch.inf)
    weights = ((logits - peak[..., None]) * scale[..., None]).exp()
    if parameters.truncates:
        weights = torch.where(logits >= floor[..., None], weights, 0)
    total = weights.sum(-1)
    return RowStatistics(peak, best, floor, torch.where(scale == 0, 0, total.log()))


def _floor(logits: Tensor, peak: Tensor, parameters: SamplingTensors) -> Tensor:
    """The smallest logit that min-p, then top-k, then top-p on what is left by those two, keep: [B, T]."""
    floor = (peak - parameters.drop[:, None]).expand(peak.shape)
    kept = (logits >= floor[..., None]).sum(-1)
    top_k = parameters.top_k[:, None].clamp(max=logits.shape[-1]).expand(peak.shape)
    last = torch.minimum(top_k, kept).clamp(min=1)
    ordered = _largest(logits, last)
    floor = torch.where(top_k <= kept, ordered.gather(-1, last[..., None] - 1)[..., 0], floor)
    ordered = _largest(logits, (logits >= floor[..., None]).sum(-1), ordered)  # more than k where some are equal
    weights = ((ordered - peak[..., None]) * parameters.scale[:, None, None]).double().exp()
    mass = torch.where(ordered >= floor[..., None], weights, 0).cumsum(-1)
    top_p = parameters.top_p[:, None]
    needed = (mass < top_p[..., None] * mass[..., -1:]).sum(-1, keepdim=True).clamp(max=mass.shape[-1] - 1)
    nucleus = ordered.gather(-1, needed)[..., 0]
    return torch.where(top_p < 1, torch.maximum(floor, nucleus), floor)


def _largest(logits: Tensor, counts: Tensor, known: Tensor | None = None) -> Tensor:
    """The largest of each row in falling order, [B, T, N], as many as `counts` says or more: `known`, if they do."""
    size = logits.shape[-1]
    most = size if torch.compiler.is_exporting() or not counts.numel() else int(counts.max())
    if known is not None and known.shape[-1] >= most:
        return known
    return logits.topk(most).values if 8 * most < size else logits.sort(-1, descending=True).values
