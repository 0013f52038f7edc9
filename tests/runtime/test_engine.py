"""The engine with sampling: a request's tokens are its own, whatever shares its batch and however it drafts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from fixtures.checkpoints.zoo_models import requests, zoo_drafter, zoo_target
from fixtures.engines.sampling_statistics import same_distribution
from torch import Tensor

from draftkit.errors import DraftkitError
from draftkit.requests import DraftSampling, Request, SamplingParameters
from draftkit.runtime.batch import SamplingTensors
from draftkit.runtime.drafters.causal_lm import CausalLMDrafter
from draftkit.runtime.emitted import Drafted, Emitted, emit
from draftkit.runtime.engine import Engine
from draftkit.runtime.records import Generation
from draftkit.runtime.rounds import MODES
from draftkit.targets.target import Target, TargetOutput

DRAFTS = ("eagle", "eagle3", "draft-model", "p-eagle", "pard", "mlp-speculator", "dflash", "dspark")
PROBABILISTIC, GREEDY = DraftSampling(mode="probabilistic"), DraftSampling(mode="greedy")


@lru_cache
def sampled(temperature: float, **cuts: Any) -> tuple[Request, ...]:
    return tuple(
        Request(r.id, r.prompt, r.max_new_tokens, SamplingParameters(temperature=temperature, seed=7 + i, **cuts))
        for i, r in enumerate(requests()[:5])
    )


def run(
    wanted: tuple[Request, ...], name: str | None, k: int = 4, num_slots: int = 3, **options: Any
) -> list[Generation]:
    drafter = zoo_drafter(name) if name else None
    target = Target(zoo_target(), drafter.aux_layers if drafter else None)
    engine = Engine(target, drafter, num_speculative_tokens=k if name else 0, num_slots=num_slots, **options)
    return engine.generate(wanted)


def tokens(generations: list[Generation]) -> list[list[int]]:
    return [generation.tokens for generation in generations]


@lru_cache
def plain(temperature: float) -> list[list[int]]:
    return tokens(run(sampled(temperature), None, verification="coupled"))


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTS)
def test_coupled_verification_gives_the_tokens_of_plain_decoding(name: str) -> None:
    most = zoo_drafter(name).max_tokens or 7
    for k, num_slots, temperature in ((1, 3, 0.7), (most, 5, 1.0)):
        generations = run(
            sampled(temperature), name, k, num_slots, verification="coupled", draft_sampling=PROBABILISTIC
        )
        assert tokens(generations) == plain(temperature)
        assert any(r.accepted for g in generations for r in g.rounds)


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["rejection", "block", "coupled"])
def test_a_request_does_not_depend_on_its_batch(mode: str) -> None:
    wanted = sampled(1.0, top_p=0.9)
    together = run(wanted, "eagle", num_slots=5, verification=mode, draft_sampling=PROBABILISTIC)
    torch.manual_seed(123)  # nor on the global generator
    alone = [
        run((request,), "eagle", num_slots=1, verification=mode, draft_sampling=PROBABILISTIC)[0] for request in wanted
    ]
    assert tokens(together) == tokens(alone)


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    run(sampled(1.0), "eagle", draft_sampling=PROBABILISTIC)
    assert torch.equal(torch.get_rng_state(), before)


def test_another_seed_gives_other_tokens() -> None:
    request = sampled(1.0)[0]
    other = Request(request.id, request.prompt, request.max_new_tokens, SamplingParameters(temperature=1.0, seed=99))
    assert run((request,), "eagle")[0].tokens != run((other,), "eagle")[0].tokens


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["rejection", "block", "coupled"])
def test_mixed_batches_keep_greedy_requests_greedy(mode: str) -> None:
    greedy, hot = requests()[0], sampled(1.0)[1]
    mixed = run((greedy, hot), "eagle", verification=mode)
    assert mixed[0].tokens == run((greedy,), None)[0].tokens
    assert mixed[1].tokens == run((hot,), "eagle", verification=mode)[0].tokens


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["rejection", "block"])
@pytest.mark.parametrize(
    "draft_sampling", [PROBABILISTIC, DraftSampling(mode="greedy")], ids=["probabilistic", "greedy"]
)
@pytest.mark.parametrize("name", ["eagle", pytest.param("dspark", marks=pytest.mark.long)])
def test_measured_acceptance_agrees_with_its_expectation(name: str, mode: str, draft_sampling: DraftSampling) -> None:
    """The number of accepted drafts and the sum of their probabilities differ by a martingale: within 4 deviations."""
    wanted = tuple(
        Request(f"{r.id}-{seed}", r.prompt, 40, SamplingParameters(temperature=1.0, seed=seed), ignore_eos=True)
        for r in requests()[:4]
        for seed in range(12)
    )
    generations = run(wanted, name, num_slots=48, verification=mode, draft_sampling=draft_sampling)
    rounds = [r for g in generations for r in g.rounds]
    for position in range(4):
        reached = [r for r in rounds if r.accepted >= position]
        accepted = sum(r.accepted > position for r in reached)
        expected = sum(r.expected[position] for r in reached)
        variance = sum(r.expected[position] * (1 - r.expected[position]) for r in reached)
        assert abs(accepted - expected) <= 4 * variance**0.5 + 1e-6, (position, accepted, expected)
        assert accepted


SAMPLE = 1000  # texts
NO_ALARM, NOTICED = 1e-4, 1e-12  # p-values that pass, and that a lossy mode must stay below


@lru_cache
def first_three_tokens(name: str | None, first_seed: int, **options: Any) -> Counter[tuple[int, ...]]:
    """How often each text follows a prompt. A `top_k` of 3 leaves 27, all of them frequent."""
    prompt = requests()[6].prompt[:11]  # after which much is possible
    wanted = tuple(
        Request(str(seed), prompt, 3, SamplingParameters(temperature=2.0, top_k=3, seed=seed), ignore_eos=True)
        for seed in range(first_seed, first_seed + SAMPLE)
    )
    generations = run(wanted, name, k=2, num_slots=125, draft_sampling=PROBABILISTIC, **options)
    return Counter(tuple(generation.tokens) for generation in generations)


def p_value(drafted: Counter[tuple[int, ...]]) -> float:
    """That these texts have the distribution of plain decoding."""
    plainly = first_three_tokens(None, 0)
    texts = sorted(plainly | drafted)
    return same_distribution(*(torch.tensor([counts[text] for text in texts]) for counts in (plainly, drafted)))


@pytest.mark.long
@pytest.mark.parametrize(("name", "mode"), [("eagle3", "rejection"), ("draft-model", "block"), ("dspark", "rejection")])
def test_the_first_three_tokens_have_the_distribution_of_plain_decoding(name: str, mode: str) -> None:
    assert p_value(first_three_tokens(name, SAMPLE, verification=mode)) > NO_ALARM


@pytest.mark.long
def test_another_distribution_of_the_first_three_tokens_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def accept_all(drafted: Drafted, logits: Tensor, parameters: SamplingTensors, start: Tensor) -> Emitted:
        return emit(drafted, drafted.lengths, logits[:, -1].argmax(-1), drafted.valid.float())  # a fourth token

    monkeypatch.setitem(MODES, "trusting", accept_all)
    assert p_value(first_three_tokens("eagle3", SAMPLE, verification="trusting")) < NOTICED


def test_expected_acceptance_of_a_greedy_run_is_what_happened() -> None:
    for generation in run(requests()[:3], "eagle"):
        for r in generation.rounds:
            assert r.expected[: r.accepted] == (1.0,) * r.accepted
            assert r.accepted == r.drafted or r.expected[r.accepted] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [{1: 4, 2: 2}, {2: 1}, {0: 4}], ids=str)
def test_k_follows_the_batch_and_changes_no_token(schedule: dict[int, int]) -> None:
    """Beyond the last entry nothing is drafted, and drafting starts again, in step, when the batch has shrunk."""
    generations = run(requests()[:5], "eagle", num_slots=4, k_by_batch=schedule)
    assert tokens(generations) == tokens(run(requests()[:5], None, num_slots=4))
    drafted = {r.drafted for g in generations for r in g.rounds}
    assert drafted <= {0, *schedule.values()}
    assert 0 in drafted
    alone = run(requests()[:1], "eagle", num_slots=1)
    resumed = run(requests()[:1], "eagle", num_slots=1, k_by_batch={1: 4})
    assert [r.accepted for r in alone[0].rounds] == [r.accepted for r in resumed[0].rounds]


@pytest.mark.slow
def test_the_prompt_may_come_in_chunks() -> None:
    whole, pieces = (run(requests()[:4], "eagle3", prefill_chunk=size) for size in (2048, 7))
    assert tokens(whole) == tokens(pieces)
    assert [g.rounds for g in whole] == [g.rounds for g in pieces]


class Counting(Target):
    """Notes the rows of each forward, and whether they were prompts'."""

    def forward(self, tokens: Tensor, *others: Any, last_only: bool = False, **named: Any) -> TargetOutput:
        self.seen = [*getattr(self, "seen", []), (last_only, tokens.numel())]
        return super().forward(tokens, *others, last_only=last_only, **named)


def test_prompts_share_a_forward() -> None:
    asked = requests()[:4]
    target = Counting(zoo_target())
    Engine(target, None, num_speculative_tokens=0, num_slots=4).generate(asked)
    assert [rows for prompts, rows in target.seen if prompts] == [sum(len(request.prompt) for request in asked)]


def test_prompts_share_a_forward_of_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, drafter = requests()[:4], zoo_drafter("draft-model")
    assert isinstance(drafter, CausalLMDrafter)
    model = Counting(drafter.model.model)
    monkeypatch.setattr(drafter, "model", model)
    Engine(Target(zoo_target()), drafter, num_speculative_tokens=2, num_slots=4).generate(asked)
    assert [rows for prompts, rows in model.seen if prompts] == [sum(len(request.prompt) for request in asked)]


def test_a_long_prompt_does_not_stop_the_others() -> None:
    """They have a round after each of its pieces."""
    first, second = (replace(request, max_new_tokens=32, ignore_eos=True) for request in requests()[:2])
    target = Counting(zoo_target())
    Engine(target, None, num_speculative_tokens=0, num_slots=2, prefill_chunk=len(first.prompt)).generate(
        [first, replace(second, prompt=first.prompt * 3)]
    )
    kinds = [prompts for prompts, _ in target.seen]
    assert kinds[:7] == [True, False] * 3 + [True]


def test_stop_tokens_end_a_generation() -> None:
    request = requests()[1]
    full = run((request,), "eagle")[0].tokens
    stop = full[9]
    stopping = Request(request.id, request.prompt, request.max_new_tokens, stop_token_ids=frozenset([stop]))
    generation = run((stopping,), "eagle")[0]
    assert generation.tokens == full[: full.index(stop) + 1]
    assert generation.finished == "stop"


def test_times_are_recorded_for_every_chunk() -> None:
    generation = run(requests()[:1], "eagle")[0]
    assert len(generation.times) == 1 + len(generation.rounds)
    assert generation.started < generation.times[0]
    assert generation.ttft > 0
    assert generation.tpot is not None
    assert sum(generation.itl) == pytest.approx(generation.tpot * (len(generation.tokens) - 1))


def test_a_stream_gives_what_is_asked_on_the_way() -> None:
    """Each generation once it is finished; what a longer one asks for, when there is room for it."""
    wanted = [replace(request, max_new_tokens=3 + 3 * i) for i, request in enumerate(sampled(1.0))]
    later = replace(wanted[1], id="later", max_new_tokens=24)
    left, found = list(wanted), {}
    engine = Engine(Target(zoo_target()), None, num_speculative_tokens=0, num_slots=2)
    for generation in engine.stream(lambda: left.pop(0) if left else None):
        found[generation.request.id] = generation.tokens
        if generation.request.id == wanted[0].id:
            left.append(later)
    asked = (*wanted, later)
    assert [found[request.id] for request in asked] == tokens(run(asked, None))


BAD: dict[str, dict[str, Any]] = {
    "a larger K by batch": {"k_by_batch": {4: 5}},
}


@pytest.mark.parametrize("name", BAD)
def test_options_that_contradict_each_other_are_refused(name: str) -> None:
    with pytest.raises(DraftkitError):
        run(requests()[:1], "eagle", **BAD[name])
