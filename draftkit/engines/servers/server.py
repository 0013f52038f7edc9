"""What a measurement needs of a running server."""

from __future__ import annotations

import pkgutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, TypeVar

from draftkit.engines.connections import Limits
from draftkit.engines.http import Api, plain
from draftkit.engines.records import Answer, Counters, DraftCounts
from draftkit.engines.servers import kinds
from draftkit.engines.stream import Chunk, answer_of, chunks_of, completion_tokens, logprobs_of, path_of, prompt_of
from draftkit.errors import FormatError, SourceError
from draftkit.layout.families import class_in
from draftkit.requests import Request

MALFORMED = (TypeError, LookupError, AttributeError, ValueError, ArithmeticError)  # of readers, where fields are others
LONGEST_NAME = 500  # letters


def possible(answer: Callable[[], Answer], request: Request, where: str) -> Answer:
    """What `answer` gives to a request, once nothing in it is impossible.

    Raises `SourceError` where something is, or is said in another way than it should be.
    """
    try:
        found = answer()
        problem = found.impossible(request)
    except MALFORMED as error:
        said = plain(f"{type(error).__name__}: {error}")
        raise SourceError(f"the server's answer cannot be read: {said}", where=where) from error
    if problem is not None:
        raise SourceError(f"the server's answer contradicts itself: {plain(problem)}", where=where)
    return found


def told(name: object) -> str | None:
    """A name or a release as a server tells it; None for what nobody would call one."""
    return name if isinstance(name, str) and name.isprintable() and 0 < len(name) <= LONGEST_NAME else None


class Server(ABC):
    """A server at `api`, which calls its target `model`."""

    engine: ClassVar[str]
    owner: ClassVar[str]
    estimates: ClassVar[bool] = False  # whether what it drafts is told from the sizes of chunks
    untold: ClassVar[tuple[str, ...]] = ()  # figures of a measurement that it does not give, as a user calls them
    by_request: ClassVar[str] = ""  # what it is started with to say of each answer what was drafted, where it can

    def __init__(self, api: Api, model: str):
        self.api = api
        self.model = model

    @abstractmethod
    def answer(self, request: Request, end_ids: frozenset[int] | None) -> Answer:
        """The answer, streamed. `end_ids`: what ends it; None for what the server takes.

        Raises `SourceError` when the server fails or says nothing, and any of `MALFORMED` for what it should not say.
        """

    def complete(self, request: Request, end_ids: frozenset[int] | None) -> Answer:
        """The same, once nothing in it is impossible. Raises `SourceError`."""
        return possible(lambda: self.answer(request, end_ids), request, self.api.root)

    def version(self) -> str | None:
        """The release of the server; None where it does not say."""
        return None

    def draft(self) -> str | None:
        """The draft that the server says it uses; None where it does not say."""
        return None

    def speculates(self) -> bool | None:
        """Whether the server drafts; None where it does not say."""
        return None

    def counted(self) -> Counters:
        """The counters of the server since its start. Raises `FormatError` for values that are not counts."""
        return Counters()

    def counters(self) -> Counters:
        """The same as `counted`, with a `SourceError` that says where the metrics cannot be read."""
        try:
            return self.counted()
        except FormatError as error:
            raise SourceError(
                f"the server's metrics cannot be read: {error}", where=f"{self.api.root}/metrics"
            ) from error

    def require(self, *, speculates: bool) -> None:
        """Raise `SourceError` for a server that drafts and should not, or the other way round."""
        if self.speculates() is (not speculates):
            raise SourceError(
                f"the server runs {'without' if speculates else 'with'} speculative decoding",
                where=self.api.root,
                hint=f"pass one that was started {'with' if speculates else 'without'} a draft",
            )


AnyServer = TypeVar("AnyServer", bound=Server)

LIMITS = Limits()


def server_at(url: str) -> Server:
    """The server at `url`, its address with or without `/v1`, of the kind that it says. Raises as `server_of`."""
    by_owner = {kind.owner: kind for kind in kinds_of_servers()}
    api = _api(url)
    listed = _first_model(api)
    return by_owner.get(str(listed.get("owned_by")), ChunkServer)(api, str(listed["id"]))


def server_of(kind: type[AnyServer], url: str) -> AnyServer:
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
            raise SourceError("the server's answer is empty", where=self.api.root + path_of(request))
        count = completion_tokens(events)
        return answer_of(chunks, began, _estimated(chunks, count), count)


def _estimated(chunks: list[Chunk], count: int | None) -> DraftCounts | None:
    """Estimate acceptance from the tokens of each chunk, or where nothing names those, from the number of chunks."""
    sizes = [len(chunk.tokens) for chunk in chunks]
    if all(sizes):
        return DraftCounts.of_chunks(sizes)
    steps = len(chunks) - 1
    return None if count is None or steps < 1 else DraftCounts(steps, None, max(count - 1 - steps, 0), ())
