"""The protocol, run on one pair."""

from __future__ import annotations

from collections.abc import Callable

import torch

from draftkit.results.statistics import holm
from draftkit.runtime.rounds import MODES
from draftkit.targets.target import Target
from lossless.contexts import open_contexts
from lossless.continuations import continuation_fit
from lossless.equality import coupled_equality, greedy_equalities
from lossless.goodness import poisson_tail
from lossless.noise import measure_noise
from lossless.pair import Pair, open_pair
from lossless.replay import Replay
from lossless.result import POWER, Certificate, SampleTest
from lossless.sampler import distributions_of, sampler_fits
from lossless.self_draft import measure_self_draft
from lossless.settings import CertificateSettings

STEPS = (
    "plain decoding",
    "noise floor",
    "greedy decoding with the draft",
    "drawn tokens with shared noise",
    "distribution of the verifier",
    "distribution of continuations",
    "the target as its own draft",
)
CONTEXTS = 4  # whose distributions the verifier alone is tested on


def certify(
    target: str, draft: str, settings: CertificateSettings, on_step: Callable[[str], None] = lambda _: None
) -> Certificate:
    """Whether `draft` changes what `target` says. Both are paths, Hub ids or `zoo:NAME`; drafts also `ngram`, `suffix`.

    Raises `DraftkitError` for input that cannot be used.
    """
    with open_pair(target, draft, settings) as pair:
        return certify_pair(pair, settings, on_step)


def certify_pair(
    pair: Pair, settings: CertificateSettings, on_step: Callable[[str], None] = lambda _: None
) -> Certificate:
    """`certify` of a pair that is loaded."""
    steps = iter(STEPS)

    def begin() -> None:
        on_step(next(steps))

    ks = sorted({min(k, pair.most_tokens) for k in settings.sweep.k})
    most, batch, samplings = ks[-1], max(settings.sweep.concurrency), settings.samplings
    verify = MODES[settings.eval_settings.verification]
    begin()
    plain = pair.plain(pair.requests)
    begin()
    noise = measure_noise(Target(pair.model), plain, k=most, together=batch, quantile=settings.floor_quantile)
    replay = Replay(pair.model, noise.floor)
    begin()
    greedy = greedy_equalities(pair, plain, replay, ks, batch)
    begin()
    coupled = [coupled_equality(pair, sampling, replay, k, batch) for sampling in samplings for k in ks]
    begin()
    contexts = open_contexts(pair, max(CONTEXTS, settings.continuation_prompts), most, settings.continuations)
    distributions = distributions_of(contexts[:CONTEXTS], settings.eval_settings.draft_sampling)
    texts = settings.sampler_texts
    fits = {
        f"verifier at temperature {sampling.temperature:g}, drafts from {name}": found
        for sampling in samplings
        for name, found in sampler_fits(distributions, verify, sampling, texts).items()
    }
    begin()
    fits |= {
        f"continuations of text {number} at temperature {sampling.temperature:g}, K={k}": continuation_fit(
            pair,
            context.tokens,
            sampling,
            settings.continuations,
            k=k,
            verification=settings.eval_settings.verification,
            noise=noise,
        )
        for sampling in samplings
        for k in ks
        for number, context in enumerate(contexts[: settings.continuation_prompts], start=1)
    }
    begin()
    self_draft = measure_self_draft(pair, noise, most, batch)
    # The runs of greedy decoding meet the same ties: what diverges in several counts once.
    places = {(d.request, d.position) for equality in greedy for d in equality.divergences}
    drawn = [divergence for equality in coupled for divergence in equality.divergences]
    tokens = sum(len(generation.tokens) for generation in plain) + sum(equality.tokens for equality in coupled)
    return Certificate(
        settings=settings,
        exact=pair.model.dtype == torch.float32,
        noise=noise,
        replay=replay.summary(noise.floor),
        greedy=tuple(greedy),
        coupled=tuple(coupled),
        divergence_p_value=poisson_tail(len(places) + len(drawn), noise.possible(tokens)),
        fits=tuple(
            SampleTest(
                name,
                found.draws,
                found.p_value,
                adjusted,
                found.detectable(settings.false_alarm_rate / len(fits), POWER),
            )
            for (name, found), adjusted in zip(
                fits.items(), holm([found.p_value for found in fits.values()]), strict=True
            )
        ),
        self_draft=self_draft,
    )
