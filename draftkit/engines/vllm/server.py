"""A vLLM server that runs already: many requests at a time, and the difference that they make to its counters."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from draftkit.engines.vllm.client import Metrics, VllmServer
from draftkit.engines.vllm.records import Answer, DraftCounts, VllmRun
from draftkit.engines.vllm.request import warm_up
from draftkit.errors import SourceError
from draftkit.evaluate.measure import Progress
from draftkit.requests import Request
from draftkit.results.settings import Settings


def run_on_server(
    name: str,
    url: str,
    requests: Sequence[Request],
    settings: Settings,
    end_ids: frozenset[int],
    *,
    speculates: bool,
    on_progress: Progress,
) -> VllmRun:
    """Run all requests on a server, `settings.concurrency` at a time, after a warm-up.

    `speculates`: whether the server has a draft. Raises `SourceError` when it has none though it should, or the other
    way round, when it does not answer, and when it was started anew meanwhile.
    """
    server = VllmServer(url)
    idle = server.metrics()
    if speculates != (idle.drafts is not None):
        raise SourceError(
            f"the server runs {'without' if speculates else 'with'} speculative decoding",
            where=f"{server.url}/metrics",
            expected=f"{'' if speculates else 'no '}vllm:spec_decode_* counters",
            hint=f"start it {'with' if speculates else 'without'} --speculative-config",
        )
    model = server.model()
    warming = warm_up(requests, settings.concurrency, settings.num_speculative_tokens)
    _answer_all(server, model, warming, settings.concurrency, end_ids, name, lambda *_: None)
    before = server.settled_metrics((idle.finished or 0) + len(warming))
    began = time.perf_counter()
    answers = _answer_all(server, model, requests, settings.concurrency, end_ids, name, on_progress)
    seconds = time.perf_counter() - began
    after = server.settled_metrics((before.finished or 0) + len(requests))
    counted = _difference(before.drafts, after.drafts, server) if speculates else None
    return VllmRun(tuple(answers), seconds, counted, server.version(), other_traffic(before, after, answers))


def _answer_all(
    server: VllmServer,
    model: str,
    requests: Sequence[Request],
    concurrency: int,
    end_ids: frozenset[int],
    name: str,
    on_progress: Progress,
) -> list[Answer]:
    """The answers, in the order of the requests. What has not begun when one fails never does."""
    pool = ThreadPoolExecutor(concurrency)
    try:
        running = [pool.submit(server.complete, model, request, end_ids) for request in requests]
        known: list[DraftCounts] = []
        for finished, done in enumerate(as_completed(running), start=1):
            if (drafts := done.result().drafts) is not None:
                known.append(drafts)
            length = DraftCounts.total(known).acceptance_length if known else float("nan")
            on_progress(name, finished, len(requests), length)
        return [done.result() for done in running]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _difference(before: DraftCounts | None, after: DraftCounts | None, server: VllmServer) -> DraftCounts:
    """What was counted between two times. Raises `SourceError` when the counters began anew between them."""
    if before is None or after is None or not after.follows(before):
        raise SourceError(
            "the server's counters were reset during the measurement",
            where=f"{server.url}/metrics",
            hint="it was started anew, or there are several servers behind this address: measure one that stays",
        )
    return after - before


def other_traffic(before: Metrics, after: Metrics, answers: Sequence[Answer]) -> tuple[str, ...]:
    """What the server did beside these answers, as a sentence; nothing where its counters do not say."""
    counted = {
        "requests": (before.finished, after.finished, len(answers)),
        "output tokens": (before.tokens, after.tokens, sum(len(answer.tokens) for answer in answers)),
    }
    others = [
        f"{end - start - own} {what}"
        for what, (start, end, own) in counted.items()
        if start is not None and end is not None and end - start > own
    ]
    return (f"the server also worked for others meanwhile: {', '.join(others)}",) if others else ()
