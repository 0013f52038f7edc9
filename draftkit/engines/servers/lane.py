"""A running server as a lane: many requests at a time, and the difference that they make to its counters."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from draftkit.engines.records import MOST_COUNTED, Answer, Counters, DraftCounts, EngineRun, Lane, Progress
from draftkit.engines.servers.server import Server
from draftkit.errors import SourceError
from draftkit.requests import Request

SETTLING = 5.0  # seconds that a server's counters may lag behind its answers
POLL = 0.1


def server_lane(
    server: Server,
    warming: Sequence[Request],
    end_ids: frozenset[int] | None,
    *,
    concurrency: int,
    speculates: bool,
    on_progress: Progress,
) -> Lane:
    """A server, warm, that runs requests, `concurrency` at a time. `speculates`: whether it is to draft.

    Raises `SourceError` when it says otherwise, when it does not answer, and when it was started anew meanwhile.
    """
    server.require(speculates=speculates)
    idle = server.counters()
    answer = functools.partial(_answer_all, server, end_ids, concurrency)
    answer(warming, lambda *_: None)
    settled = _settled(server, (idle.finished or 0) + len(warming))

    def run(requests: Sequence[Request]) -> EngineRun:
        nonlocal settled
        before, began = settled, time.perf_counter()
        answers = answer(requests, on_progress)
        seconds = time.perf_counter() - began
        settled = _settled(server, (before.finished or 0) + len(requests))
        grown = _difference(before, settled, answers, server.api.root)
        counted = grown if speculates else None
        return EngineRun(tuple(answers), seconds, counted, server.version(), other_traffic(before, settled, answers))

    return run


def _answer_all(
    server: Server,
    end_ids: frozenset[int] | None,
    concurrency: int,
    requests: Sequence[Request],
    on_progress: Progress,
) -> list[Answer]:
    """The answers, in the order of the requests. What has not begun when one fails never does."""
    pool = ThreadPoolExecutor(concurrency)
    try:
        running = [pool.submit(server.complete, request, end_ids) for request in requests]
        known: list[DraftCounts] = []
        for finished, done in enumerate(as_completed(running), start=1):
            if (drafts := done.result().drafts) is not None:
                known.append(drafts)
            on_progress(finished, DraftCounts.total(known).acceptance_length if known else float("nan"))
        return [done.result() for done in running]
    except BaseException:
        server.api.leave()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _settled(server: Server, finished: int) -> Counters:
    """The counters once that many requests have finished, or after a while: they follow the answers."""
    until = time.monotonic() + SETTLING
    counters = server.counters()
    while counters.finished is not None and counters.finished < finished and time.monotonic() < until:
        time.sleep(POLL)
        counters = server.counters()
    return counters


def _difference(before: Counters, after: Counters, answers: Sequence[Answer], root: str) -> DraftCounts | None:
    """What was counted of drafts between two times; None of a server without such counters.

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
            raise SourceError(f"the server's counters say what cannot be: {problem}", where=f"{root}/metrics")
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
