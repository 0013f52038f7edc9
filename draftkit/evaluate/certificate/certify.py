"""The protocol, run on one pair."""

from __future__ import annotations

from collections.abc import Callable

import torch

from draftkit.evaluate.certificate.contexts import open_contexts
from draftkit.evaluate.certificate.continuations import continuation_fit
from draftkit.evaluate.certificate.equality import coupled_equality, greedy_equalities
from draftkit.evaluate.certificate.goodness import holm, poisson_tail
from draftkit.evaluate.certificate.noise import measure_noise
from draftkit.evaluate.certificate.pair import Pair, open_pair
from draftkit.evaluate.certificate.replay import Replay
from draftkit.evaluate.certificate.result import POWER, Certificate, Fit
from draftkit.evaluate.certificate.sampler import distributions_of, sampler_fits
from draftkit.evaluate.certificate.self_draft import measure_self_draft
from draftkit.evaluate.certificate.settings import CertificateSettings
from draftkit.evaluate.provenance import environment
from draftkit.runtime.rounds import MODES
from draftkit.targets.target import Target

Progress = Callable[[str, int, int], None]  # what runs now, steps done, steps in all

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
    target: str, draft: str, settings: CertificateSettings | None = None, on_progress: Progress = lambda *_: None
) -> Certificate:
    """Whether `draft` changes what `target` says. Both are paths, Hub ids or `zoo:NAME`; drafts also `ngram`, `suffix`.

    Raises `DraftkitError` for input that cannot be used.
    """
    settings = settings or CertificateSettings()
    with open_pair(target, draft, settings) as pair:
        return certify_pair(pair, target, draft, settings, on_progress)


def certify_pair(
    pair: Pair, target: str, draft: str, settings: CertificateSettings, on_progress: Progress = lambda *_: None
) -> Certificate:
    """`certify` of a pair that is loaded; `target` and `draft` are its names."""
    steps = iter(STEPS)

    def begin() -> None:
        step = next(steps)
        on_progress(step, STEPS.index(step), len(STEPS))

    ks = sorted({min(k, pair.most_tokens) for k in settings.sweep.k})
    most, batch, samplings = ks[-1], max(settings.sweep.concurrency), settings.samplings
    verify = MODES[settings.measured.verification]
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
    distributions = distributions_of(contexts[:CONTEXTS], settings.measured.draft_sampling)
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
            verification=settings.measured.verification,
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
    on_progress("done", len(STEPS), len(STEPS))
    return Certificate(
        target=target,
        draft=draft,
        settings=settings,
        provenance=environment(str(pair.model.device), pair.model.dtype),
        exact=pair.model.dtype == torch.float32,
        noise=noise,
        replay=replay.summary(noise.floor),
        greedy=tuple(greedy),
        coupled=tuple(coupled),
        divergence_p_value=poisson_tail(len(places) + len(drawn), noise.possible(tokens)),
        fits=tuple(
            Fit(
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
