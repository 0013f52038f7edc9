"""The protocol, run on one pair."""

from __future__ import annotations

from collections.abc import Callable

import torch

from draftkit.evaluate.certificate.contexts import open_contexts
from draftkit.evaluate.certificate.continuations import continuation_p_value
from draftkit.evaluate.certificate.controls import cache_controls, sampler_controls
from draftkit.evaluate.certificate.equality import coupled_equality, greedy_equalities
from draftkit.evaluate.certificate.goodness import holm, poisson_tail
from draftkit.evaluate.certificate.noise import measure_noise
from draftkit.evaluate.certificate.pair import Pair, open_pair
from draftkit.evaluate.certificate.replay import Replay
from draftkit.evaluate.certificate.result import Certificate, Fit
from draftkit.evaluate.certificate.sampler import laws_of, sampler_p_values
from draftkit.evaluate.certificate.self_draft import measure_self_draft
from draftkit.evaluate.certificate.settings import CertificateSettings
from draftkit.evaluate.provenance import environment
from draftkit.models.target import Target
from draftkit.runtime.modes import MODES

Progress = Callable[[str, int, int], None]  # what runs now, steps done, steps in all

STEPS = (
    "plain decoding",
    "noise floor",
    "greedy decoding with the draft",
    "drawn tokens with shared noise",
    "law of the verifier",
    "law of continuations",
    "planted bugs",
    "the target as its own draft",
)
CONTEXTS = 4  # whose laws the verifier alone is tested on


def certify(
    target: str, draft: str, settings: CertificateSettings | None = None, on_progress: Progress = lambda *_: None
) -> Certificate:
    """Whether `draft` changes what `target` says. Both are paths, Hub ids or `zoo:NAME`, the draft also `ngram`.

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

    k, batch, sampling = min(settings.num_speculative_tokens, pair.most_tokens), settings.concurrency, settings.sampling
    verify = MODES[settings.verification]
    replay = Replay(pair.model)
    begin()
    plain = pair.plain(pair.requests)
    begin()
    noise = measure_noise(Target(pair.model), plain, k=k, together=batch, quantile=settings.floor_quantile)
    begin()
    greedy = greedy_equalities(pair, plain, replay, k, batch)
    begin()
    coupled = coupled_equality(pair, sampling, replay, k, batch)
    begin()
    contexts = open_contexts(pair, max(CONTEXTS, settings.continuation_prompts), k)
    laws = laws_of(contexts[:CONTEXTS])
    texts = settings.sampler_texts
    fits = {
        (f"verifier, drafts from {name}", texts * min(len(contexts), CONTEXTS)): p_value
        for name, p_value in sampler_p_values(laws, verify, sampling, texts).items()
    }
    begin()
    for number, context in enumerate(contexts[: settings.continuation_prompts], start=1):
        fits[f"continuations of text {number}", settings.continuations] = continuation_p_value(
            pair,
            context.tokens,
            sampling,
            settings.continuations,
            k=k,
            verification=settings.verification,
            shift=noise.typical,
        )
    begin()
    controls = [
        *sampler_controls(laws, verify, sampling, texts, settings.false_alarm_rate),
        *cache_controls(pair, noise.floor, k, batch),
    ]
    begin()
    self_draft = measure_self_draft(pair, noise, k, batch)
    # The runs of greedy decoding meet the same ties: what diverges in several counts once.
    places = {(d.request, d.position) for equality in greedy for d in equality.divergences}
    tokens = sum(len(generation.tokens) for generation in plain) + coupled.tokens
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
        coupled=coupled,
        divergence_p_value=poisson_tail(len(places) + len(coupled.divergences), noise.possible(tokens)),
        fits=tuple(
            Fit(name, samples, p_value, adjusted)
            for ((name, samples), p_value), adjusted in zip(fits.items(), holm(list(fits.values())), strict=True)
        ),
        controls=tuple(controls),
        self_draft=self_draft,
    )
