"""What a measurement needs of a running server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from draftkit.engines.http import Api, plain
from draftkit.engines.records import Answer, Counters
from draftkit.errors import FormatError, SourceError
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
        raise SourceError(f"the server says what cannot be: {plain(problem)}", where=where)
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
        """Its release."""
        return None

    def draft(self) -> str | None:
        """What it says that it drafts with."""
        return None

    def speculates(self) -> bool | None:
        """Whether it drafts; None where it does not say."""
        return None

    def counted(self) -> Counters:
        """What it has counted so far. Raises `FormatError` for what are no counts."""
        return Counters()

    def counters(self) -> Counters:
        """The same. Raises `SourceError`."""
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
