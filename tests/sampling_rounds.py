"""Random rounds to verify."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftkit.requests import DraftSampling, SamplingParameters
from draftkit.runtime.drawing import draw
from draftkit.runtime.sampling_tensors import SamplingTensors
from draftkit.runtime.verdict import Drafted, Verdict, Verify


@dataclass(frozen=True)
class Round:
    """What goes into one verification."""

    drafted: Drafted
    logits: Tensor
    parameters: SamplingTensors
    start: Tensor

    def verify(self, mode: Verify) -> Verdict:
        return mode(self.drafted, self.logits, self.parameters, self.start)

    def take(self, rows: Tensor, k: int) -> Round:
        """Some rows in any order, with only the first `k` drafts."""
        tokens, lengths, active, one_hot, probs = self.drafted
        assert probs is not None
        drafted = Drafted(tokens[rows, :k], lengths[rows], active[rows], one_hot[rows], probs[rows, :k])
        return Round(drafted, self.logits[rows, : k + 1], self.parameters.take(rows), self.start[rows])

    def poisoned(self) -> Round:
        """Two padding drafts more, an inactive row after each; whatever is invalid is NaN, or no token."""
        (rows, k), valid = self.drafted.tokens.shape, self.drafted.valid
        whole = self.take(torch.arange(rows).repeat_interleave(2), k)
        assert whole.drafted.probs is not None
        active = torch.arange(2 * rows) % 2 == 0
        valid = pad(valid.repeat_interleave(2, 0) & active[:, None], (0, 2))
        scored = torch.cat((active[:, None], valid), dim=1)
        drafted = whole.drafted._replace(
            tokens=torch.where(valid, pad(whole.drafted.tokens, (0, 2)), -1 - 10**6),
            active=active,
            probs=torch.where(valid[..., None], pad(whole.drafted.probs, (0, 0, 0, 2)), math.nan),
        )
        logits = torch.where(scored[..., None], pad(whole.logits, (0, 0, 0, 2)), math.nan)
        return Round(drafted, logits, whole.parameters, whole.start)


def random_round(seed: int, *, rows: int = 6, k: int = 4, size: int = 33) -> Round:
    """Requests of all kinds: greedy, drafted greedily, with cuts, and with different numbers of drafts."""
    generator = torch.Generator().manual_seed(seed)
    temperatures = [0.0, 0.5, 1.0, 1.0, 2.0, 0.8]
    requests = [
        SamplingParameters(temperatures[i % 6], top_k=9 * (i % 2), top_p=1 - 0.1 * (i % 3), seed=1000 * seed + i)
        for i in range(rows)
    ]
    policies = [DraftSampling("greedy" if i % 3 == 1 else "probabilistic") for i in range(rows)]
    draft = SamplingTensors.of([p.parameters(r) for p, r in zip(policies, requests, strict=True)])
    start = torch.randint(1, 500, (rows,), generator=generator)
    logits = torch.randn(rows, k + 1, size, generator=generator) * 2
    guesses = logits[:, :k] + torch.randn(rows, k, size, generator=generator) * 0.7
    probs = torch.full((rows, k, size), math.nan)
    tokens = [draw(guesses[:, i], draft, start + i, start, probs=probs[:, i]) for i in range(k)]
    drafted = Drafted.full(torch.stack(tokens, dim=1), probs)._replace(
        lengths=torch.randint(0, k + 1, (rows,), generator=generator), one_hot=draft.greedy
    )
    return Round(drafted, logits, SamplingTensors.of(requests), start)
