"""TensorRT-LLM: each answer says how many tokens an iteration gave on average, and so how many iterations it took.

Written from its source (`serve/openai_protocol.py`: fields that it does not know are refused), and not run. The
average is `getAvgDecodedTokensPerIter` of `cpp/include/tensorrt_llm/batch_manager/llmRequest.h`: generated tokens /
iterations, the prefill's among them. How much each iteration accepted is told by the chunks, where there is one for
each.
"""

from __future__ import annotations

import time
from dataclasses import replace

from draftkit.engines.http import Event
from draftkit.engines.records import Answer, DraftCounts
from draftkit.engines.servers.server import Server, told
from draftkit.engines.stream import (
    answer_of,
    choice_of,
    chunks_of,
    completion_tokens,
    endings,
    logprobs_of,
    path_of,
    prompt_of,
    sampling_of,
)
from draftkit.errors import SourceError
from draftkit.requests import Request

AVERAGE = "avg_decoded_tokens_per_iter"


class TensorrtServer(Server):
    """A server that `trtllm-serve` runs."""

    engine, owner = "tensorrt-llm", "tensorrt_llm"

    def answer(self, request: Request, end_ids: frozenset[int] | None) -> Answer:
        body = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, **prompt_of(request)}
        body |= sampling_of(request) | {"top_k": request.sampling.top_k} | endings(request, end_ids)
        body |= logprobs_of(request) if request.messages else logprobs_of(request) | {"detokenize": False}
        began = time.perf_counter()
        events = self.api.ask(path_of(request), body, stream=True)
        chunks = chunks_of(events)
        if not chunks:
            raise SourceError("the server's answer is empty", where=self.api.root + path_of(request))
        answer = answer_of(chunks, began, None, completion_tokens(events))
        sizes = [len(chunk.tokens) for chunk in chunks]
        return replace(answer, drafts=_counts(events, answer.num_tokens, sizes))

    def version(self) -> str | None:
        return told(self.api.found("/version").get("version"))


def _counts(events: list[Event], tokens: int, sizes: list[int]) -> DraftCounts | None:
    """A request's own counts; None where no average came with it. Raises `ValueError` for one of too few iterations."""
    averages = [choice_of(event).get(AVERAGE) for _, event in events]
    average = next((value for value in reversed(averages) if isinstance(value, int | float) and value > 0), None)
    if average is None or tokens < 2:
        return None
    steps = round(tokens / average) - 1
    if steps < 1:
        raise ValueError(f"{AVERAGE} is {average} of {tokens} tokens, the first of which has its own")
    if len(sizes) - 1 == steps and sum(sizes) == tokens:
        return DraftCounts.of_chunks(sizes)
    return DraftCounts(steps, None, tokens - 1 - steps, ())
