"""The acceptance length that a draft would have in serving, from one teacher-forced pass.

Rounds begin where the last one ended, so that hard places count more often than a mean over positions would count them.
With the true tokens as prefix a chain meets exactly what it would meet in serving up to its first rejection, since a
drafter's context is rebuilt from true features after each round. So the rounds of a text follow from where chains
would have broken off: at temperature 0 from the text of the target's greedy decoding, at another from text drawn at it,
with a coin of min(1, q/p) for each emitted token. N positions, K draft tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch

from draftkit.train.batch import TrainingBatch
from draftkit.train.recipes.recipe import Chains

Mode = Literal["greedy", "sampled"]


class WalkedRound(NamedTuple):
    """A round: how many draft tokens stood, of those that still were in the text, and how many drafts were possible.

    `anchor`: the position in the batch whose state is the newest that the drafts read.
    """

    accepted: int
    drafted: int
    anchor: int


def walk(
    batch: TrainingBatch, chains: Chains, mode: Mode, generator: torch.Generator | None = None
) -> dict[int, list[WalkedRound]]:
    """The rounds of each sample, by its number.

    `sampled` draws coins from `generator`, on the CPU. A round that reaches the end of its span counts what lies
    within it.
    """
    if mode == "greedy":
        stands = chains.agree
    else:
        coins = torch.rand(chains.ratio.shape, generator=generator)
        stands = coins < chains.ratio.cpu()
    hits = (stands.cpu() & chains.drafted.cpu()).long().cumprod(0).sum(0).tolist()
    possible = chains.drafted.cpu().sum(0).tolist()
    sample_ids = batch.sample_ids[0].tolist()
    rounds: dict[int, list[WalkedRound]] = {}
    for begin, end in _spans(batch):
        anchor = begin - 1  # the position whose feature predicts the span's first token
        sample = sample_ids[begin]
        while anchor + 1 < end - 1 and anchor >= 0 and sample_ids[anchor] == sample:
            rounds.setdefault(sample, []).append(WalkedRound(hits[anchor], possible[anchor], anchor))
            anchor += hits[anchor] + 1
    return rounds


def _spans(batch: TrainingBatch) -> Iterator[tuple[int, int]]:
    """[begin, end) of the stretches of the loss mask, each within one sample."""
    sample_ids, inside = batch.sample_ids[0].tolist(), batch.loss_mask[0].tolist()
    begin = None
    for i, sample in enumerate([*sample_ids, -1]):
        within = i < len(inside) and inside[i] and sample >= 0
        if begin is not None and (not within or sample != sample_ids[begin]):
            yield begin, i
            begin = None
        if within and begin is None:
            begin = i
