"""Judging a draft while it trains: the acceptance length that it would have in serving, from one teacher-forced pass.

Rounds begin where the last one ended, so that hard places count more often than a mean over positions would count them.
With the true tokens as prefix a chain meets exactly what it would meet in serving up to its first rejection, since a
drafter's context is rebuilt from true features after each round. So the rounds of a text follow from where chains
would have broken off: at temperature 0 from the text of the target's greedy decoding, at another from text drawn at it,
with a coin of min(1, q/p) for each emitted token. N positions, K draft tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import torch

from draftkit.results.cell import Interval
from draftkit.results.statistics import length_over_prompts
from draftkit.train.batch import TrainingBatch
from draftkit.train.recipes.recipe import Chains, Recipe

Mode = Literal["greedy", "sampled"]


class SimulatedRound(NamedTuple):
    """A round: how many draft tokens were accepted, of those that still were in the text, and how many were possible.

    `anchor`: the position in the batch whose state is the newest that the drafts read.
    """

    accepted: int
    drafted: int
    anchor: int


def simulate_rounds(
    batch: TrainingBatch, chains: Chains, mode: Mode, generator: torch.Generator | None = None
) -> dict[int, list[SimulatedRound]]:
    """The rounds of each sample, by its number.

    `sampled` draws coins from `generator`, on the CPU. A round that reaches the end of its span counts what lies
    within it.
    """
    if mode == "greedy":
        accepted = chains.agree
    else:
        coins = torch.rand(chains.ratio.shape, generator=generator)
        accepted = coins < chains.ratio.cpu()
    hits = (accepted.cpu() & chains.drafted.cpu()).long().cumprod(0).sum(0).tolist()
    possible = chains.drafted.cpu().sum(0).tolist()
    sample_ids = batch.sample_ids[0].tolist()
    rounds: dict[int, list[SimulatedRound]] = {}
    for begin, end in _spans(batch):
        anchor = begin - 1  # the position whose feature predicts the span's first token
        sample = sample_ids[begin]
        while anchor + 1 < end - 1 and anchor >= 0 and sample_ids[anchor] == sample:
            rounds.setdefault(sample, []).append(SimulatedRound(hits[anchor], possible[anchor], anchor))
            anchor += hits[anchor] + 1
    return rounds


def _spans(batch: TrainingBatch) -> Iterator[tuple[int, int]]:
    """The stretches [begin, end) of the loss mask, each within one sample."""
    sample_ids, inside = batch.sample_ids[0].tolist(), batch.loss_mask[0].tolist()
    begin = None
    for i, sample in enumerate([*sample_ids, -1]):
        within = i < len(inside) and inside[i] and sample >= 0
        if begin is not None and (not within or sample != sample_ids[begin]):
            yield begin, i
            begin = None
        if within and begin is None:
            begin = i


class Judged(NamedTuple):
    """A sample whose rounds were simulated: its number in the file, its rounds, and sums over what serving would draft:
    how many drafts, their Σ min(p, q), and the target's mass outside the draft vocabulary."""

    number: int
    rounds: list[SimulatedRound]
    drafts: int
    alpha: float
    oov: float


@torch.no_grad()
def judge(recipe: Recipe, batch: TrainingBatch, numbers: Sequence[int], k: int, mode: Mode) -> list[Judged]:
    """The samples of a batch; `numbers` are theirs. Coins are drawn from the samples' numbers alone."""
    chains = recipe.chains(batch, k)
    generator = torch.Generator().manual_seed(numbers[0] if numbers else 0)
    rounds = simulate_rounds(batch, chains, mode, generator)
    first = chains.drafted[0]
    judged = []
    for place, number in enumerate(numbers):
        here = first & (batch.sample_ids[0] == place)
        judged.append(
            Judged(
                number,
                rounds.get(place, []),
                int(here.sum()),
                float(chains.alpha[0][here].sum()),
                float(chains.oov[0][here].sum()),
            )
        )
    return judged


@torch.no_grad()
def held_out_loss(recipe: Recipe, batch: TrainingBatch) -> float:
    """The training loss of a batch. What is drawn at random for it is the same every time, and leaves torch's own
    generators as they were, so that validations change nothing."""
    devices = [batch.tokens.device] if batch.tokens.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        return float(recipe.forward(batch).loss)  # calling the recipe itself would take FSDP's weights apart again


def acceptance(judged: Iterable[Judged]) -> Interval:
    """The acceptance length over all rounds, with the 95 % interval over samples."""
    return length_over_prompts([(sum(r.accepted for r in j.rounds), len(j.rounds)) for j in judged if j.rounds])


def metrics(judged: Sequence[Judged], categories: Mapping[int, str], k: int) -> dict[str, float]:
    """The metrics of a validation by name: the acceptance length and its interval, per position the share of rounds in
    which that draft was accepted, the length of each category, and of first drafts the mean acceptance probability and
    the mass out of the vocabulary.

    `categories[i]` is that of sample number i.
    """
    length = acceptance(judged)
    rounds = [r for j in judged for r in j.rounds]
    drafts = max(sum(j.drafts for j in judged), 1)
    out = {"acceptance_length": length.mean, "acceptance_length_documents": float(length.prompts or 0)}
    if length.bounds is not None:
        out["acceptance_length_low"], out["acceptance_length_high"] = length.bounds
    for position in range(k):
        out[f"accepted_{position + 1}"] = sum(r.accepted > position for r in rounds) / max(len(rounds), 1)
    kinds = sorted({categories[j.number] for j in judged})
    if len(kinds) > 1:
        for kind in kinds:
            out[f"acceptance_length/{kind}"] = acceptance(j for j in judged if categories[j.number] == kind).mean
    out["alpha"] = sum(j.alpha for j in judged) / drafts
    out["oov"] = sum(j.oov for j in judged) / drafts
    return out
