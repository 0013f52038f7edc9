"""What the device knows of each sequence between rounds. S slots, K draft tokens, F feature width."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftkit.runtime.verdict import Verdict


@dataclass
class SlotState:
    """`position` int64 [S+1] of each slot's anchor, and its committed tokens.

    `tokens` int64 [S+1, K+1], `counts` int64 [S+1] and `features` [S+1, K+1, F] are those of `Committed`; the anchor is
    the last token. The row beyond the slots, which index −1 selects, belongs to the rows of a batch without a sequence.
    """

    position: Tensor
    tokens: Tensor
    counts: Tensor
    features: Tensor

    @classmethod
    def empty(cls, num_slots: int, k: int, feature_size: int, device: torch.device, dtype: torch.dtype) -> SlotState:
        zeros = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        return cls(
            position=zeros,
            tokens=zeros[:, None].repeat(1, k + 1),
            counts=zeros + 1,
            features=torch.zeros(num_slots + 1, k + 1, feature_size, device=device, dtype=dtype),
        )

    def admit(self, slot: int, length: int, first: Tensor, feature: Tensor | None) -> None:
        """Start a sequence: a prompt of `length` tokens, the token after it and the feature [F] it was emitted from."""
        self.position[slot] = length
        self.tokens[slot, 0] = first
        self.counts[slot] = 1
        if feature is not None:
            self.features[slot, 0] = feature

    def commit(self, slots: Tensor, verdict: Verdict) -> None:
        """Advance `slots` int64 [B] by what the target has emitted."""
        unused = self.tokens.shape[1] - verdict.tokens.shape[1]
        self.tokens[slots] = pad(verdict.tokens, (0, unused))
        self.counts[slots] = verdict.counts.clamp(min=1)  # a row without a sequence emits nothing, and is read again
        self.position[slots] += verdict.counts
