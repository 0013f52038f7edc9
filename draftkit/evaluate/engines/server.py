"""A server that runs already, measured as its users are served: by its address, whatever runs there and whatever it
drafts with. Many requests are sent at a time; what they change of its counters is what it did for them.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace

from draftkit.engines.records import MOST_COUNTED, Answer, Counters, DraftCounts
from draftkit.engines.servers.server import Server, server_at
from draftkit.engines.vllm.client import warm_up
from draftkit.errors import DraftkitError, SourceError
from draftkit.evaluate.engine import BaseEngine
from draftkit.evaluate.job import Job, made_by
from draftkit.evaluate.measure import Conversations, Lane, Report, Run
from draftkit.evaluate.options import ServerSettings
from draftkit.requests import Request
from draftkit.results.cell import Cell, Heading
from draftkit.results.settings import AS_STARTED, Settings

SETTLING = 5.0  # seconds that a server's counters may lag behind its answers
POLL = 0.1


class ServerEngine(BaseEngine):
    """A server that drafts, and one that runs the same target without a draft, where there is one.

    Of a target only tokenizer and end tokens are read; without one the server is sent messages, and renders and ends
    them itself. A draft is what the result calls it. K counts only where the server does not say how many tokens it
    drafts.
    """

    name = "server"  # until it has said which
    takes = frozenset({"image", "audio"})
    settings_type = ServerSettings
    sees_weights = False

    def __init__(self, settings: ServerSettings):
        self.settings = settings

    def check(self, job: Job) -> None:
        """Connect. Raises `DraftkitError` where a server does not answer, or drafts where it should not."""
        super().check(job)
        AS_STARTED.check(job.sweep)
        if len(job.sources) > 1:
            raise DraftkitError(f"{len(job.sources)} drafts for one server", hint="name one, or none")
        self.drafting = server_at(self.settings.url)
        self.plain = None if self.settings.baseline_url is None else server_at(self.settings.baseline_url)
        self.drafting.require(speculates=True)
        if self.plain is not None:
            self.plain.require(speculates=False)
        self.name, self.untold = self.drafting.engine, self.drafting.untold

    @property
    def provenance(self) -> dict[str, object]:
        server = self.drafting
        said = {"engine": server.engine, "version": server.version(), "model": server.model, "draft": server.draft()}
        return made_by() | {"server": said}

    @property
    def sources(self) -> Sequence[str]:
        return self.job.sources or [self.drafting.draft() or "served"]

    def heading(self, source: str, settings: Settings) -> Heading:
        target = self.drafting.model if self.job.target is None else self.job.opened_target.name
        return self.job.seen(served_heading(self, target, source, "served", settings))

    def matches(self, heading: Heading, cell: Cell) -> bool:
        """Whether a cell is what the heading asks for, except for K: a server drafts with the K that it was started
        with."""
        return replace(heading, num_speculative_tokens=cell.num_speculative_tokens).key == cell.key

    @contextmanager
    def lane(self, source: str | None, asked: Conversations, report: Report) -> Iterator[Lane]:
        server = self.drafting if source is not None else self.plain
        assert server is not None
        end_ids = None if self.job.target is None else self.job.opened_target.end_ids
        one_by_one = self.settings.one_by_one
        yield server_lane(server, asked, end_ids, report, speculates=source is not None, one_by_one=one_by_one)

    @property
    def without_plain(self) -> str | None:
        has_one = self.settings.baseline_url is not None
        return None if has_one else "there is no server without a draft: add --server-baseline URL"

    def would_tell(self, cells: Sequence[Cell]) -> str | None:
        """An interval needs the counts of each answer, a speed-up a server without a draft."""
        single = [cell for cell in cells if (cell.num_prompts or 0) > 1 and cell.acceptance_length is not None]
        wanted = []
        if any(cell.acceptance_length.bounds is None for cell in single):  # type: ignore[union-attr]
            started = f"start the server with {self.drafting.by_request}, or " if self.drafting.by_request else ""
            wanted.append(f"an interval, {started}--set one_by_one=true, which asks one request at a time")
        if self.plain is None:
            wanted.append("a speed-up, --server-baseline URL of the same target without a draft")
        return f"for {'; for '.join(wanted)}" if wanted else None

    def told(self, cell: Cell, run: Run, plain: Run | None) -> Cell:
        return replace(cell, estimated=self.drafting.estimates or None)


def served_heading(engine: BaseEngine, target: str, draft: str, method: str, settings: Settings) -> Heading:
    """The heading of what a server runs: how its draft is drawn and verified, it does not say."""
    dataset = engine.job.prompts.name
    heading = Heading.of(settings, engine=engine.name, target=target, draft=draft, method=method, dataset=dataset)
    return replace(heading, draft_sampling=None, verification=None)


def server_lane(
    server: Server,
    asked: Conversations,
    end_ids: frozenset[int] | None,
    report: Report,
    *,
    speculates: bool,
    one_by_one: bool = False,
) -> Lane:
    """A server, warm, that runs requests, as many at a time as the settings say. `speculates`: whether it is to draft;
    `one_by_one`: whether one that counts all requests together is to be asked one at a time.

    Raises `SourceError` when it says otherwise, when it does not answer, and when it was started anew meanwhile.
    """
    settings = asked.settings
    warming = warm_up(asked.first_requests, settings.concurrency, settings.num_speculative_tokens)
    server.require(speculates=speculates)
    idle = server.counters()
    answer = functools.partial(_answer_all, server, end_ids, settings.concurrency)
    warm = answer(warming, lambda *_: None)
    totals_only = speculates and any(one.drafts is None for one in warm)
    settled = _settled(server, (idle.finished or 0) + len(warming))

    def run(requests: Sequence[Request]) -> Run:
        nonlocal settled
        before, began = settled, time.perf_counter()
        if one_by_one and totals_only:
            answers, settled = _counted_one_by_one(server, end_ids, requests, report, settled)
            seconds = time.perf_counter() - began
        else:
            answers = answer(requests, report)
            seconds = time.perf_counter() - began
            settled = _settled(server, (before.finished or 0) + len(requests))
        grown = _difference(before, settled, answers, server.api.root)
        counted = grown if speculates else None
        return Run(tuple(answers), seconds, counted, server.version(), other_traffic(before, settled, answers))

    return run


def _answer_all(
    server: Server,
    end_ids: frozenset[int] | None,
    concurrency: int,
    requests: Sequence[Request],
    report: Report,
) -> list[Answer]:
    """The answers, in the order of the requests. What has not begun when one fails never does."""
    pool = ThreadPoolExecutor(concurrency)
    try:
        running = [pool.submit(server.complete, request, end_ids) for request in requests]
        known: list[DraftCounts] = []
        for finished, done in enumerate(as_completed(running), start=1):
            if (drafts := done.result().drafts) is not None:
                known.append(drafts)
            report(finished, DraftCounts.total(known).acceptance_length if known else float("nan"))
        return [done.result() for done in running]
    except BaseException:
        server.api.leave()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _counted_one_by_one(
    server: Server, end_ids: frozenset[int] | None, requests: Sequence[Request], report: Report, before: Counters
) -> tuple[list[Answer], Counters]:
    """The answers, each with what the server's counters grew by meanwhile, and the counters after the last.

    Raises `SourceError` for a server without counters, and where these show that others use it too.
    """
    answers: list[Answer] = []
    for request in requests:
        found = server.complete(request, end_ids)
        after = _settled(server, (before.finished or 0) + 1)
        counts = _difference(before, after, [found], server.api.root)
        found = replace(found, drafts=counts)
        concerns = other_traffic(before, after, [found])
        if counts is None or concerns:
            why = concerns[0] if concerns else "the server counts nothing of its drafts"
            hint = "measure while nobody else uses it, or have it count each request by itself, which most engines can"
            raise SourceError(f"{why}: what a request accepted cannot be told", where=server.api.root, hint=hint)
        answers.append(found)
        before = after
        report(len(answers), DraftCounts.total([one.drafts for one in answers if one.drafts]).acceptance_length)
    return answers, before


def _settled(server: Server, finished: int) -> Counters:
    """The counters once that many requests have finished, or after a while: they follow the answers."""
    until = time.monotonic() + SETTLING
    counters = server.counters()
    while counters.finished is not None and counters.finished < finished and time.monotonic() < until:
        time.sleep(POLL)
        counters = server.counters()
    return counters


def _difference(before: Counters, after: Counters, answers: Sequence[Answer], root: str) -> DraftCounts | None:
    """The drafts that were counted between two times; None for a server without such counters.

    Raises `SourceError` when counters began anew between them, and when so much cannot have been counted.
    """
    finished, tokens = _since(before.finished, after.finished), _since(before.tokens, after.tokens)
    drafts = None if before.drafts is None or after.drafts is None else after.drafts - before.drafts
    if min(finished or 0, tokens or 0) < 0 or (drafts is not None and drafts.fell):
        raise SourceError(
            "the server's counters were reset during the measurement",
            where=root,
            hint="it was started anew, or there are several servers behind this address: measure one that stays",
        )
    if drafts is not None:
        own = sum(answer.num_tokens for answer in answers)
        most = MOST_COUNTED if tokens is None else max(tokens, own)
        if (problem := drafts.impossible(most, max(finished or 0, len(answers)))) is not None:
            raise SourceError(f"the server's counters contradict themselves: {problem}", where=f"{root}/metrics")
    return drafts


def _since(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


def other_traffic(before: Counters, after: Counters, answers: Sequence[Answer]) -> tuple[str, ...]:
    """What the server did beside these answers, and what of them it has not counted, as sentences; nothing where its
    counters, or the answers, do not say."""
    accepted = [answer.drafts.num_accepted_tokens for answer in answers if answer.drafts is not None]
    counted = {
        "requests": (_since(before.finished, after.finished), len(answers)),
        "output tokens": (_since(before.tokens, after.tokens), sum(answer.num_tokens for answer in answers)),
        "accepted draft tokens": (
            _since(before.accepted, after.accepted) if len(accepted) == len(answers) else None,
            sum(accepted),
        ),
    }
    beside = {what: whole - own for what, (whole, own) in counted.items() if whole is not None}
    others = ", ".join(f"{count} {what}" for what, count in beside.items() if count > 0)
    lacking = ", ".join(f"{-count} {what}" for what, count in beside.items() if count < 0)
    said = [f"the server also worked for others meanwhile: {others}"] if others else []
    if lacking:
        said.append(f"the server's counters lack {lacking} of its answers: there may be several behind this address")
    return tuple(said)
