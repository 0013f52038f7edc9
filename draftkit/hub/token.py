"""The Hub's token goes to the Hub alone."""

from __future__ import annotations

import functools
from typing import Any

from draftkit.errors import SourceError


@functools.cache
def keep_token() -> None:
    """From now on the Hub's client in this process refuses to send the token to any server but the Hub.

    The client drops it where a request is redirected elsewhere, and not where an answer names an address to go on at:
    of a storage, of a check after an upload. The refusal is a `SourceError`.
    """
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import _http  # which alone says what makes clients so far: the user may have set it

    make = _http._GLOBAL_CLIENT_FACTORY

    def client() -> Any:
        made = make()
        made.event_hooks = {**made.event_hooks, "request": [*made.event_hooks["request"], _refuse_elsewhere]}
        return made

    set_client_factory(client)


def _refuse_elsewhere(request: Any) -> None:
    """Raise `SourceError` for a request of httpx that has the token and is not for the Hub."""
    from huggingface_hub import constants, get_token

    token, url = get_token(), request.url
    hub = type(url)(constants.ENDPOINT)
    elsewhere = (url.scheme, url.host, url.port) != (hub.scheme, hub.host, hub.port)
    if elsewhere and token and token in request.headers.get("authorization", ""):
        raise SourceError(
            f"the token is asked for at {url.scheme}://{url.netloc.decode()}, and goes to the Hub alone",
            where=constants.ENDPOINT,
            hint="set HF_ENDPOINT to the address of the Hub itself",
        )
