"""What a measurement needs of a running server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from draftkit.engines.http import Api
from draftkit.engines.records import Answer, Counters
from draftkit.errors import SourceError
from draftkit.requests import Request


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
    def complete(self, request: Request, end_ids: frozenset[int] | None) -> Answer:
        """The answer, streamed. `end_ids`: what ends it; None for what the server takes.

        Raises `SourceError` when the server fails or says nothing.
        """

    def version(self) -> str | None:
        """Its release."""
        return None

    def draft(self) -> str | None:
        """What it says that it drafts with."""
        return None

    def speculates(self) -> bool | None:
        """Whether it drafts; None where it does not say."""
        return None

    def counters(self) -> Counters:
        """What it has counted so far."""
        return Counters()

    def require(self, *, speculates: bool) -> None:
        """Raise `SourceError` for a server that drafts and should not, or the other way round."""
        if self.speculates() is (not speculates):
            raise SourceError(
                f"the server runs {'without' if speculates else 'with'} speculative decoding",
                where=self.api.root,
                hint=f"pass one that was started {'with' if speculates else 'without'} a draft",
            )
