"""D, the verifier alone: texts whose distributions are this target's and this draft's own, and drafts made to trip it.

The distributions are coarse-grained: the likeliest tokens stay, the rest counts as one. Every position has a
distribution of its own, whatever stands before it, so that the distribution of each is known exactly, however many
rounds a text takes. P positions, V cells of a distribution, K draft tokens, N texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftkit.requests import DraftSampling, SamplingParameters
from draftkit.runtime.batch import SamplingTensors
from draftkit.runtime.drawing import draw
from draftkit.runtime.emitted import Drafted, Verify
from lossless.contexts import Context
from lossless.exact_distribution import exact_distribution, fit
from lossless.goodness import NOTHING, ChiSquare

CELLS = 128
PROBABILISTIC = DraftSampling("probabilistic")
DRAFTS = 2  # K: enough for a rejection after an acceptance, and for a bonus token


@dataclass(frozen=True)
class Distributions:
    """Logits float32 [P, V] of the target and of the draft at every position of a text; how drafts are drawn."""

    target: Tensor
    draft: Tensor
    drawing: DraftSampling = PROBABILISTIC


def distributions_of(contexts: Sequence[Context], drawing: DraftSampling = PROBABILISTIC) -> dict[str, Distributions]:
    """By name: the draft's own distribution, drawn as it is measured; distributions that are bad in different ways; and
    a draft without chance. Contexts follow one another in a text.
    """
    coarse = [_coarse_grained(context) for context in contexts]
    target, own = (torch.stack(rows) for rows in zip(*coarse, strict=True))
    ranks = target.argsort(-1, descending=True)
    reverse = torch.zeros_like(target).scatter(-1, ranks, target.gather(-1, ranks.flip(-1)))
    halves = target.exp() / 2
    halves = halves.scatter(-1, ranks[:, 1::2], 0.0).scatter(-1, ranks[:, -1:], 0.0)
    halves = halves.scatter(-1, ranks[:, -1:], 1 - halves.sum(-1, keepdim=True))
    few = min(8, target.shape[1])
    uniform = torch.full_like(target, -torch.inf).scatter(-1, ranks[:, :few], 0.0)
    return {
        "the draft's own distribution": Distributions(target, own, replace(drawing, mode="probabilistic")),
        "a flatter distribution": Distributions(target, target / 2),
        "a few tokens, all alike": Distributions(target, uniform),
        "the reverse distribution": Distributions(target, reverse),
        "half of every other token, and a bad one": Distributions(target, halves.log()),
        "the draft's best token": Distributions(target, own, DraftSampling("greedy")),
    }


def drawn_texts(
    distributions: Distributions,
    verify: Verify,
    sampling: SamplingParameters,
    texts: int,
) -> Tensor:
    """int64 [N, P]: texts that rounds of draft and verification make."""
    length = len(distributions.target)
    target, draft = (
        torch.cat((rows, rows[:1].expand(DRAFTS, -1))) for rows in (distributions.target, distributions.draft)
    )
    wanted, drafts = (_rows(s, texts, target) for s in (sampling, distributions.drawing.parameters(sampling)))
    text = torch.zeros(texts, length + DRAFTS + 1, dtype=torch.int64, device=target.device)
    filled = torch.zeros(texts, dtype=torch.int64, device=target.device)
    rows = torch.arange(texts, device=target.device)
    ahead = torch.arange(DRAFTS + 1, device=target.device)
    while len(rows):
        start = filled[rows]
        own, rules = drafts.take(rows), wanted.take(rows)
        probs = target.new_zeros(len(rows), DRAFTS, target.shape[1])
        tokens = [
            draw(draft[start + i], own, start + i, start, coupled=False, probs=probs[:, i]) for i in range(DRAFTS)
        ]
        drafted = Drafted.full(torch.stack(tokens, dim=1), probs)._replace(one_hot=own.greedy)
        emitted = verify(drafted, target[start[:, None] + ahead], rules, start)
        text[rows[:, None], start[:, None] + ahead] = emitted.tokens
        filled[rows] = start + emitted.counts
        rows = rows[filled[rows] < length]
    return text[:, :length]


def sampler_fits(
    distributions: Mapping[str, Distributions],
    verify: Verify,
    sampling: SamplingParameters,
    texts: int,
) -> dict[str, ChiSquare]:
    """By kind of draft: the test that every position of its texts follows the target's distribution."""
    found = {}
    for name, pair in distributions.items():
        drawn = drawn_texts(pair, verify, sampling, texts)
        fits = (
            fit(torch.bincount(column, minlength=pair.target.shape[1]), exact_distribution(row, sampling))
            for column, row in zip(drawn.unbind(1), pair.target, strict=True)
        )
        found[name] = sum(fits, NOTHING)
    return found


def _coarse_grained(context: Context) -> tuple[Tensor, Tensor]:
    """The target's and the draft's log probabilities float32 [V] of the likeliest tokens of both, and of the rest."""
    logs = torch.stack((context.target, context.draft)).double().log_softmax(-1)
    kept = logs.amax(0).topk(min(CELLS - 1, logs.shape[1] - 1)).indices
    rest = logs.index_fill(1, kept, -torch.inf).logsumexp(-1, keepdim=True)
    target, draft = torch.cat((logs[:, kept], rest), dim=1).float()
    return target, draft


def _rows(sampling: SamplingParameters, texts: int, like: Tensor) -> SamplingTensors:
    """`texts` requests that differ in their seeds only."""
    zeros = torch.zeros(texts, dtype=torch.int64, device=like.device)
    one = SamplingTensors.of([sampling], like.device).take(zeros)
    return one._replace(seed=one.seed + torch.arange(texts, device=like.device))
