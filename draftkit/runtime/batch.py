"""The requests of a round, as the device sees them. B rows, one each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftkit.requests import EVERY_TOKEN, DraftSampling, Request, SamplingParameters

ALIGNMENT = 16  # bytes: kernels are compiled once for memory that is aligned so, and once more for other


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

    @property
    def greedy(self) -> Tensor:
        """bool [B]: the rows of temperature 0."""
        return self.scale == 0


@dataclass(frozen=True)
class Batch:
    """`slots` int64 [B], ascending, and −1 in the rows without a sequence, and how target and draft tokens are drawn.

    `all_greedy` and `drafts_sampled` are known on the host: with the cuts of `SamplingTensors` they decide which
    operations a round consists of. All tensors lie in `memory` uint8, so that one transfer brings a batch to a device.
    """

    memory: Tensor
    slots: Tensor
    target: SamplingTensors
    draft: SamplingTensors
    all_greedy: bool
    drafts_sampled: bool

    @classmethod
    def of(
        cls,
        requests: Mapping[int, Request],
        draft_sampling: DraftSampling,
        device: torch.device,
        rows: Sequence[int] | None = None,
    ) -> Batch:
        """The batch for `requests` by slot; `rows` are the slots of its rows, −1 for none, None for those alone."""
        rows = sorted(requests) if rows is None else rows
        own = [requests[slot].sampling if slot in requests else SamplingParameters() for slot in rows]
        drafts = [draft_sampling.parameters(sampling) for sampling in own]
        slots = torch.tensor(rows)
        target, draft = SamplingTensors.of(own), SamplingTensors.of(drafts)
        columns = slots, *target[:-1], *draft[:-1]
        here = cls(
            memory=torch.cat([pad(column.view(torch.uint8), (0, -column.nbytes % ALIGNMENT)) for column in columns]),
            slots=slots,
            target=target,
            draft=draft,
            all_greedy=not any(sampling.temperature for sampling in own),
            drafts_sampled=any(parameters.temperature for parameters in drafts),
        )
        return here._in(here.memory.to(device))

    @property
    def active(self) -> Tensor:
        """bool [B]: the rows that hold a sequence."""
        return self.slots >= 0

    @property
    def kind(self) -> tuple[int, bool, bool, bool, bool]:
        """What decides the operations of a round and their shapes; batches of one kind share a CUDA graph."""
        flags = self.all_greedy, self.drafts_sampled, self.target.truncates, self.draft.truncates
        return len(self.slots), *flags

    def vacant(self) -> Batch:
        """A batch of the same kind without sequences, in memory of its own."""
        vacant = self._in(self.memory.clone())
        vacant.slots.fill_(-1)
        return vacant

    def copy_(self, other: Batch) -> None:
        """Take over the values of a batch of the same kind."""
        self.memory.copy_(other.memory)

    def _in(self, memory: Tensor) -> Batch:
        """The batch whose values lie in other memory."""
        own = [self.slots, *self.target[:-1], *self.draft[:-1]]
        parts = memory.split([column.nbytes + -column.nbytes % ALIGNMENT for column in own])
        slots, *columns = (part[: column.nbytes].view(column.dtype) for part, column in zip(parts, own, strict=True))
        half = len(columns) // 2
        target = SamplingTensors._make([*columns[:half], self.target.truncates])
        draft = SamplingTensors._make([*columns[half:], self.draft.truncates])
        return replace(self, memory=memory, slots=slots, target=target, draft=draft)
