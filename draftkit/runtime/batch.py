"""The sequences of a round, as the device sees them. B rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftkit.requests import DraftSampling, Request, SamplingParameters
from draftkit.runtime.sampling_tensors import SamplingTensors


@dataclass(frozen=True)
class Batch:
    """`slots` int64 [B], ascending, then −1 in the rows without a sequence, and how target and draft tokens are drawn.

    `all_greedy` and `drafts_sampled` are known on the host: with the cuts of `SamplingTensors` they decide which
    operations a round consists of.
    """

    slots: Tensor
    target: SamplingTensors
    draft: SamplingTensors
    all_greedy: bool
    drafts_sampled: bool

    @classmethod
    def of(
        cls, requests: Mapping[int, Request], draft_sampling: DraftSampling, device: torch.device, size: int
    ) -> Batch:
        """The batch of `size` rows for `requests` by slot."""
        absent = size - len(requests)
        own = [request.sampling for request in requests.values()] + [SamplingParameters()] * absent
        drafts = [draft_sampling.parameters(sampling) for sampling in own]
        return cls(
            slots=torch.tensor([*sorted(requests), *[-1] * absent], device=device),
            target=SamplingTensors.of(own, device),
            draft=SamplingTensors.of(drafts, device),
            all_greedy=not any(sampling.temperature for sampling in own),
            drafts_sampled=any(draft.temperature for draft in drafts),
        )

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
        return replace(
            self, slots=torch.full_like(self.slots, -1), target=self.target.clone(), draft=self.draft.clone()
        )

    def copy_(self, other: Batch) -> None:
        """Take over the values of a batch of the same kind."""
        self.slots.copy_(other.slots)
        self.target.copy_(other.target)
        self.draft.copy_(other.draft)
