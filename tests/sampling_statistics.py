"""Does a sample follow a law? Goodness of fit, and a text model whose law is known exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftkit.requests import SamplingParameters
from draftkit.runtime import drawing as drafting
from draftkit.runtime.sampling_tensors import SamplingTensors
from draftkit.runtime.verdict import Drafted, Verify

MIN_EXPECTED = 5.0


def fit(counts: Tensor, law: Tensor) -> float:
    """The p-value of the G-test that `counts` [N] were drawn from `law` [N]; 0 where something impossible occurred.

    Cells with fewer than five expected draws are pooled.
    """
    counts, expected = counts.double(), law.double() / law.double().sum() * counts.sum()
    if counts[law == 0].sum() > 0:
        return 0.0
    rare = expected < MIN_EXPECTED
    counts = torch.cat((counts[~rare], counts[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    counts, expected = counts[expected > 0], expected[expected > 0]
    g = 2 * (torch.xlogy(counts, counts) - torch.xlogy(counts, expected)).sum().clamp(min=0)
    degrees = torch.tensor(max(len(counts) - 1, 0), dtype=torch.float64)
    return float(torch.special.gammaincc(degrees / 2, g / 2)) if degrees else 1.0


def same_law(first: Tensor, second: Tensor) -> float:
    """The p-value of the G-test that two samples, of which these are the counts [N], were drawn from one law."""
    counts = torch.stack((first, second)).double()
    share = counts.sum(1, keepdim=True) / counts.sum()
    rare = (counts.sum(0) * share.min()) < MIN_EXPECTED
    counts = torch.cat((counts[:, ~rare], counts[:, rare].sum(1, keepdim=True)), dim=1)
    counts = counts[:, counts.sum(0) > 0]
    expected = counts.sum(0) * share
    g = 2 * (torch.xlogy(counts, counts) - torch.xlogy(counts, expected)).sum().clamp(min=0)
    return float(torch.special.gammaincc(torch.tensor((counts.shape[1] - 1) / 2, dtype=torch.float64), g / 2))


def text_fit(texts: Tensor, law: Tensor, size: int) -> float:
    """The p-value that `texts` int64 [B, length] follow `law` [size ** length]."""
    powers = size ** torch.arange(texts.shape[1] - 1, -1, -1)
    return fit(torch.bincount((texts * powers).sum(-1), minlength=len(law)), law)


def processed(logits: Tensor, parameters: SamplingParameters) -> Tensor:
    """The law of one row of logits [V], written out token by token: the definition that the sampler is held to."""
    law = torch.zeros(len(logits), dtype=torch.float64)
    if parameters.temperature == 0:
        law[int(logits.argmax())] = 1
        return law
    p = (logits.double() / parameters.temperature).softmax(-1).tolist()
    order = sorted(range(len(p)), key=lambda v: -p[v])
    kept = [v for v in order if p[v] > 0 and p[v] >= parameters.min_p * max(p)]
    if parameters.top_k:
        kept = [v for v in kept if p[v] >= p[order[min(parameters.top_k, len(p)) - 1]]]
    if parameters.top_p < 1:
        mass, needed = 0.0, parameters.top_p * sum(p[v] for v in kept)
        for last in kept:
            mass += p[last]
            if mass >= needed:
                break
        kept = [v for v in kept if p[v] >= p[last]]
    law[kept] = torch.tensor([p[v] for v in kept], dtype=torch.float64)
    return law / law.sum()


@dataclass(frozen=True)
class Bigrams:
    """A target and a draft whose next token depends on the last one only: logits [V, V] each, row = last token."""

    target: Tensor
    draft: Tensor

    def law(self, parameters: SamplingParameters, length: int) -> Tensor:
        """The exact law of the first `length` tokens of the target after token 0: float64 [V ** length]."""
        step = torch.stack([processed(row, parameters) for row in self.target])
        law = step[0]
        for _ in range(length - 1):
            law = (law[:, None] * step.repeat(len(law) // len(step), 1)).flatten()
        return law


def batch(parameters: SamplingParameters, size: int, *, first_seed: int = 0) -> SamplingTensors:
    """`size` requests that differ in their seeds only."""
    rows = SamplingTensors.of([parameters]).take(torch.zeros(size, dtype=torch.int64))
    return rows._replace(seed=first_seed + torch.arange(size))


@dataclass
class Texts:
    """`tokens` int64 [B, length], and summed over all rounds, per draft position: how many rounds `reached` it with
    all drafts before it standing, how many of these `accepted` it, and how many were `expected` to; float [K].
    """

    tokens: Tensor
    reached: Tensor
    accepted: Tensor
    expected: Tensor


def generate(
    model: Bigrams,
    verify: Verify,
    target: SamplingTensors,
    draft: SamplingTensors,
    *,
    k: int,
    length: int,
    coupled: bool = False,
    lengths: Tensor | None = None,
    draw: Callable[..., Tensor] = drafting.draw,
) -> Texts:
    """Draft and verify after token 0 for B requests at once, round by round, until each has `length` tokens.

    Greedy rows of `draft` draft one-hot; `lengths` [B] limits the drafts of a request's rounds.
    """
    size, total = len(model.target), len(target.seed)
    text = torch.zeros(total, length + k + 2, dtype=torch.int64)
    filled = torch.ones(total, dtype=torch.int64)
    sums = torch.zeros(3, k)
    unfinished = torch.arange(total)
    while len(unfinished):
        start, rules = filled[unfinished], draft.take(unfinished)
        rows = [text[unfinished, start - 1]]
        probs = torch.full((len(unfinished), k, size), torch.nan)
        for step in range(k):
            logits = model.draft[rows[-1]]
            rows.append(draw(logits, rules, start + step, start, coupled=coupled, probs=probs[:, step]))
        tokens = torch.stack(rows, dim=1)
        drafted = Drafted.full(tokens[:, 1:], probs)._replace(one_hot=rules.greedy)
        if lengths is not None:
            drafted = drafted._replace(lengths=lengths[unfinished])
        verdict = verify(drafted, model.target[tokens], target.take(unfinished), start)
        text[unfinished[:, None], start[:, None] + torch.arange(k + 1)] = verdict.tokens
        filled[unfinished] = start + verdict.counts
        accepts = torch.arange(k) < verdict.accepted[:, None]
        reaches = (torch.arange(k) <= verdict.accepted[:, None]) & drafted.valid
        sums += torch.stack([reaches.sum(0), accepts.sum(0), (verdict.expected * reaches).sum(0)])
        unfinished = unfinished[filled[unfinished] <= length]
    return Texts(text[:, 1 : length + 1], *sums)
