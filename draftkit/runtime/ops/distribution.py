"""From logits to the distribution that tokens are drawn from: one definition for target and draft.

B requests, T rows each, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftkit.runtime.batch import SamplingTensors
from draftkit.runtime.ops.backend import jit, tl
from draftkit.runtime.ops.row_statistics import RowStatistics, row_statistics


class Distribution(NamedTuple):
    """The processed distributions of rows [B, T], without their probabilities.

    A token v with logit x ≥ floor has probability exp((x − peak)·scale − log_sum), any other 0. Where `scale` [B] is 0
    it is one-hot at `best`.
    """

    logits: Tensor
    scale: Tensor
    peak: Tensor
    best: Tensor
    floor: Tensor
    log_sum: Tensor

    @property
    def statistics(self) -> RowStatistics:
        return RowStatistics(self.peak, self.best, self.floor, self.log_sum)

    def row(self, index: Tensor) -> Distribution:
        """Row `index` [B] of each request, as a distribution with T = 1."""
        logits = self.logits.take_along_dim(index[:, None, None], 1)
        return Distribution(logits, self.scale, *(s.gather(1, index[:, None]) for s in self.statistics))


def distribution(logits: Tensor, parameters: SamplingTensors) -> Distribution:
    """The distribution of `logits` [B, T, V], of any float type, under temperature, min-p, top-k and top-p of each
    request."""
    return Distribution(logits, parameters.scale, *row_statistics(logits, parameters))


def log_weights(p: Distribution) -> Tensor:
    """Log probabilities up to a constant per row, −∞ for what is cut: float32 [B, T, V]. Meaningless where greedy."""
    logits = p.logits.float()
    kept = logits >= p.floor[..., None]
    return torch.where(kept, (logits - p.peak[..., None]) * p.scale[:, None, None], -torch.inf)


def probabilities(p: Distribution) -> Tensor:
    """The probabilities of all tokens: float32 [B, T, V]."""
    tokens = torch.arange(p.logits.shape[-1], device=p.logits.device)
    sampled = (log_weights(p) - p.log_sum[..., None]).exp()
    return torch.where(p.scale[:, None, None] == 0, (tokens == p.best[..., None]).float(), sampled)


def probability_of(p: Distribution, tokens: Tensor, rows: Tensor | None = None) -> Tensor:
    """The probability of one token per row: `tokens` int64 [B, T] to float32 [B, T]; with `rows` int64 [B, N], of as
    many tokens [B, N], each in its row."""
    if rows is None:
        logits, statistics = p.logits.gather(-1, tokens[..., None])[..., 0].float(), p.statistics
    else:
        logits = p.logits.flatten(1).gather(1, rows * p.logits.shape[-1] + tokens).float()
        statistics = RowStatistics(*(column.gather(1, rows) for column in p.statistics))
    scale = p.scale[:, None]
    sampled = ((logits - statistics.peak) * scale - statistics.log_sum).exp()
    kept = torch.where(logits >= statistics.floor, sampled, 0)
    return torch.where(scale == 0, (tokens == statistics.best).float(), kept)


def distribution_arguments(p: Distribution) -> tuple[Tensor, ...]:
    """The pointers `logits, scales, peaks, bests, floors, log_sums` of a kernel's signature."""
    return p.logits.contiguous(), p.scale, *(column.contiguous() for column in p.statistics)


@jit
def load_log_weights(
    logits: tl.tensor,
    peaks: tl.tensor,
    floors: tl.tensor,
    scale: tl.tensor,
    row: tl.tensor,
    token: tl.tensor,
    size: tl.tensor,
) -> Any:
    """`log_weights` for a block of tokens of one row int64, −∞ beyond the vocabulary."""
    x = tl.load(logits + row * size + token, mask=token < size, other=-float("inf")).to(tl.float32)
    return tl.where(x >= tl.load(floors + row), (x - tl.load(peaks + row)) * scale, -float("inf"))
