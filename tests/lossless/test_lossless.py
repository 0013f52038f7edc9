"""The certificate: clean where the engine is lossless, a bug wherever one is planted, whatever the draft is worth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from fixtures.checkpoints import pico
from fixtures.engines.sampling_statistics import processed
from fixtures.examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from draftkit.errors import DraftkitError, NonFiniteError
from draftkit.requests import DraftSampling, SamplingParameters
from draftkit.results.settings import Settings
from draftkit.results.statistics import holm
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.drafters.causal_lm import CausalLMDrafter
from draftkit.targets.target import Target
from lossless.certify import STEPS, certify, certify_pair
from lossless.contexts import Context
from lossless.exact_distribution import exact_distribution
from lossless.goodness import chi_square, detectable_rate, poisson_tail
from lossless.pair import Pair, ragged_requests
from lossless.planted import (
    OffByOneTarget,
    PoisonedOffByOneTarget,
    plant_acceptance,
    plant_cache_off_by_one,
    plant_flatter_probabilities,
    plant_one_token_residual,
    plant_rare_acceptance,
    plant_shared_noise,
    plant_uncleared_entries,
    without,
)
from lossless.replay import Replay
from lossless.result import Certificate
from lossless.settings import CertificateSettings

torch.set_num_threads(1)

SETTINGS = CertificateSettings(sampler_texts=1500, continuations=60)
SAMPLES_ONLY = CertificateSettings(sampler_texts=1200, continuations=1, continuation_prompts=1)
TOKENS_ONLY = CertificateSettings(sampler_texts=100, continuations=10, continuation_prompts=1)


def pico_pair(dtype: torch.dtype = torch.float32, noise: float = 0.01) -> Pair:
    """A pico target with two layers, and itself with other numbers added to its weights as a draft."""
    target, draft = (pico.llama(num_hidden_layers=2).to(dtype) for _ in range(2))
    torch.manual_seed(3)
    for weight in draft.parameters():
        weight += noise * torch.randn_like(weight)
    for model in (target, draft):
        model.set_attn_implementation(ATTENTION)
    prompts = [(str(n), tuple(range(3 + n, 30 - 4 * n))) for n in range(4)]
    return Pair(target, CausalLMDrafter(Target(draft)), ragged_requests(prompts, 16))


def certified(pair: Pair, settings: CertificateSettings = TOKENS_ONLY) -> Certificate:
    return certify_pair(pair, settings)


@lru_cache
def clean() -> Certificate:
    return certified(pico_pair(), SETTINGS)


@pytest.mark.slow
def test_a_lossless_engine_is_identical_in_float32() -> None:
    found = clean()
    assert (found.verdict, found.failures, found.first_bug) == ("no difference seen", (), None)
    assert found.self_draft.acceptance_length == 5
    assert found.replay.best == found.replay.tokens > 0
    assert 0 < found.noise.floor < 1e-3
    assert len(found.fits) == 8
    assert all(fit.adjusted > 0.01 for fit in found.fits)


@pytest.mark.long
def test_a_bad_draft_does_not_matter() -> None:
    assert certified(pico_pair(noise=1.0)).verdict == "no difference seen"


@pytest.mark.long
def test_bfloat16_is_no_bug() -> None:
    found = certified(pico_pair(torch.bfloat16))
    assert found.verdict in ("no difference seen", "numerics only"), found.failures
    assert found.noise.floor > 100 * clean().noise.floor


CUTS = CertificateSettings(
    Settings(
        concurrency=4, max_new_tokens=32, limit=8, sampling=SamplingParameters(0.6, top_k=12, top_p=0.9, min_p=0.02),
        draft_sampling=DraftSampling("probabilistic", temperature=1.3),
    ).sweep(k=(1, 3), temperature=(0.6, 1.0)),
    sampler_texts=300, continuations=40, continuation_prompts=1,
)  # fmt: skip


@pytest.mark.long
def test_what_is_measured_is_what_is_tested() -> None:
    """Cuts, the drafts' own temperature, every K and every temperature."""
    found = certified(replace(pico_pair(), draft_sampling=CUTS.eval_settings.draft_sampling), CUTS)
    assert found.verdict == "no difference seen", found.failures
    assert {(e.num_speculative_tokens, e.name[:20]) for e in found.coupled} == {
        (k, f"drawn at temperature {t:g}"[:20]) for k in (1, 3) for t in (0.6, 1.0)
    }
    assert {e.num_speculative_tokens for e in found.greedy if e.name in ("one at a time", "in batches")} == {1, 3}
    assert len(found.fits) == 2 * 6 + 2 * 2


@pytest.mark.slow
def test_greedy_decoding_alone_is_certified_alone() -> None:
    """Where nothing was measured above temperature 0, nothing is drawn."""
    found = certified(pico_pair(), replace(TOKENS_ONLY, sweep=TOKENS_ONLY.eval_settings.sweep(temperature=(0.0,))))
    assert found.verdict == "no difference seen"
    assert (found.coupled, found.fits) == ((), ())
    assert (found.detectable.wrong_tokens > 0, found.detectable.verifier) == (True, None)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("cut", "asked"), [("top_k", {"top_k": 5}), ("top_p", {"top_p": 0.5}), ("drop", {"min_p": 0.5})]
)
def test_a_sampler_that_forgets_a_cut_is_found(
    cut: str, asked: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    without(cut)(monkeypatch)
    usual = TOKENS_ONLY.eval_settings
    cutting = replace(usual, sampling=replace(usual.sampling, **asked))  # type: ignore[arg-type]
    found = certified(pico_pair(), replace(TOKENS_ONLY, sweep=cutting.sweep(temperature=(1.0,))))
    assert found.verdict == "bug"
    assert any("verifier" in failure for failure in found.failures)


@pytest.mark.long
def test_a_bug_below_what_can_be_seen_is_said_to_be_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_rare_acceptance(0.01)(monkeypatch)
    found = certified(pico_pair(), SAMPLES_ONLY)
    assert found.verdict == "no difference seen"
    assert found.detectable.verifier > 0.01  # which bounds what the planted bug changes in a distribution


@pytest.mark.slow
def test_a_bug_above_what_can_be_seen_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_rare_acceptance(0.6)(monkeypatch)
    assert certified(pico_pair(), SAMPLES_ONLY).verdict == "bug"


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("plant", "where"),
    [
        (plant_acceptance, "position"),
        (plant_cache_off_by_one, "position"),
        (plant_one_token_residual, "verifier"),
        (plant_shared_noise, "verifier"),
        (plant_flatter_probabilities, "verifier"),
        (plant_uncleared_entries, "position"),
    ],
)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pico_pair()
    plant(monkeypatch)
    found = certified(pair, SAMPLES_ONLY if where == "verifier" else TOKENS_ONLY)
    assert found.verdict == "bug"
    assert any(where in failure for failure in found.failures), found.failures
    if where == "position":
        assert found.first_bug is not None
        assert found.first_bug.margin > found.noise.floor


@pytest.mark.slow
def test_an_anchor_that_is_stored_too_early_is_found() -> None:
    """Its tokens lie below the best; where rejected rows hold NaN, the engine reads it."""
    pair = pico_pair(noise=0.1)
    outputs = pair.speculative(pair.requests, k=4, num_slots=4, target=OffByOneTarget, eager=True)
    assert max(float(Replay(pair.model).margins(output).max()) for output in outputs) > 2 * clean().noise.floor
    with pytest.raises(NonFiniteError):
        pair.speculative(pair.requests, k=4, num_slots=4, target=PoisonedOffByOneTarget, eager=True)


@pytest.mark.long
def test_a_bug_is_a_bug_in_bfloat16_too(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_acceptance(monkeypatch)
    found = certified(pico_pair(torch.bfloat16, noise=0.1))
    assert found.verdict == "bug"
    assert found.first_bug is not None


@pytest.mark.slow
def test_a_zoo_pair() -> None:
    seen: list[str] = []
    settings = CertificateSettings(
        Settings(num_speculative_tokens=2, concurrency=2, max_new_tokens=8, limit=2, dtype="float32").sweep(
            temperature=(1.0,)
        ),
        sampler_texts=100, continuations=20, continuation_prompts=1,
    )  # fmt: skip
    found = certify("zoo:target", "zoo:eagle3", settings, seen.append)
    assert found.verdict == "no difference seen", found.failures
    assert found.exact
    assert seen == [*STEPS]


# Statistics.


def test_chi_square_raises_few_false_alarms_and_sees_shifts() -> None:
    generator = torch.Generator().manual_seed(0)
    distribution = torch.rand(60, dtype=torch.float64, generator=generator).pow(4)
    distribution /= distribution.sum()

    def values(true_distribution: Tensor) -> Tensor:
        draws = torch.multinomial(true_distribution, 200 * 2000, replacement=True, generator=generator).view(200, -1)
        return torch.tensor([chi_square(torch.bincount(row, minlength=60), distribution).p_value for row in draws])

    alarms = values(distribution)
    assert 0.02 < float((alarms < 0.05).double().mean()) < 0.1
    assert 0.4 < float(alarms.median()) < 0.6
    shifted = distribution.clone()
    shifted[:30] *= 1.4
    assert (values(shifted) < 0.05).double().mean() > 0.95
    assert chi_square(torch.ones(2), torch.tensor([1.0, 0.0])).p_value == 0
    assert chi_square(torch.tensor([9, 0]), torch.tensor([1.0, 0.0])).p_value == 1


def test_the_stated_total_variation_is_detected_and_little_less_is_not() -> None:
    """On the difference that is hardest to see: half of the distribution's mass grows, the other half shrinks, all
    alike.
    """
    generator = torch.Generator().manual_seed(0)
    distribution = torch.full((40,), 1 / 40, dtype=torch.float64)
    stated = chi_square(torch.full((40,), 50), distribution).detectable(0.001, 0.95)

    def found(variation: float) -> float:
        other = distribution * (1 + 2 * variation * torch.tensor([1.0, -1.0]).repeat(20))
        draws = torch.multinomial(other, 400 * 2000, replacement=True, generator=generator).view(400, -1)
        p_values = [chi_square(torch.bincount(row, minlength=40), distribution).p_value for row in draws]
        return sum(p < 0.001 for p in p_values) / 400

    assert 0.91 < found(stated) < 0.99
    assert found(stated / 2) < 0.3
    assert detectable_rate(300, 0.95) == pytest.approx(1 - 0.05 ** (1 / 300))


@examples(150)
@given(
    logits=st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=20),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.integers(0, 6),
    top_p=st.floats(0.05, 1),
    min_p=st.floats(0, 0.9),
)
def test_the_distribution_is_that_of_the_definition(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    row, asked = torch.tensor(logits), SamplingParameters(temperature, top_k, top_p, min_p)
    distribution, exact = exact_distribution(row, asked), processed(row, asked)
    assert not (distribution.sure & (exact == 0)).any()
    assert not (~distribution.possible & (exact > 0)).any()
    torch.testing.assert_close(
        distribution.probs * distribution.sure / (distribution.probs * distribution.sure).sum().clamp(min=1e-300),
        exact * distribution.sure / (exact * distribution.sure).sum().clamp(min=1e-300),
    )


def test_known_tails() -> None:
    assert poisson_tail(0, 0.0) == 1
    assert poisson_tail(2, 1.0) == pytest.approx(1 - 2 / torch.e)
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


@pytest.mark.parametrize("wrong", [{"continuations": 0}, {"sampler_texts": 1}, {"floor_quantile": 2.0}])
def test_settings_that_measure_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(DraftkitError, match=next(iter(wrong))):
        CertificateSettings(**wrong)  # type: ignore[arg-type]


def test_a_text_that_anything_may_follow_is_not_the_most_open():
    """Of a hundred draws from a thousand tokens none comes up five times: nothing could be compared there."""
    anything, few = torch.zeros(1000), torch.full((1000,), -20.0)
    few[:4] = 0
    contexts = [Context((), logits, logits) for logits in (anything, few)]
    assert max(contexts, key=lambda context: context.openness(100)) is contexts[1]
    assert max(contexts, key=lambda context: context.openness(10_000)) is contexts[0]
