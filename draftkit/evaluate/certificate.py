"""Whether an engine is lossless: its answers with a draft beside its answers without.

At temperature 0 they are the same, or leave each other at a near-tie: two tokens whose log-probabilities differ by no
more than rounding moves them. Above, both are samples: the tokens at each place of the answers, the first of which no
draft has touched, and how likely whole answers are, are held against each other. Sampling is as the user measures it,
cuts among it. An engine that is only compared with itself hides a bug that it has with and without a draft: where
another program answers the same requests, the answers without a draft are held against its own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Literal

from draftkit.engines.records import Answer, Token
from draftkit.errors import DraftkitError
from draftkit.evaluate.engine import BaseEngine, able
from draftkit.evaluate.job import Job
from draftkit.evaluate.measure import Lane, PromptProgress, ReferenceAnswers, Run
from draftkit.evaluate.two_samples import NOTHING, ChiSquare, RankTest, detectable_rate, homogeneity, rank_test
from draftkit.io.jsonfile import finite
from draftkit.requests import Request, SamplingParameters
from draftkit.results.settings import Settings, Sweep
from draftkit.results.statistics import holm

_log = logging.getLogger(__name__)

PROMPTS, TOKENS, TOGETHER = 32, 64, 2  # that are asked greedily: at most, at most, at least
SAMPLES = 250  # of a prompt, at each temperature above 0
ALTERNATIVES = 5  # log-probabilities that are asked for beside each token's own
QUANTILE, SAFETY = 0.999, 2.0  # of how far log-probabilities move: the floor is twice what nearly all stay below
LEAST, MOST = 1e-4, 0.5  # nats that rounding moves them by, at least and at most: what moves them more is a bug
FALSE_ALARMS = 1e-3  # of all tests together, for a lossless engine
POWER = 0.95  # of what is stated as the smallest defect that would have been seen
APART = 1_000_000  # seeds between the two samples, which are to share no noise


@dataclass(frozen=True)
class TokenDifference:
    """Where an answer leaves the one that it should be: `position` counts its tokens from 0.

    `tokens`: its own there, and the other's, None where it has ended. `logprobs`: of both, as the engine without a
    draft has them; of a token that is not among its likeliest, that of the last of these. `margin`: how far they are
    apart; None where the engine does not say, ∞ where one answer just ends.
    """

    request: str
    position: int
    tokens: tuple[Token | None, Token | None]
    logprobs: tuple[float, float] | None
    margin: float | None


@dataclass(frozen=True)
class SampleTest:
    """A test that what was drawn has the distribution that it should have.

    `samples` were compared; `adjusted`: the p-value, given how many tests there are; `detectable`: the difference
    from which on the test fails with 95 %. Of tokens that is the total variation between the distributions; of how
    likely whole answers are, how far the chance that one is likelier than another lies from a half.
    """

    name: str
    samples: int
    p_value: float
    adjusted: float
    detectable: float


@dataclass(frozen=True)
class ReferenceCheck:
    """The answers without a draft beside those of another program: `requests` were compared. `moved`: how far their
    log-probabilities lie apart, in nats; rounding moves them by `most`."""

    name: str
    requests: int
    divergences: tuple[TokenDifference, ...]
    moved: float
    most: float


@dataclass(frozen=True)
class Certificate:
    """What was seen of an engine. `floor`: nats that are a near-tie, None where log-probabilities lack; `moved`: how
    far these move, where the floor is taken from it."""

    target: str
    draft: str
    engine: str
    version: str | None
    requests: int
    tokens: int
    floor: float | None
    moved: float | None
    divergences: tuple[TokenDifference, ...]
    tests: tuple[SampleTest, ...]
    samplings: tuple[SamplingParameters, ...]
    concurrency: int
    reference: ReferenceCheck | None = None

    @property
    def verdict(self) -> Literal["no difference seen", "numerics only", "unclear", "bug"]:
        if self.failures:
            return "bug"
        if any(divergence.margin is None for divergence in self.divergences):
            return "unclear"
        beside = () if self.reference is None else self.reference.divergences
        return "numerics only" if self.divergences or beside else "no difference seen"

    @property
    def first_bug(self) -> TokenDifference | None:
        """The first answer that differs beyond a near-tie."""
        return self._first_beyond(self.divergences)

    def _first_beyond(self, divergences: Sequence[TokenDifference]) -> TokenDifference | None:
        floor = MOST if self.floor is None else self.floor
        return next((d for d in divergences if d.margin is not None and not d.margin <= floor), None)

    @property
    def failures(self) -> tuple[str, ...]:
        """Everything that was seen and that no lossless engine does, one sentence each."""
        found = []
        if self.moved is not None and self.moved > MOST:
            found.append(
                f"log-probabilities of the same tokens differ by {self.moved:.2g}: more than rounding explains"
            )
        if self.first_bug is not None:
            found.append(f"request {self.first_bug.request}, position {self.first_bug.position}: no near-tie")
        if (beside := self.reference) is not None:
            if not beside.moved <= beside.most:
                found.append(
                    f"without a draft, log-probabilities lie {beside.moved:.2g} from those of {beside.name}: rounding "
                    f"explains {beside.most:.2g}"
                )
            if (other := self._first_beyond(beside.divergences)) is not None:
                where = f"request {other.request}, position {other.position}"
                found.append(f"without a draft, {where}: not as {beside.name}")
        found += [f"{test.name}: p = {test.adjusted:.2g}" for test in self.tests if test.adjusted < FALSE_ALARMS]
        return tuple(found)

    @property
    def detectable_rate(self) -> float:
        """The smallest share of greedy tokens that are wrong which would have been seen with 95 %."""
        return detectable_rate(self.tokens, POWER)

    def to_dict(self) -> dict[str, object]:
        """The certificate as JSON values."""
        found = {"schema": 1, "verdict": self.verdict, "failures": list(self.failures), **asdict(self)}
        found["detectable"] = {"wrong_tokens": self.detectable_rate} | {t.name: t.detectable for t in self.tests}
        return {key: finite(value) for key, value in found.items()}


@dataclass(frozen=True)
class CertificateRequests:
    """The requests of a certificate, the same with a draft and without: `greedy` ones, and `drawn` ones by temperature,
    those of a prompt, `samples`, one after the other."""

    greedy: tuple[Request, ...]
    drawn: dict[float, tuple[Request, ...]]
    samples: int
    sampled_tokens: int

    @classmethod
    def of(
        cls,
        requests: Sequence[Request],
        samplings: Sequence[SamplingParameters],
        *,
        samples: int = SAMPLES,
        sampled_prompts: int = 2,
        sampled_tokens: int = 6,
    ) -> CertificateRequests:
        """`requests` at temperature 0; the first `sampled_prompts` of them also `samples` times at each of `samplings`,
        for so many tokens."""
        drawn = {
            sampling.temperature: tuple(
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
            )
            for sampling in samplings
        }
        greedy = tuple(replace(r, sampling=SamplingParameters(), alternatives=ALTERNATIVES) for r in requests)
        return cls(greedy, drawn, samples, sampled_tokens)

    def answers(self, lane: Lane, apart: int = 0) -> CertificateAnswers:
        """The answers of a lane to all requests; `apart`: by how much the seeds of drawn requests are moved."""
        return CertificateAnswers(
            lane(self.greedy),
            {
                temperature: lane([replace(r, sampling=r.sampling.numbered(apart)) for r in requests]).answers
                for temperature, requests in self.drawn.items()
            },
        )


@dataclass(frozen=True)
class CertificateAnswers:
    """The answers of one lane to all requests of a certificate."""

    greedy: Run
    drawn: dict[float, tuple[Answer, ...]]


def certify_draft(
    target: str | None,
    drafts: str | Sequence[str],
    asked: Settings | Sweep | None = None,
    on_progress: PromptProgress = lambda *_: None,
    *,
    engines: Sequence[BaseEngine],
    samples: int = SAMPLES,
) -> list[Certificate]:
    """Whether engines answer with each draft as without: at temperature 0, and as the user draws at every temperature
    above, at the most draft tokens of a sweep and with as many requests together as it has at most.

    `target` and `drafts` as of `evaluate_draft`; `samples` are drawn of a prompt at a temperature. Where one of several
    engines does not run the pair, the others do. Raises `DraftkitError`.
    """
    drafts = [drafts] if isinstance(drafts, str) else drafts
    sweep = Sweep.of(asked or Settings())
    sweep.require_certifiable()
    # Above temperature 0 drafts may be drawn, which an engine has to be told when it starts.
    settings = certified_settings(sweep).at(temperature=max(sweep.temperature))
    with ExitStack() as stack:
        job = Job(target, drafts, Sweep.of(settings), stack)
        running = able(engines, lambda engine: engine.check(job), _log.warning)
        for engine in running:
            if (why := engine.without_plain) is not None:
                raise DraftkitError(f"a certificate compares answers with a draft and without one, and {why}")
        running = able(running, lambda engine: engine.open(on_progress), _log.warning)
        samplings = [replace(sweep.first.sampling, temperature=hot) for hot in sweep.temperature if hot > 0]
        wanted = CertificateRequests.of(job.conversations(settings).first_requests, samplings, samples=samples)
        return [one for engine in running for one in _certificates(engine, wanted, job, settings, samplings)]


def certified_settings(sweep: Sweep) -> Settings:
    """How the requests of a certificate are run: the most draft tokens and the most requests together of a sweep, and
    no request alone."""
    first = sweep.first
    return replace(
        first.at(num_speculative_tokens=max(sweep.k), concurrency=max(*sweep.concurrency, TOGETHER)),
        max_new_tokens=min(first.max_new_tokens, TOKENS),
        limit=min(first.limit or PROMPTS, PROMPTS),
    )


def _certificates(
    engine: BaseEngine,
    wanted: CertificateRequests,
    job: Job,
    settings: Settings,
    samplings: Sequence[SamplingParameters],
) -> list[Certificate]:
    """Certify each draft of an engine that is open. No two lanes run at a time."""
    conversations = job.conversations(settings)
    total = sum(map(len, (wanted.greedy, *wanted.drawn.values())))

    def answers(source: str | None, apart: int = 0) -> CertificateAnswers:
        name = f"certificate, {source or 'no draft'}"
        before = 0

        def report(done: int, length: float) -> None:
            engine.on_progress(name, before + done, total, length)

        with engine.lane(source, conversations, report) as lane:

            def counting(requests: Sequence[Request]) -> Run:
                nonlocal before
                run = lane(requests)
                before += len(requests)
                return run

            return wanted.answers(counting, apart)

    plain = answers(None, APART)
    reference = engine.reference(plain.greedy, conversations)
    return [
        compared(
            wanted,
            plain,
            answers(source),
            names=(engine.heading(source, settings).target, source, engine.name),
            samplings=samplings,
            concurrency=settings.concurrency,
            reference=reference,
        )
        for source in engine.sources
    ]


def compared(
    wanted: CertificateRequests,
    plain: CertificateAnswers,
    drafting: CertificateAnswers,
    *,
    names: tuple[str, str, str],
    samplings: Sequence[SamplingParameters],
    concurrency: int,
    reference: ReferenceAnswers | None = None,
) -> Certificate:
    """The certificate that follows from the answers with a draft and without one. `names`: of target, draft and engine.

    Raises `DraftkitError` for an engine that names no tokens.
    """
    without, run = plain.greedy, drafting.greedy
    if not all(answer.tokens for answer in (*without.answers, *run.answers)):
        raise DraftkitError(
            f"{names[2]} names no tokens, neither by id nor with log-probabilities",
            hint="an engine that names its tokens can be certified",
        )
    if reference is None:
        moved = _moved(list(zip(run.answers, without.answers, strict=True)))
        floor = None if moved is None else min(max(SAFETY * moved, LEAST), MOST)
        check = None
    else:
        moved, floor = None, reference.near_tie
        beside = _divergences(wanted.greedy, without.answers, reference.answers, without.answers)
        check = ReferenceCheck(reference.name, len(reference.answers), beside, reference.moved, reference.most)
    tests: dict[str, ChiSquare | RankTest] = {}
    for temperature, drawn in drafting.drawn.items():
        drafted, other = (_by_prompt(of_one, wanted.samples) for of_one in (drawn, plain.drawn[temperature]))
        tests |= _tests(temperature, drafted, other, wanted.sampled_tokens)
    adjusted = holm([test.p_value for test in tests.values()])
    return Certificate(
        target=names[0],
        draft=names[1],
        engine=names[2],
        version=run.version,
        requests=len(wanted.greedy),
        tokens=sum(len(answer.tokens) for answer in run.answers),
        floor=floor,
        moved=moved,
        divergences=_divergences(wanted.greedy, run.answers, without.answers, without.answers),
        tests=tuple(
            SampleTest(name, test.draws, test.p_value, p, test.detectable(FALSE_ALARMS / len(tests), POWER))
            for (name, test), p in zip(tests.items(), adjusted, strict=True)
        ),
        samplings=tuple(samplings),
        concurrency=concurrency,
        reference=check,
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
    """How many tokens two answers have in common at their beginning."""
    both = zip(one.tokens, other.tokens, strict=False)
    return next((at for at, (a, b) in enumerate(both) if a != b), min(len(one.tokens), len(other.tokens)))


def _divergences(
    requests: Sequence[Request], answers: Sequence[Answer], others: Sequence[Answer], plain: Sequence[Answer]
) -> tuple[TokenDifference, ...]:
    """Where answers leave others, as far as there are others; with the log-probabilities of those without a draft."""
    rows = zip(requests, answers, others, plain, strict=False)
    return tuple(_divergence(*row) for row in rows if row[1].tokens != row[2].tokens)


def _divergence(request: Request, answer: Answer, right: Answer, plain: Answer) -> TokenDifference:
    at = _common(answer, right)
    mine, other = (a.tokens[at] if at < len(a.tokens) else None for a in (answer, right))
    if mine is None or other is None:
        return TokenDifference(request.id, at, (mine, other), None, inf)
    likely = plain.alternatives[at] if plain.alternatives and at < len(plain.alternatives) else None
    if not likely:
        return TokenDifference(request.id, at, (mine, other), None, None)
    last = min(likely.values())
    logprobs = likely.get(mine, last), likely.get(other, last)
    return TokenDifference(request.id, at, (mine, other), logprobs, abs(logprobs[0] - logprobs[1]))


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
    """The token at a place of an answer; None after its end."""
    return answer.tokens[at] if at < len(answer.tokens) else None


def _by_prompt(answers: Sequence[Answer], samples: int) -> list[Sequence[Answer]]:
    return [answers[begin : begin + samples] for begin in range(0, len(answers), samples)]
