"""A server by its address: which kind it is, and what it serves."""

from __future__ import annotations

import pkgutil
import time
from typing import TypeVar

from draftkit.engines.http import Api, Limits
from draftkit.engines.records import Answer, DraftCounts
from draftkit.engines.servers import kinds
from draftkit.engines.servers.server import Server, told
from draftkit.engines.stream import Chunk, answer_of, chunks_of, completion_tokens, logprobs_of, path_of, prompt_of
from draftkit.errors import SourceError
from draftkit.layout.families import class_in
from draftkit.requests import Request

Kind = TypeVar("Kind", bound=Server)

LIMITS = Limits()


def server_at(url: str) -> Server:
    """The server at `url`, its address with or without `/v1`, of the kind that it says. Raises as `server_of`."""
    by_owner = {kind.owner: kind for kind in kinds_of_servers()}
    api = _api(url)
    listed = _first_model(api)
    return by_owner.get(str(listed.get("owned_by")), ChunkServer)(api, str(listed["id"]))


def server_of(kind: type[Kind], url: str) -> Kind:
    """A server that is known to be of a kind, for its first model.

    Raises `SourceError` when it does not answer or lists no models.
    """
    api = _api(url)
    return kind(api, str(_first_model(api)["id"]))


def _api(url: str) -> Api:
    hint = "pass the address of a running server, and OPENAI_API_KEY where it asks for a key"
    return Api(url, limits=LIMITS, hint=hint)


def _first_model(api: Api) -> dict[str, object]:
    listed = api.read("/v1/models").get("data")
    first = listed[0] if isinstance(listed, list) and listed else None
    if not isinstance(first, dict) or told(first.get("id")) is None:
        raise SourceError("the server lists no models", where=f"{api.root}/v1/models")
    return first


def kinds_of_servers() -> list[type[Server]]:
    """The class of every kind that there is a file for."""
    names = (module.name for module in pkgutil.iter_modules(kinds.__path__))
    return [class_in(f"{kinds.__name__}.{name}", Server) for name in names]


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
