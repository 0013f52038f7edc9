"""Drawing the draft tokens. B requests, V vocabulary."""

from __future__ import annotations

from torch import Tensor

from draftkit.runtime.kernels.sample import sample
from draftkit.runtime.sampling.parameters import SamplingTensors
from draftkit.runtime.sampling.probabilities import distribution
from draftkit.runtime.sampling.random import draft_stream, target_stream


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
