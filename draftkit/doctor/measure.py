"""Measuring a setup, and comparing two measurements prompt by prompt.

Verification is coupled: the target writes the same text whatever the draft does, so that two setups are compared on the
same tokens. At a temperature above 0 a draft token counts with the mass Σ_v min(p_v, q_v) that the two laws share,
where greedy decoding only says whether it stood: on the zoo, a quarter of the prompts show the same small difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftkit.doctor.patient import Setup
from draftkit.requests import DraftSampling
from draftkit.results.statistics import Interval
from draftkit.runtime.engine import Engine
from draftkit.runtime.records import Generation, Round

TEMPERATURE = 0.5  # the text stays close to the greedy one, and probabilities are still soft
RESAMPLES = 10_000
MAX_SLOTS = 16  # sequences decoded together; more cost memory, and save nothing on a CPU


@dataclass(frozen=True)
class Sums:
    """Of each prompt, float64 [P]: expected accepted draft tokens, and rounds."""

    accepted: Tensor
    rounds: Tensor

    @classmethod
    def of(cls, generations: Sequence[Generation]) -> Sums:
        return cls.of_rounds([g.rounds for g in generations])

    @classmethod
    def of_rounds(cls, rounds: Sequence[Sequence[Round]]) -> Sums:
        """Of the rounds of each prompt."""
        accepted = [sum(sum(r.expected[: r.accepted + 1]) for r in of_prompt) for of_prompt in rounds]
        counts = [len(of_prompt) for of_prompt in rounds]
        return cls(torch.tensor(accepted, dtype=torch.float64), torch.tensor(counts, dtype=torch.float64))

    @property
    def length(self) -> float:
        """The acceptance length; NaN without any round."""
        return float(1 + self.accepted.sum() / self.rounds.sum())

    def resampled(self, counts: Tensor) -> Tensor:
        """The lengths [R] of samples in which prompt p is `counts` [R, P] times."""
        return 1 + (counts @ self.accepted) / (counts @ self.rounds)


def run(setup: Setup, k: int, numbers: Sequence[int]) -> list[Generation]:
    """The generations of the requests with these numbers, with at most `k` draft tokens a round."""
    requests = [setup.requests[number] for number in numbers]
    most = setup.drafter.max_tokens
    engine = Engine(
        setup.target,
        setup.drafter,
        num_speculative_tokens=k if most is None else min(k, most),
        num_slots=min(MAX_SLOTS, len(requests)),
        verification="coupled",
        draft_sampling=DraftSampling("probabilistic"),
        eager=True,  # each setup runs once: capturing its graphs would cost more than it saves
    )
    return engine.generate(requests)


def gain(before: Sums, after: Sums, comparisons: int, seed: int = 0) -> Interval:
    """By how much the acceptance length grows, with an interval that holds for all of `comparisons` at 95 %.

    Prompts are resampled, the same ones on both sides (a paired bootstrap); each of the comparisons gets its share of
    the 5 % (Bonferroni), so that among many changes that do nothing, none seems to help.
    """
    counts = _counts(len(before.rounds), seed)
    differences = (after.resampled(counts) - before.resampled(counts)).nan_to_num()  # a sample without any round
    tail = 0.025 / max(comparisons, 1)
    low, high = differences.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return Interval(after.length - before.length, low, high)


def _counts(prompts: int, seed: int) -> Tensor:
    """How often each prompt is in each resample: float64 [R, P]."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(prompts, (RESAMPLES, prompts), generator=generator)
    return torch.zeros(RESAMPLES, prompts, dtype=torch.float64).scatter_add_(
        1, drawn, torch.ones_like(drawn, dtype=torch.float64)
    )
