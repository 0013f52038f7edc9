"""`SamplingParameters` as tensors, for a batch of B requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftkit.requests import EVERY_TOKEN, SamplingParameters


class SamplingTensors(NamedTuple):
    """`SamplingParameters` of B requests, one row each.

    `seed` int64 (the bits of the unsigned seed), `scale` float32 = 1 / temperature, 0 for greedy; `top_k` int32,
    `top_p` float32, and `min_p` as `drop` float32: how far below the largest logit a token may lie. `truncates` says
    on the host whether any row cuts, so that a batch without cuts pays nothing for them.
    """

    seed: Tensor
    scale: Tensor
    top_k: Tensor
    top_p: Tensor
    drop: Tensor
    truncates: bool

    @classmethod
    def of(cls, requests: Sequence[SamplingParameters], device: torch.device | str = "cpu") -> SamplingTensors:
        def column(values: list[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        cutting = [r if r.truncates else SamplingParameters() for r in requests]
        return cls(
            seed=column([r.seed - (r.seed >> 63 << 64) for r in requests], torch.int64),
            scale=column([1 / r.temperature if r.temperature else 0 for r in requests], torch.float32),
            top_k=column([r.top_k or EVERY_TOKEN for r in cutting], torch.int32),
            top_p=column([r.top_p for r in cutting], torch.float32),
            drop=column([-r.temperature * math.log(r.min_p) if r.min_p else math.inf for r in cutting], torch.float32),
            truncates=any(r.truncates for r in requests),
        )

    def take(self, rows: Tensor) -> SamplingTensors:
        """The given rows, for instance those of the active slots."""
        seed, scale, top_k, top_p, drop, truncates = self
        return SamplingTensors(seed[rows], scale[rows], top_k[rows], top_p[rows], drop[rows], truncates)

    def clone(self) -> SamplingTensors:
        """The same rows in memory of their own."""
        seed, scale, top_k, top_p, drop, truncates = self
        return SamplingTensors(seed.clone(), scale.clone(), top_k.clone(), top_p.clone(), drop.clone(), truncates)

    def copy_(self, other: SamplingTensors) -> None:
        """Take over the values of as many other rows; whether they cut must agree."""
        for own, new in zip(self[:-1], other[:-1], strict=True):
            own.copy_(new)

    @property
    def greedy(self) -> Tensor:
        """bool [B]: the rows of temperature 0."""
        return self.scale == 0
