"""Whether Python code that comes with a model may run: never, unless the user says so.

Left to itself, transformers asks on the terminal, and takes a `y` from standard input for consent. So every call that
could run such code passes `trusts_remote_code()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_trusted: ContextVar[bool] = ContextVar("trust_remote_code", default=False)


@contextmanager
def trust_remote_code(trusted: bool = True) -> Iterator[None]:
    """Let models and tokenizers that are loaded in the body run the Python code of their repository."""
    token = _trusted.set(trusted)
    try:
        yield
    finally:
        _trusted.reset(token)


def trusts_remote_code() -> bool:
    """What transformers' `trust_remote_code` shall be."""
    return _trusted.get()


def remote_code_hint(error: Exception) -> str | None:
    """What to do about an error of transformers, where it is that code was not run."""
    if "trust_remote_code" not in str(error):
        return None
    return "it brings Python code of its own: read that code, and pass --trust-remote-code to run it"
