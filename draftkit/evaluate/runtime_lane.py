"""draftkit's own runtime as a lane: what it generates is kept round by round."""

from __future__ import annotations

import time
from collections.abc import Sequence

from draftkit.engines.records import Answer, DraftCounts
from draftkit.evaluate.measure import Lane, Report, Run
from draftkit.evaluate.near_ties import with_likelihoods
from draftkit.requests import Request
from draftkit.results.settings import Settings
from draftkit.results.statistics import accepted_per_position, drafted_rounds
from draftkit.runtime.drafters.protocol import Drafter
from draftkit.runtime.engine import Engine
from draftkit.runtime.records import Generation
from draftkit.targets.target import Target


def engine_of(
    target: Target, drafter: Drafter | None, settings: Settings, *, num_slots: int, estimates: bool = False
) -> Engine:
    """The engine that a measurement runs on; `estimates`: it keeps what the draft says of its tokens."""
    return Engine(
        target,
        drafter,
        num_speculative_tokens=settings.num_speculative_tokens if drafter is not None else 0,
        num_slots=num_slots,
        # Plain decoding draws with the noise that coupled verification compares with, which is also any target's own.
        verification=settings.verification if drafter is not None else "coupled",
        draft_sampling=settings.draft_sampling,
        k_by_batch=settings.schedule if drafter is not None else None,
        tree=settings.drafted_tree if drafter is not None else None,
        eager=settings.eager,
        compile=settings.compile,
        estimates=estimates,
        like=settings.like,
    )


def runtime_lane(engine: Engine, report: Report = lambda *_: None) -> Lane:
    """A lane on an engine that is there already."""

    def run(requests: Sequence[Request]) -> Run:
        began = time.perf_counter()
        generations = engine.generate(requests, on_round=_Heard(report))
        seconds = time.perf_counter() - began
        answers = [_answer(generation, engine.k) for generation in generations]
        if any(request.alternatives for request in requests):  # beyond what is timed
            answers = with_likelihoods(engine.target.model, requests, answers)
        return Run(tuple(answers), seconds, generations=tuple(generations))

    return run


def _answer(generation: Generation, k: int) -> Answer:
    drafts = None
    if k:
        rounds = drafted_rounds([generation])
        drafted, accepted = sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
        drafts = DraftCounts(len(rounds), drafted, accepted, tuple(accepted_per_position([generation], k)))
    latency = generation.times[-1] - generation.started
    tokens, gaps = tuple(generation.tokens), tuple(generation.itl)
    return Answer(tokens, generation.ttft, latency, gaps, drafts, steps=len(generation.rounds))


class _Heard:
    """Reports a run by its rounds: how many answers are done, and the acceptance length so far."""

    def __init__(self, report: Report):
        self._report = report
        self._finished = self._accepted = self._rounds = 0

    def __call__(self, touched: list[Generation]) -> None:
        for generation in touched:
            self._finished += generation.finished is not None
            self._accepted += generation.rounds[-1].accepted if generation.rounds else 0
            self._rounds += bool(generation.rounds)
        self._report(self._finished, 1 + self._accepted / max(self._rounds, 1))
