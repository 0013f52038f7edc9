"""What a training step computes on. N tokens in one row, F width of the captured features, H target width, K steps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TrainingBatch(NamedTuple):
    """Packed samples, one after the other, then padding.

    - `tokens` int64 [1, N]. `positions` int64 [1, N] count from 0 in each sample.
    - `sample_ids` int64 [1, N]: the number of the sample, −1 for padding.
    - `loss_mask` bool [1, N]: tokens that the target produced.
    - `features` [1, N, F]: the target's states that the draft reads, None where it reads none; position i has seen the
      tokens up to i. `last` [1, N, H]: the target's states after its final norm.
    """

    tokens: Tensor
    positions: Tensor
    sample_ids: Tensor
    loss_mask: Tensor
    features: Tensor | None
    last: Tensor

    def drafted(self, k: int) -> Tensor:
        """Whether serving would draft at step t of a chain that starts at position i: bool [K, N].

        Position i has the feature, token i + 1 starts the chain, and token i + 2 + t is drafted: all of them were
        produced by the target, in one sample. The first chain after a prompt starts at its last position.
        """
        return self._chains(k, self.loss_mask[0])

    def complete(self, k: int) -> Tensor:
        """Whether tokens i + 1 … i + 2 + t are in the sample of position i, whoever wrote them: bool [K, N]."""
        return self._chains(k, torch.ones_like(self.loss_mask[0]))

    def _chains(self, k: int, wanted: Tensor) -> Tensor:
        sample_ids, positions = self.sample_ids[0], self.positions[0]
        chain = sample_ids >= 0
        steps = []
        for offset in range(1, k + 2):
            same = (shifted(sample_ids, offset) == sample_ids) & (shifted(positions, offset) == positions + offset)
            chain = chain & same & shifted(wanted, offset)
            steps.append(chain)
        return torch.stack(steps[1:])


def shifted(values: Tensor, offset: int) -> Tensor:
    """The values [..., N] of `offset` places later; beyond the end those of the beginning follow, as in a ring."""
    return values.roll(-offset, -1)
