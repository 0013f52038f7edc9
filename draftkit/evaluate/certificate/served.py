"""Is an engine lossless that is only seen from outside? Its answers with the draft beside its answers without.

At temperature 0 they are the same, or leave each other at a near-tie: two tokens whose log-probabilities differ by no
more than log-probabilities of one token in one context do between the two. Above, both are samples: the tokens at each
place of the answers, the first of which no draft has touched, and how likely whole answers are, are held against each
other. Sampling is as the user measures it, cuts among it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Literal

from draftkit.engines.records import Answer, Token
from draftkit.errors import DraftkitError
from draftkit.evaluate.certificate.goodness import NOTHING, ChiSquare, detectable_rate, holm
from draftkit.evaluate.certificate.result import POWER, Fit
from draftkit.evaluate.certificate.two_samples import RankTest, homogeneity, rank_test
from draftkit.evaluate.measure import Lane
from draftkit.io.jsonfile import finite
from draftkit.requests import Request, SamplingParameters
from draftkit.results.settings import Settings, Sweep

ServedVerdict = Literal["no difference seen", "numerics only", "unclear", "bug"]

PROMPTS, TOKENS = 32, 64  # that are asked greedily, at most
ALTERNATIVES = 5  # log-probabilities that are asked for beside each token's own
QUANTILE, SAFETY = 0.999, 2.0  # of how far log-probabilities move: the floor is twice what nearly all stay below
LEAST, MOST = 1e-4, 0.5  # nats that rounding moves them by, at least and at most: what moves them more is a bug
FALSE_ALARMS = 1e-3  # of all tests together, for a lossless engine
APART = 1_000_000  # seeds between the two samples, which are to share no noise


@dataclass(frozen=True)
class ServedDivergence:
    """Where an answer with the draft leaves the one without: `position` counts its tokens from 0.

    `logprobs`: of the token with the draft and of the one without, as the engine without the draft has them there; of a
    token that is not among its likeliest, that of the last of these. `margin`: how far they are apart; None where the
    engine does not say, ∞ where one answer just ends.
    """

    request: str
    position: int
    tokens: tuple[Token | None, Token | None]
    logprobs: tuple[float, float] | None
    margin: float | None


@dataclass(frozen=True)
class ServedCertificate:
    """What was seen of an engine from outside. `floor`: nats that are a near-tie; None where log-probabilities lack."""

    target: str
    draft: str
    engine: str
    version: str | None
    requests: int
    tokens: int
    floor: float | None
    moved: float | None
    divergences: tuple[ServedDivergence, ...]
    tests: tuple[Fit, ...]
    samplings: tuple[SamplingParameters, ...]
    concurrency: int

    @property
    def verdict(self) -> ServedVerdict:
        if self.failures:
            return "bug"
        if any(divergence.margin is None for divergence in self.divergences):
            return "unclear"
        return "numerics only" if self.divergences else "no difference seen"

    @property
    def first_bug(self) -> ServedDivergence | None:
        """The first answer that differs beyond a near-tie."""
        floor = MOST if self.floor is None else self.floor
        return next((d for d in self.divergences if d.margin is not None and d.margin > floor), None)

    @property
    def failures(self) -> tuple[str, ...]:
        """What no lossless engine does."""
        found = []
        if self.moved is not None and self.moved > MOST:
            found.append(
                f"log-probabilities of the same tokens differ by {self.moved:.2g}: more than rounding explains"
            )
        if self.first_bug is not None:
            found.append(f"request {self.first_bug.request}, position {self.first_bug.position}: no near-tie")
        found += [f"{test.name}: p = {test.adjusted:.2g}" for test in self.tests if test.adjusted < FALSE_ALARMS]
        return tuple(found)

    @property
    def detectable_rate(self) -> float:
        """The smallest share of greedy tokens that are wrong which would have been seen with 95 %."""
        return detectable_rate(self.tokens, POWER)

    def to_dict(self) -> dict[str, object]:
        """Plain data."""
        found = {"schema": 1, "verdict": self.verdict, "failures": list(self.failures), **asdict(self)}
        found["detectable"] = {"wrong_tokens": self.detectable_rate} | {t.name: t.detectable for t in self.tests}
        return {key: finite(value) for key, value in found.items()}


def certified_settings(sweep: Sweep) -> Settings:
    """How the requests of a certificate are run: the most draft tokens and the most requests together of a sweep."""
    first = sweep.first
    return replace(
        first.at(num_speculative_tokens=max(sweep.k), concurrency=max(sweep.concurrency)),
        max_new_tokens=min(first.max_new_tokens, TOKENS),
        limit=min(first.limit or PROMPTS, PROMPTS),
    )


def certified_samplings(sweep: Sweep) -> list[SamplingParameters]:
    """How tokens are drawn that a certificate compares: as they were measured, above temperature 0."""
    return [replace(sweep.first.sampling, temperature=hot) for hot in sweep.temperature if hot > 0]


def certify_served(
    plain: Lane,
    drafting: Lane,
    requests: Sequence[Request],
    samplings: Sequence[SamplingParameters],
    *,
    names: tuple[str, str, str],
    concurrency: int,
    samples: int = 250,
    sampled_prompts: int = 2,
    sampled_tokens: int = 6,
) -> ServedCertificate:
    """Whether what `drafting` answers is what `plain` does.

    `requests` are asked at temperature 0; the first `sampled_prompts` of them also `samples` times at each of
    `samplings`, for so many tokens. `names`: of target, draft and engine. Raises `DraftkitError` for an engine that
    names no tokens.
    """
    greedy = [replace(r, sampling=SamplingParameters(), alternatives=ALTERNATIVES) for r in requests]
    without, run = plain(greedy), drafting(greedy)
    if not all(answer.tokens for answer in (*without.answers, *run.answers)):
        raise DraftkitError(
            f"{names[2]} names no tokens, neither by id nor with log-probabilities",
            hint="an engine that names its tokens can be certified",
        )
    pairs = list(zip(greedy, run.answers, without.answers, strict=True))
    moved = _moved([(answer, other) for _, answer, other in pairs])
    found = [_divergence(*pair) for pair in pairs]
    tests: dict[str, ChiSquare | RankTest] = {}
    for sampling in samplings:
        drawn = [
            replace(
                request,
                id=f"{request.id}/{number}",
                max_new_tokens=sampled_tokens,
                sampling=sampling.numbered(number),
                ignore_eos=True,
                alternatives=1,
            )
            for request in requests[:sampled_prompts]
            for number in range(samples)
        ]
        apart = [replace(r, sampling=r.sampling.numbered(APART)) for r in drawn]
        answers = drafting(drawn).answers, plain(apart).answers
        drafted, beside = (_by_prompt(of_one, samples) for of_one in answers)
        tests |= _tests(sampling.temperature, drafted, beside, sampled_tokens)
    adjusted = holm([test.p_value for test in tests.values()])
    return ServedCertificate(
        target=names[0],
        draft=names[1],
        engine=names[2],
        version=run.version,
        requests=len(requests),
        tokens=sum(len(answer.tokens) for answer in run.answers),
        floor=None if moved is None else min(max(SAFETY * moved, LEAST), MOST),
        moved=moved,
        divergences=tuple(divergence for divergence in found if divergence is not None),
        tests=tuple(
            Fit(name, test.draws, test.p_value, p, test.detectable(FALSE_ALARMS / len(tests), POWER))
            for (name, test), p in zip(tests.items(), adjusted, strict=True)
        ),
        samplings=tuple(samplings),
        concurrency=concurrency,
    )


def _moved(pairs: Sequence[tuple[Answer, Answer]]) -> float | None:
    """How far nearly all log-probabilities move between the two, in the same context; None without any."""
    shifts = sorted(
        abs(one - other)
        for answer, beside in pairs
        for one, other in zip((answer.logprobs or ())[: _common(answer, beside)], (beside.logprobs or ()), strict=False)
    )
    return shifts[min(int(QUANTILE * len(shifts)), len(shifts) - 1)] if shifts else None


def _common(one: Answer, other: Answer) -> int:
    """How many tokens both begin with."""
    both = zip(one.tokens, other.tokens, strict=False)
    return next((at for at, (a, b) in enumerate(both) if a != b), min(len(one.tokens), len(other.tokens)))


def _divergence(request: Request, answer: Answer, plain: Answer) -> ServedDivergence | None:
    if answer.tokens == plain.tokens:
        return None
    at = _common(answer, plain)
    mine, other = (a.tokens[at] if at < len(a.tokens) else None for a in (answer, plain))
    if mine is None or other is None:
        return ServedDivergence(request.id, at, (mine, other), None, inf)
    likely = plain.alternatives[at] if plain.alternatives and at < len(plain.alternatives) else None
    if not likely:
        return ServedDivergence(request.id, at, (mine, other), None, None)
    last = min(likely.values())
    logprobs = likely.get(mine, last), likely.get(other, last)
    return ServedDivergence(request.id, at, (mine, other), logprobs, abs(logprobs[0] - logprobs[1]))


def _tests(
    temperature: float, drafted: Sequence[Sequence[Answer]], plain: Sequence[Sequence[Answer]], tokens: int
) -> dict[str, ChiSquare | RankTest]:
    """The tests of answers to each prompt, those to all prompts together, by name."""
    pairs = list(zip(drafted, plain, strict=True))
    found: dict[str, ChiSquare | RankTest] = {}
    for at in range(tokens):
        places = (homogeneity(*([_token_at(a, at) for a in answers] for answers in pair)) for pair in pairs)
        found[f"token {at + 1} at temperature {temperature:g}"] = sum(places, NOTHING)
    likely = (
        rank_test(*([sum(a.logprobs) for a in answers if a.logprobs is not None] for answers in pair)) for pair in pairs
    )
    found[f"how likely answers are at temperature {temperature:g}"] = sum(likely, RankTest())
    return found


def _token_at(answer: Answer, at: int) -> Token | None:
    """None after the end."""
    return answer.tokens[at] if at < len(answer.tokens) else None


def _by_prompt(answers: Sequence[Answer], samples: int) -> list[Sequence[Answer]]:
    return [answers[begin : begin + samples] for begin in range(0, len(answers), samples)]
