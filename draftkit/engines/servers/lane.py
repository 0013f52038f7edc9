"""A running server as a lane: many requests at a time, and the difference that they make to its counters."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from draftkit.engines.records import Answer, Counters, DraftCounts, EngineRun, Lane, Progress
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
        counted = _difference(before.drafts, settled.drafts, server.api.root) if speculates else None
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


def _difference(before: DraftCounts | None, after: DraftCounts | None, root: str) -> DraftCounts | None:
    """What was counted between two times; None of a server without such counters. Raises `SourceError` when they began
    anew between them."""
    if before is None or after is None:
        return None
    if not after.follows(before):
        raise SourceError(
            "the server's counters were reset during the measurement",
            where=root,
            hint="it was started anew, or there are several servers behind this address: measure one that stays",
        )
    return after - before


def other_traffic(before: Counters, after: Counters, answers: Sequence[Answer]) -> tuple[str, ...]:
    """What the server did beside these answers, as a sentence; nothing where its counters do not say."""
    counted = {
        "requests": (before.finished, after.finished, len(answers)),
        "output tokens": (before.tokens, after.tokens, sum(answer.num_tokens for answer in answers)),
    }
    others = [
        f"{end - start - own} {what}"
        for what, (start, end, own) in counted.items()
        if start is not None and end is not None and end - start > own
    ]
    return (f"the server also worked for others meanwhile: {', '.join(others)}",) if others else ()
