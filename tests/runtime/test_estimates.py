"""What drafts say of their own tokens is kept where it is asked for, and changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fixtures.engines.drafter_cases import Case, Load, V, confident_dspark, requests, sampled, target
from torch import Tensor

from draftkit.requests import DraftSampling, Request
from draftkit.runtime.drafters.ngram import NgramDrafter
from draftkit.runtime.drafters.protocol import Committed, Drafter, Draw, Proposal
from draftkit.runtime.engine import Engine
from draftkit.runtime.records import Generation
from draftkit.targets.target import Target

torch.set_num_threads(1)
K = 3


class Heard:
    """A drafter that notes what its tokens were drawn from: in each round, probabilities [K, V] at a temperature."""

    def __init__(self, drafter: Drafter, temperature: float):
        self._drafter, self.temperature = drafter, temperature
        self.rounds: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(self, committed: Committed, k: int, draw: Draw) -> Proposal:
        steps = []

        def heard(step: int, logits: Tensor, ids: Tensor | None = None) -> Tensor:
            ids = torch.arange(V) if ids is None else ids
            full = torch.full((V,), -torch.inf).index_copy(0, ids, logits[0].float())
            steps.append((full / self.temperature).softmax(-1))
            return draw(step, logits, ids)

        proposal = self._drafter.propose(committed, k, heard)
        self.rounds.append(torch.stack(steps))
        return proposal


def generate(drafter: Drafter, wanted: tuple[Request, ...], *, slots: int, estimates: bool) -> list[Generation]:
    engine = Engine(
        Target(target(), drafter.aux_layers), drafter, num_speculative_tokens=K, num_slots=slots,
        draft_sampling=DraftSampling("probabilistic"), estimates=estimates,
    )  # fmt: skip
    return engine.generate(wanted)


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize(("drawn", "temperature"), [(False, 1.0), (True, 0.7)], ids=["chosen", "drawn"])
def test_the_probability_of_each_draft_token(case: Case, drawn: bool, temperature: float) -> None:
    """Chosen tokens as at temperature 1, drawn ones in what they were drawn from."""
    wanted = (sampled if drawn else requests)()[:1]
    heard = Heard(case.drafter, temperature)
    (generation,) = generate(heard, wanted, slots=1, estimates=True)
    assert len(heard.rounds) == len(generation.rounds) > 1
    for probabilities, r in zip(heard.rounds, generation.rounds, strict=True):
        expected = probabilities.gather(1, torch.tensor(r.proposal)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(r.probabilities), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("make", [requests, sampled])
def test_estimates_change_nothing_else(load: Load, make: Any) -> None:
    drafter = confident_dspark(load)
    with_them, without = (generate(drafter, make(), slots=3, estimates=estimates) for estimates in (True, False))
    assert [g.tokens for g in with_them] == [g.tokens for g in without]
    for kept, left in zip(with_them, without, strict=True):
        assert [(r.proposal, r.accepted, r.expected) for r in kept.rounds] == [
            (r.proposal, r.accepted, r.expected) for r in left.rounds
        ]
        assert {len(r.confidences) for r in kept.rounds} == {len(r.probabilities) for r in kept.rounds} == {K}
        assert not any(r.confidences or r.probabilities for r in left.rounds)


def test_a_look_up_says_nothing_of_its_tokens() -> None:
    generations = generate(NgramDrafter(V, min_n=1, max_n=3), requests(), slots=2, estimates=True)
    rounds = [r for g in generations for r in g.rounds]
    assert any(r.drafted for r in rounds)
    assert not any(r.confidences or r.probabilities for r in rounds)
