"""Whether targets are spread over several devices: only where the user says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_asked: ContextVar[bool] = ContextVar("device_map", default=False)


@contextmanager
def spread_targets(asked: bool = True) -> Iterator[None]:
    """Let targets that are loaded in the body to be run spread over all devices from theirs on."""
    token = _asked.set(asked)
    try:
        yield
    finally:
        _asked.reset(token)


def spreads_targets() -> bool:
    return _asked.get()
