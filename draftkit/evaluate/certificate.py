"""Whether an engine is lossless: its answers with a draft beside its answers without.

At temperature 0 they are the same, or leave each other at a near-tie: two tokens whose log-probabilities differ by no
more than rounding moves them. An engine that is only compared with itself hides a bug that it has with and without a
draft: where another program answers the same requests, the answers without a draft are compared with its own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from math import expm1, inf, log1p
from typing import Literal

from draftkit.engines.records import Answer, Token
from draftkit.errors import DraftkitError
from draftkit.evaluate.engine import BaseEngine, able
from draftkit.evaluate.job import Job
from draftkit.evaluate.measure import PromptProgress, ReferenceAnswers, Run
from draftkit.io.jsonfile import finite
from draftkit.requests import Request, SamplingParameters
from draftkit.results.settings import Settings, Sweep

_log = logging.getLogger(__name__)

PROMPTS, TOKENS, TOGETHER = 32, 64, 2  # that are asked greedily: at most, at most, at least
ALTERNATIVES = 5  # log-probabilities that are asked for beside each token's own
QUANTILE, SAFETY = 0.999, 2.0  # of how far log-probabilities move: the floor is twice what nearly all stay below
LEAST, MOST = 1e-4, 0.5  # nats that rounding moves them by, at least and at most: what moves them more is a bug
POWER = 0.95  # of what is stated as the smallest defect that would have been seen


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
class ReferenceCheck:
    """The answers without a draft beside those of another program: `requests` were compared."""

    name: str
    requests: int
    divergences: tuple[TokenDifference, ...]


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
        if self.reference is not None and (other := self._first_beyond(self.reference.divergences)) is not None:
            where = f"request {other.request}, position {other.position}"
            found.append(f"without a draft, {where}: not as {self.reference.name}")
        return tuple(found)

    @property
    def detectable_rate(self) -> float:
        """The smallest share of greedy tokens that are wrong which would have been seen with 95 %."""
        return 1.0 if self.tokens == 0 else -expm1(log1p(-POWER) / self.tokens)

    def to_dict(self) -> dict[str, object]:
        """The certificate as JSON values."""
        found = {"schema": 1, "verdict": self.verdict, "failures": list(self.failures), **asdict(self)}
        found["detectable"] = {"wrong_tokens": self.detectable_rate}
        return {key: finite(value) for key, value in found.items()}


def certify_draft(
    target: str | None,
    drafts: str | Sequence[str],
    asked: Settings | Sweep | None = None,
    on_progress: PromptProgress = lambda *_: None,
    *,
    engines: Sequence[BaseEngine],
) -> list[Certificate]:
    """Whether engines answer with each draft as without: at temperature 0, at the most draft tokens of a sweep and with
    as many requests together as it has at most.

    `target` and `drafts` as of `evaluate_draft`. Where one of several engines does not run the pair, the others do.
    Raises `DraftkitError`.
    """
    drafts = [drafts] if isinstance(drafts, str) else drafts
    sweep = Sweep.of(asked or Settings())
    sweep.require_certifiable()
    settings = certified_settings(sweep)
    with ExitStack() as stack:
        job = Job(target, drafts, Sweep.of(settings), stack)
        running = able(engines, lambda engine: engine.check(job), _log.warning)
        for engine in running:
            if (why := engine.without_plain) is not None:
                raise DraftkitError(f"a certificate compares answers with a draft and without one, and {why}")
        running = able(running, lambda engine: engine.open(on_progress), _log.warning)
        first = job.conversations(settings).first_requests
        requests = [replace(r, sampling=SamplingParameters(), alternatives=ALTERNATIVES) for r in first]
        return [one for engine in running for one in _certificates(engine, requests, job, settings)]


def certified_settings(sweep: Sweep) -> Settings:
    """How the requests of a certificate are run: the most draft tokens and the most requests together of a sweep, and
    no request alone."""
    first = sweep.first
    return replace(
        first.at(num_speculative_tokens=max(sweep.k), concurrency=max(*sweep.concurrency, TOGETHER), temperature=0.0),
        max_new_tokens=min(first.max_new_tokens, TOKENS),
        limit=min(first.limit or PROMPTS, PROMPTS),
    )


def _certificates(engine: BaseEngine, requests: Sequence[Request], job: Job, settings: Settings) -> list[Certificate]:
    """Certify each draft of an engine that is open. No two lanes run at a time."""
    conversations = job.conversations(settings)

    def answers(source: str | None) -> Run:
        def report(done: int, length: float) -> None:
            engine.on_progress(f"certificate, {source or 'no draft'}", done, len(requests), length)

        with engine.lane(source, conversations, report) as lane:
            return lane(requests)

    plain = answers(None)
    reference = engine.reference(plain)
    return [
        compared(
            requests,
            plain,
            answers(source),
            names=(engine.heading(source, settings).target, source, engine.name),
            concurrency=settings.concurrency,
            reference=reference,
        )
        for source in engine.sources
    ]


def compared(
    requests: Sequence[Request],
    plain: Run,
    drafting: Run,
    *,
    names: tuple[str, str, str],
    concurrency: int,
    reference: ReferenceAnswers | None = None,
) -> Certificate:
    """The certificate that follows from the answers with a draft and without one. `names`: of target, draft and engine.

    Raises `DraftkitError` for an engine that names no tokens.
    """
    if not all(answer.tokens for answer in (*plain.answers, *drafting.answers)):
        raise DraftkitError(
            f"{names[2]} names no tokens, neither by id nor with log-probabilities",
            hint="an engine that names its tokens can be certified",
        )
    if reference is None:
        moved = _moved(list(zip(drafting.answers, plain.answers, strict=True)))
        floor = None if moved is None else min(max(SAFETY * moved, LEAST), MOST)
        check = None
    else:
        moved, floor = None, min(reference.near_tie, MOST)
        beside = _divergences(requests, plain.answers, reference.answers, plain.answers)
        check = ReferenceCheck(reference.name, len(reference.answers), beside)
    return Certificate(
        target=names[0],
        draft=names[1],
        engine=names[2],
        version=drafting.version,
        requests=len(requests),
        tokens=sum(len(answer.tokens) for answer in drafting.answers),
        floor=floor,
        moved=moved,
        divergences=_divergences(requests, drafting.answers, plain.answers, plain.answers),
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
