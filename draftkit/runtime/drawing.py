"""Drawing the draft tokens of a round. B requests, K draft tokens, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from draftkit.runtime.batch import SamplingTensors
from draftkit.runtime.ops.distribution import distribution
from draftkit.runtime.ops.random import draft_stream, target_stream
from draftkit.runtime.ops.sample import sample


def draw(
    logits: Tensor,
    parameters: SamplingTensors,
    position: Tensor,
    start: Tensor,
    *,
    coupled: bool = False,
    probs: Tensor | None = None,
) -> Tensor:
    """Draw the draft token for `position` int64 [B] from `logits` [B, V] in the target's vocabulary: int64 [B].

    `parameters` are the draft's (`DraftSampling.parameters`), greedy rows draft one-hot. `start` int64 [B] is the
    position of the round's first draft. `coupled` draws with the target's own noise, for `verify_coupled` only: a
    ratio test against noise that already chose the draft would be biased. `probs` float32 [B, V], for instance one
    step of [B, K, V], receives what was drawn from; its one-hot rows are left as they are.
    """
    position = position[:, None]
    stream = target_stream(parameters.seed, position) if coupled else draft_stream(parameters.seed, position, start)
    return sample(distribution(logits[:, None], parameters), stream, out=probs)[:, 0]


class RoundDraw:
    """`protocol.Draw` for one round of sampled requests; `probs` float32 [B, K, V] keeps what drafts were drawn from.

    `parameters` are those of the drafts, `start` int64 [B] the position of each row's first draft. `coupled`: drawn
    with the target's noise. Greedy rows are one-hot and leave their `probs` alone.
    """

    def __init__(self, parameters: SamplingTensors, start: Tensor, k: int, vocab_size: int, *, coupled: bool):
        self.probs = start.new_zeros(start.shape[0], k, vocab_size, dtype=torch.float32)
        self._parameters = parameters
        self._start = start
        self._coupled = coupled

    def __call__(self, step: int, logits: Tensor, ids: Tensor | None = None) -> Tensor:
        if ids is not None:  # tokens that the draft does not have have probability zero
            full = logits.new_full((logits.shape[0], self.probs.shape[-1]), -torch.inf)
            logits = full.index_copy_(1, ids, logits)
        position = self._start + step
        probs = self.probs[:, step]
        return draw(logits, self._parameters, position, self._start, coupled=self._coupled, probs=probs)
