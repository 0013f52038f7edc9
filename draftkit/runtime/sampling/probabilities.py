"""From logits to the law that tokens are drawn from: one definition for target and draft.

B requests, T rows each, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draftkit.runtime.kernels.statistics import RowStatistics, row_statistics
from draftkit.runtime.sampling.parameters import SamplingTensors


class Distribution(NamedTuple):
    """The processed distributions of rows [B, T], without their probabilities.

    A token v with logit x ≥ floor has probability exp((x − peak)·scale − log_sum), any other 0. Where `scale` [B] is 0
    the law is one-hot at `best`.
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
    """The law of `logits` [B, T, V], any float type, under temperature, min-p, top-k and top-p of each request."""
    return Distribution(logits, parameters.scale, *row_statistics(logits, parameters))


def log_weights(law: Distribution) -> Tensor:
    """Log probabilities up to a constant per row, −∞ for what is cut: float32 [B, T, V]. Meaningless where greedy."""
    logits = law.logits.float()
    kept = logits >= law.floor[..., None]
    return torch.where(kept, (logits - law.peak[..., None]) * law.scale[:, None, None], -torch.inf)


def probabilities(law: Distribution) -> Tensor:
    """float32 [B, T, V]."""
    tokens = torch.arange(law.logits.shape[-1], device=law.logits.device)
    sampled = (log_weights(law) - law.log_sum[..., None]).exp()
    return torch.where(law.scale[:, None, None] == 0, (tokens == law.best[..., None]).float(), sampled)


def probability_of(law: Distribution, tokens: Tensor) -> Tensor:
    """The probability of one token per row: `tokens` int64 [B, T] to float32 [B, T]."""
    logits = law.logits.gather(-1, tokens[..., None])[..., 0].float()
    scale = law.scale[:, None]
    sampled = ((logits - law.peak) * scale - law.log_sum).exp()
    return torch.where(scale == 0, (tokens == law.best).float(), torch.where(logits >= law.floor, sampled, 0))
