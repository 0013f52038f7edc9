"""Any other server of OpenAI's interface: what a chunk brings stands for what a step accepted.

That is an estimate. A server that puts several steps into a chunk, or holds text back until a character is whole, makes
acceptance look longer; one that cuts a step's tokens apart, shorter.
"""

from __future__ import annotations

import time

from draftkit.engines.records import Answer, DraftCounts
from draftkit.engines.servers.server import Server
from draftkit.engines.stream import Chunk, answer_of, chunks_of, completion_tokens, logprobs_of, path_of, prompt_of
from draftkit.errors import SourceError
from draftkit.requests import Request


class ChunkServer(Server):
    """A server of no kind that is known here. Only fields of OpenAI's own are sent, but for ids as a prompt."""

    engine, owner = "server", ""
    estimates = True

    def answer(self, request: Request, end_ids: frozenset[int] | None) -> Answer:
        del end_ids  # OpenAI has no field for them
        drawn = request.sampling
        body = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, **prompt_of(request)}
        body |= {"max_tokens": request.max_new_tokens, "temperature": drawn.temperature, "top_p": drawn.top_p}
        body |= logprobs_of(request, always=True) | ({"seed": drawn.seed % 2**31} if drawn.temperature else {})
        if drawn.top_k or drawn.min_p:
            body |= {"top_k": drawn.top_k, "min_p": drawn.min_p}
        began = time.perf_counter()
        events = self.api.ask(path_of(request), body, stream=True)
        chunks = chunks_of(events)
        if not chunks:
            raise SourceError("the server says nothing", where=self.api.root + path_of(request))
        count = completion_tokens(events)
        return answer_of(chunks, began, _estimated(chunks, count), count)


def _estimated(chunks: list[Chunk], count: int | None) -> DraftCounts | None:
    """From the tokens of each chunk where log-probabilities name them, else from the number of chunks."""
    sizes = [len(chunk.tokens) for chunk in chunks]
    if all(sizes):
        return DraftCounts.of_chunks(sizes)
    steps = len(chunks) - 1
    return None if count is None or steps < 1 else DraftCounts(steps, None, max(count - 1 - steps, 0), ())
