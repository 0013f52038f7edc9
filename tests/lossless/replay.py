"""A: every emitted token against one teacher-forced pass over its text.

The pass shares nothing with the engine but the weights: it is transformers' own forward with its own attention and
without a cache. N emitted tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftkit.evaluate.near_ties import teacher_forced
from draftkit.requests import SamplingParameters
from draftkit.runtime.ops.random import exponential, natural_log, target_stream
from draftkit.runtime.records import Generation
from lossless.exact_distribution import exact_distribution

EDGES = (0.0, 0.125, 0.25, 0.5, 1.0, 4.0, 16.0)  # of the histogram, in noise floors


@dataclass(frozen=True)
class ReplaySummary:
    """Of `tokens` emitted in `texts` different texts, `best` are the most likely; the others' margins are `behind`.

    A margin is how far a token's logit lies below the largest, its noise included where tokens are drawn with shared
    noise. `histogram`: upper edges in logits, and how many tokens lie up to each and above the one before.
    """

    texts: int
    tokens: int
    best: int
    largest: float
    histogram: tuple[tuple[float, int], ...]


class Replay:
    """Teacher-forced passes over the outputs of one model, each made once. `shift`: how far logits may move with the
    shape of a forward, which decides what a cut leaves open."""

    def __init__(self, model: PreTrainedModel, shift: float = 0.0):
        self._model = model
        self._shift = shift
        self._margins: dict[tuple[tuple[int, ...], tuple[int, ...], SamplingParameters], Tensor] = {}

    def margins(self, generation: Generation) -> Tensor:
        """float32 [N], on the CPU: how far below the best each emitted token lies; 0 for the best.

        Of a drawn generation, whose tokens must have been drawn with the target's noise, the noise takes part; the best
        is then among the tokens that no cut can remove, and ∞ is the margin of a token that every cut removes.
        """
        request = generation.request
        key = request.prompt, tuple(generation.tokens), request.sampling
        if key not in self._margins:
            logits = teacher_forced(self._model, request.prompt, generation.tokens)
            emitted = torch.tensor(generation.tokens, device=logits.device)[:, None]
            best = logits
            if request.sampling.temperature:
                distribution = exact_distribution(logits, request.sampling, self._shift)
                logits = logits + request.sampling.temperature * _noise(request.sampling, len(request.prompt), logits)
                best = logits.masked_fill(~distribution.sure.scatter(1, emitted, True), -torch.inf)
                logits = logits.masked_fill(~distribution.possible, -torch.inf)
            self._margins[key] = (best.amax(-1) - logits.gather(1, emitted)[:, 0]).cpu()
        return self._margins[key]

    def summary(self, floor: float) -> ReplaySummary:
        """Of all texts so far; `floor` scales the histogram."""
        margins = torch.cat(list(self._margins.values()))
        edges = [edge * floor for edge in EDGES] + [torch.inf]
        below = [int((margins <= edge).sum()) for edge in edges]
        counts = [after - before for before, after in zip([0, *below], below, strict=False)]
        histogram = tuple(zip(edges, counts, strict=True))
        return ReplaySummary(len(self._margins), len(margins), below[0], float(margins.max()), histogram)


def _noise(sampling: SamplingParameters, start: int, logits: Tensor) -> Tensor:
    positions = start + torch.arange(len(logits), device=logits.device)
    seed = sampling.seed - (sampling.seed >> 63 << 64)  # the same bits, signed
    stream = target_stream(positions.new_tensor([seed]), positions[None])
    return -natural_log(exponential(stream, logits.shape[1])[0])
