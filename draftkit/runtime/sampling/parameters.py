"""What a request asks of the sampler, checked on the host, and the same as tensors for a batch of B requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from draftkit.errors import DraftkitError

MIN_TEMPERATURE = 1e-5
_EVERY_TOKEN = 2**31 - 1  # a top-k that no vocabulary reaches

DraftSamplingMode = Literal["auto", "greedy", "probabilistic"]


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How the tokens of one request are drawn, in this order: temperature, min-p, top-k, top-p (as in vLLM).

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 keep everything; tokens that tie at a cut all stay.
    `seed` < 2⁶⁴ alone decides the request's random numbers. Raises `DraftkitError` for values outside their range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        hot = MIN_TEMPERATURE <= self.temperature < math.inf
        _require(self.temperature == 0 or hot, "temperature", self.temperature, f"0, or at least {MIN_TEMPERATURE}")
        _require(0 <= self.top_k < _EVERY_TOKEN, "top_k", self.top_k, "0 to keep all tokens, or a number of tokens")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0, at most 1")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        _require(0 <= self.seed < 2**64, "seed", self.seed, "a whole number from 0 to 2**64 - 1")

    @property
    def truncates(self) -> bool:
        """Whether some cut can forbid tokens; at temperature 0 there is nothing left to cut."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    def numbered(self, number: int) -> SamplingParameters:
        """These parameters for the request of that number in a run: each has a seed of its own."""
        return replace(self, seed=(self.seed + number) % 2**64)


def _require(fine: bool, name: str, value: float, expected: str) -> None:
    if not fine:
        raise DraftkitError(f"{name} is {value}", where="sampling parameters", expected=expected)


@dataclass(frozen=True, slots=True)
class DraftSampling:
    """How drafts are drawn.

    `mode` auto drafts greedily for requests below the temperature `greedy_below`: there the draft's top token is
    accepted more often than a sampled one. `temperature` replaces the request's own where a draft is sampled; any
    value is lossless. Cuts of the request hold for its drafts too.
    """

    mode: DraftSamplingMode = "auto"
    greedy_below: float = 0.75
    temperature: float | None = None

    def parameters(self, request: SamplingParameters) -> SamplingParameters:
        """What the draft of a request is drawn with; temperature 0 means a greedy, one-hot draft."""
        if self.mode == "greedy" or (self.mode == "auto" and request.temperature < self.greedy_below):
            return replace(request, temperature=0.0)
        return request if self.temperature is None else replace(request, temperature=self.temperature)


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
            top_k=column([r.top_k or _EVERY_TOKEN for r in cutting], torch.int32),
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
