"""What every server is asked by: JSON over HTTP, its event streams, and what goes wrong on the way.

Requests, and the key that goes with them, stay with the scheme, host and port that they were meant for.
"""

from __future__ import annotations

import functools
import json
import os
import string
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse, IncompleteRead
from typing import TypeVar
from urllib.parse import quote, urljoin, urlsplit

from draftkit.engines.connections import USUAL, Connections, Limits, Sent
from draftkit.errors import SourceError
from draftkit.io.jsonfile import loads

TRANSIENT = {408, 409, 425, 429, 500, 502, 503, 504}
OF_THE_REQUEST = {400, 413, 422}  # the server understands the request and will not serve this prompt
REDIRECTS = {301, 302, 303, 307, 308}
WITH_BODY = {307, 308}  # those that ask for the same request elsewhere, and not for a page
MOST_REDIRECTS = 5
PART = 1 << 16  # bytes that are taken at a time
SAID = 300  # letters of what a server says of a failure

T = TypeVar("T")
Event = tuple[float, dict[str, object]]  # when it came, and what it says


class RejectedRequest(SourceError):
    """A request that the server will not serve, though it serves others. `said`: in its own words."""

    def __init__(self, said: str, where: str):
        super().__init__(f"the server rejects the request: {said}", where=where)
        self.said = said


class Unanswered(SourceError):
    """A server that cannot be reached, or fails at whatever it is asked, after all attempts."""


class _Status(Exception):
    """A response that is none: its status, and what the server says."""

    def __init__(self, code: int, said: str):
        self.code, self.said = code, said


class Api:
    """A server at `root`, its address without `/v1`. The key in the environment variable `key` is sent when it is set.

    `pauses`: seconds before each further attempt after a failure that may pass. `hint`: what to do when the server does
    not answer. Any number of threads may ask. Raises `SourceError` for what is no address, and for a key that cannot be
    sent.
    """

    def __init__(
        self,
        url: str,
        *,
        limits: Limits = USUAL,
        pauses: Sequence[float] = (),
        hint: str,
        key: str = "OPENAI_API_KEY",
    ):
        try:
            known = urlsplit(url).scheme in ("http", "https") and _server_of(url)[1]
        except ValueError:
            known = None
        if not known:
            raise SourceError(f"server {url}", expected="http://HOST:PORT/v1")
        self.root = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if secret := os.environ.get(key):
            if not secret.isascii() or not secret.isprintable():
                raise SourceError(f"{key} holds characters that no key has", hint="copy it again, or unset it")
            self._headers["Authorization"] = f"Bearer {secret}"
        self._limits = limits
        self._pauses = pauses
        self._hint = hint
        self._connections = Connections(limits)
        weakref.finalize(self, self._connections.leave)

    def read(self, path: str) -> dict[str, object]:
        """The JSON object at a path. Raises `SourceError` when there is none."""
        ((_, value),) = self._call(path, None, functools.partial(_whole, self.root + path))
        return value

    def page(self, path: str) -> str:
        """The text at a path. Raises `SourceError` when there is none."""
        return self._call(path, None, lambda response: _body(response).decode(errors="replace"))

    def found(self, path: str) -> dict[str, object]:
        """The JSON object at a path; empty where the server has none."""
        try:
            return self.read(path)
        except SourceError:
            return {}

    def ask(self, path: str, body: dict[str, object], *, stream: bool) -> list[Event]:
        """The JSON objects of an answer: those of an event stream as they came, or the only one.

        Raises `RejectedRequest` when the server serves no such request, and `SourceError` when it fails.
        """
        where = self.root + path
        whole = functools.partial(_events, where, self._limits.events) if stream else functools.partial(_whole, where)
        return self._call(path, body, whole)

    def leave(self) -> None:
        """End what other threads still wait for, which fails there: a process waits for its threads before it ends."""
        self._connections.leave()

    def _call(self, path: str, body: dict[str, object] | None, read: Callable[[HTTPResponse], T]) -> T:
        """The response as `read` reads it; the request is repeated after failures that may pass."""
        where = self.root + path
        data = None if body is None else json.dumps(body).encode()
        left = self._connections.left
        kind: type[SourceError] = Unanswered
        for pause in (*self._pauses, None):
            failed = "does not answer"
            try:
                with self._response(where, data) as response:
                    failed = "has gone away"
                    found = read(response)
                if not left.is_set():  # else it may have been cut short
                    return found
                problem = "what it says is not waited for any more"
            except _Status as status:
                problem = status.said
                if status.code in OF_THE_REQUEST and body is not None:
                    raise RejectedRequest(problem, where) from None
                if status.code not in TRANSIENT:
                    kind = SourceError
                    break
            except (HTTPException, OSError) as error:
                problem = plain(str(error) or type(error).__name__)
            if pause is None or left.wait(pause):
                break
        raise kind(f"the server {failed}: {problem}", where=where, hint=self._hint)

    @contextmanager
    def _response(self, where: str, data: bytes | None) -> Iterator[HTTPResponse]:
        """The response, wherever on this server it is. Raises `SourceError` where the server sends elsewhere, `_Status`
        where it says that there is none."""
        seconds = self._limits.page if data is None else self._limits.answer
        until = time.monotonic() + seconds
        for _ in range(MOST_REDIRECTS + 1):
            try:
                request = Sent(where, data, self._headers, until, seconds)
            except ValueError as error:
                raise SourceError(f"{where} is no address: {error}", expected="http://HOST:PORT/v1") from None
            with self._connections.response(request) as response:
                if response.status in (REDIRECTS if data is None else WITH_BODY):
                    where = _followed(where, response.headers.get("Location"))
                    continue
                if not 200 <= response.status < 300:
                    raise _Status(response.status, _said(response))
                yield response
                return
        raise SourceError(f"the server redirects more than {MOST_REDIRECTS} times", where=where)


def _server_of(address: str) -> tuple[str, str | None, int]:
    """Scheme, host and port. Raises `ValueError` for what is no address."""
    parts = urlsplit(address)
    return parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


def _followed(where: str, location: str | None) -> str:
    """Where a redirect leads. Raises `SourceError` unless it is on the same server."""
    try:
        place = quote(urljoin(where, location or "#"), safe=string.punctuation, encoding="iso-8859-1")  # as headers are
        same = location is not None and _server_of(place) == _server_of(where)
    except ValueError:
        place, same = str(location), False
    if not same:
        raise SourceError(
            f"the server redirects to {plain(place) if location else 'nowhere'}, and no other server is asked",
            where=where,
            hint="pass the address of the server that is to answer: it gets the prompts, and OPENAI_API_KEY",
        )
    return place


def _body(response: HTTPResponse) -> bytes:
    """The whole of a response. Raises `IncompleteRead` where it is cut."""
    parts = list(iter(functools.partial(response.read1, PART), b""))
    if response.length:
        raise IncompleteRead(b"".join(parts), response.length)
    return b"".join(parts)


def _lines(response: HTTPResponse) -> Iterator[bytes]:
    """The lines of a response, each once it is there."""
    rest = bytearray()
    while part := response.read1(PART):
        begin = len(rest)
        rest += part
        if (end := rest.rfind(b"\n", begin)) >= 0:
            yield from bytes(rest[:end]).split(b"\n")
            del rest[: end + 1]
    yield bytes(rest)


def _whole(where: str, response: HTTPResponse) -> list[Event]:
    """The one JSON object of a response."""
    return [(time.perf_counter(), _parsed(_body(response), where))]


def _events(where: str, most: int, response: HTTPResponse) -> list[Event]:
    """The JSON objects of an event stream, each with when it came."""
    events: list[Event] = []
    for line in _lines(response):
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return events
        if not line.startswith(b"data:"):
            continue
        event = _parsed(data, where)
        if "error" in event:
            raise SourceError(f"the server has failed: {_message(event)}", where=where)
        events.append((time.perf_counter(), event))
        if event.get("stop") is True:  # how llama.cpp's own interface ends an answer
            return events
        if len(events) > most:
            raise SourceError(f"the server's answer does not end: it has more than {most:,} events", where=where)
    raise SourceError("the server has gone away in the middle of an answer", where=where)


def _parsed(data: bytes, where: str) -> dict[str, object]:
    try:
        value = loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise SourceError("the server's answer is not a JSON object", where=where)
    return value


def _said(response: HTTPResponse) -> str:
    """The server's own words, where it has some."""
    try:
        text = response.read(10_000).decode(errors="replace")
    except (HTTPException, OSError, ValueError):  # the last for a chunk of negative length
        text = ""
    try:
        value = loads(text)
    except ValueError:
        value = None
    if isinstance(value, dict):
        text = _message({"error": value} | value)
    return plain(f"{response.status} {response.reason}" + (f": {text}" if text else ""))


def _message(event: Mapping[str, object]) -> str:
    error = event["error"]
    return plain(str(error.get("message", error) if isinstance(error, dict) else error))


def plain(text: str) -> str:
    """The beginning of what a server says, without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:SAID])
