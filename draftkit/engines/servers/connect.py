"""A server by its address: which kind it is, and what it serves."""

from __future__ import annotations

import pkgutil
from typing import TypeVar

from draftkit.engines.http import Api, Limits
from draftkit.engines.servers import kinds
from draftkit.engines.servers.chunks import ChunkServer
from draftkit.engines.servers.server import Server, told
from draftkit.errors import SourceError
from draftkit.layout.families import class_in

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
