"""A vLLM server that runs already: many requests at a time, and the difference that they make to its counters."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from draftkit.engines.vllm.client import CompletionsClient
from draftkit.engines.vllm.metrics import Metrics
from draftkit.engines.vllm.records import Answer, DraftCounts, Lane, Progress, VllmRun
from draftkit.errors import SourceError
from draftkit.requests import Request

TIMEOUT = 600.0  # seconds without a byte


def server_lane(
    url: str,
    warming: Sequence[Request],
    end_ids: frozenset[int],
    *,
    concurrency: int,
    speculates: bool,
    on_progress: Progress,
) -> Lane:
    """A server, warm, that runs requests, `concurrency` at a time.

    `url`: its address, with or without `/v1`. `speculates`: whether the server has a draft. Raises `SourceError` when
    it has none though it should, or the other way round, when it does not answer, and when it was started anew
    meanwhile.
    """
    client = CompletionsClient(
        f"{url.rstrip('/').removesuffix('/v1')}/v1",
        timeout=TIMEOUT,
        hint="pass the address of a running `vllm serve`, and OPENAI_API_KEY where it asks for a key",
    )
    idle = client.metrics()
    if speculates != (idle.drafts is not None):
        raise SourceError(
            f"the server runs {'without' if speculates else 'with'} speculative decoding",
            where=f"{client.root}/metrics",
            expected=f"{'' if speculates else 'no '}vllm:spec_decode_* counters",
            hint=f"start it {'with' if speculates else 'without'} --speculative-config",
        )
    models = client.models()
    if not models:
        raise SourceError("the server lists no models", where=f"{client.api}/models")
    answer = functools.partial(_answer_all, client, models[0], end_ids, concurrency)
    answer(warming, lambda *_: None)
    settled = client.settled_metrics((idle.finished or 0) + len(warming))

    def run(requests: Sequence[Request]) -> VllmRun:
        nonlocal settled
        before, began = settled, time.perf_counter()
        answers = answer(requests, on_progress)
        seconds = time.perf_counter() - began
        settled = client.settled_metrics((before.finished or 0) + len(requests))
        counted = _difference(before.drafts, settled.drafts, client.root) if speculates else None
        return VllmRun(tuple(answers), seconds, counted, client.version(), other_traffic(before, settled, answers))

    return run


def _answer_all(
    client: CompletionsClient,
    model: str,
    end_ids: frozenset[int],
    concurrency: int,
    requests: Sequence[Request],
    on_progress: Progress,
) -> list[Answer]:
    """The answers, in the order of the requests. What has not begun when one fails never does."""
    pool = ThreadPoolExecutor(concurrency)
    try:
        running = [pool.submit(client.complete, model, request, end_ids, stream=True) for request in requests]
        known: list[DraftCounts] = []
        for finished, done in enumerate(as_completed(running), start=1):
            if (drafts := done.result().drafts) is not None:
                known.append(drafts)
            on_progress(finished, DraftCounts.total(known).acceptance_length if known else float("nan"))
        return [done.result() for done in running]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _difference(before: DraftCounts | None, after: DraftCounts | None, root: str) -> DraftCounts:
    """What was counted between two times. Raises `SourceError` when the counters began anew between them."""
    if before is None or after is None or not after.follows(before):
        raise SourceError(
            "the server's counters were reset during the measurement",
            where=f"{root}/metrics",
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
