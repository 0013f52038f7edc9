"""What every server is asked by: JSON over HTTP, its event streams, and what goes wrong on the way.

Every byte of a server comes through `_Bytes`, headers and all, under one set of limits. Requests, and the key that goes
with them, stay with the scheme, host and port that they were meant for.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import string
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from io import BufferedReader, RawIOBase
from typing import Any, TypeVar
from urllib.error import HTTPError
from urllib.parse import quote, urljoin, urlsplit
from urllib.request import (
    AbstractHTTPHandler,
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    OpenerDirector,
    ProxyHandler,
)
from urllib.request import Request as HttpRequest
from weakref import WeakSet

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


@dataclass(frozen=True)
class Limits:
    """What is taken of a server: seconds without a byte, seconds for a page that it shows and for a whole answer, the
    bytes of either with their headers, and the events of a stream."""

    silence: float = 600.0
    page: float = 60.0
    answer: float = 3600.0
    bytes: int = 256 << 20
    events: int = 1 << 20


class RejectedRequest(SourceError):
    """A request that the server will not serve, though it serves others. `said`: in its own words."""

    def __init__(self, said: str, where: str):
        super().__init__(f"the server rejects the request: {said}", where=where)
        self.said = said


class Api:
    """A server at `root`, its address without `/v1`. `OPENAI_API_KEY` is sent when it is set.

    `pauses`: seconds before each further attempt after a failure that may pass. `hint`: what to do when the server does
    not answer. Raises `SourceError` for what is no address, and for a key that cannot be sent.
    """

    def __init__(self, url: str, *, limits: Limits = Limits(), pauses: Sequence[float] = (), hint: str):
        try:
            known = urlsplit(url).scheme in ("http", "https") and _server_of(url)[1]
        except ValueError:
            known = None
        if not known:
            raise SourceError(f"server {url}", expected="http://HOST:PORT/v1")
        self.root = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            if not key.isascii() or not key.isprintable():
                raise SourceError("OPENAI_API_KEY holds characters that no key has", hint="copy it again, or unset it")
            self._headers["Authorization"] = f"Bearer {key}"
        self._limits = limits
        self._pauses = pauses
        self._hint = hint
        self._left = threading.Event()
        self._open: WeakSet[_Bytes] = WeakSet()

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
        self._left.set()
        for incoming in list(self._open):
            incoming.cut()

    def _call(self, path: str, body: dict[str, object] | None, read: Callable[[HTTPResponse], T]) -> T:
        """The response as `read` reads it; the request is repeated after failures that may pass."""
        where = self.root + path
        data = None if body is None else json.dumps(body).encode()
        for pause in (*self._pauses, None):
            failed = "does not answer"
            try:
                with self._response(where, data) as response:
                    failed = "has gone away"
                    found = read(response)
                if not self._left.is_set():  # else it may have been cut short
                    return found
                problem = "what it says is not waited for any more"
            except HTTPError as error:
                problem = _said(error)
                if error.code in OF_THE_REQUEST and body is not None:
                    raise RejectedRequest(problem, where) from None
                if error.code not in TRANSIENT:
                    break
            except (HTTPException, OSError) as error:
                problem = plain(str(getattr(error, "reason", error)) or type(error).__name__)
            if pause is None or self._left.wait(pause):
                break
        raise SourceError(f"the server {failed}: {problem}", where=where, hint=self._hint)

    def _response(self, where: str, data: bytes | None) -> HTTPResponse:
        """The response, wherever on this server it is. Raises `SourceError` where the server sends elsewhere."""
        seconds = self._limits.page if data is None else self._limits.answer
        began = time.monotonic()

        def incoming(connection: socket.socket) -> _Bytes:
            bytes_of = _Bytes(connection, self._limits, where, began, seconds)
            self._open.add(bytes_of)
            if self._left.is_set():
                bytes_of.cut()
            return bytes_of

        opener = OpenerDirector()  # of none but these: no other server, no file
        for handler in (ProxyHandler(), HTTPDefaultErrorHandler(), HTTPErrorProcessor(), _Connecting(incoming)):
            opener.add_handler(handler)
        for _ in range(MOST_REDIRECTS + 1):
            try:
                request = HttpRequest(where, data, self._headers)
                return opener.open(request, timeout=min(seconds, self._limits.silence))
            except HTTPError as error:
                if error.code not in (REDIRECTS if data is None else WITH_BODY):
                    raise
                error.close()
                where = _followed(where, error.headers.get("Location"))
            except ValueError as error:
                raise SourceError(f"{where} is no address: {error}", expected="http://HOST:PORT/v1") from None
        raise SourceError(f"the server redirects more than {MOST_REDIRECTS} times", where=where)


class _Bytes(RawIOBase):
    """What a connection brings, up to the limits: `HTTPResponse` takes it for the socket that it reads from."""

    def __init__(self, connection: socket.socket, limits: Limits, where: str, began: float, seconds: float):
        self._connection, self._file = connection, connection.makefile("rb", buffering=0)
        self._limits, self._where, self._seconds, self._until = limits, where, seconds, began + seconds
        self._bytes = 0

    def makefile(self, mode: str) -> BufferedReader:
        return BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Raises `SourceError` beyond a limit, `TimeoutError` after a silence, which may pass."""
        remaining = self._until - time.monotonic()
        if remaining > 0:
            self._connection.settimeout(min(self._limits.silence, remaining))
            try:
                count = self._file.readinto(buffer)
            except TimeoutError:
                if self._limits.silence < remaining:
                    raise
                remaining = 0
        if remaining <= 0:
            raise self._endless(f"taken {self._seconds:,g} s")
        self._bytes += count or 0
        if self._bytes > self._limits.bytes:
            raise self._endless(f"more than {self._limits.bytes:,} bytes")
        return count

    def _endless(self, what: str) -> SourceError:
        return SourceError(f"the server's answer does not end: it has {what}", where=self._where)

    def cut(self) -> None:
        """End the connection, for whoever waits for it."""
        with suppress(OSError):
            socket.socket.shutdown(self._connection, socket.SHUT_RDWR)  # TLS' own is not for threads

    def close(self) -> None:
        self._file.close()
        super().close()


class _Connecting(AbstractHTTPHandler):
    """Connects to servers, whose responses are read as `incoming`."""

    http_request = https_request = AbstractHTTPHandler.do_request_

    def __init__(self, incoming: Callable[[socket.socket], _Bytes]):
        super().__init__()
        self._incoming = incoming

    def http_open(self, request: HttpRequest) -> HTTPResponse:
        return self.do_open(functools.partial(self._connection, HTTPConnection), request)

    def https_open(self, request: HttpRequest) -> HTTPResponse:
        return self.do_open(functools.partial(self._connection, HTTPSConnection), request)

    def _connection(self, kind: type[HTTPConnection], host: str, **options: Any) -> HTTPConnection:
        def response(connection: socket.socket, *rest: Any, **named: Any) -> HTTPResponse:
            stands_for: Any = self._incoming(connection)
            return HTTPResponse(stands_for, *rest, **named)

        connection = kind(host, **options)
        connection.response_class = response  # type: ignore[assignment]
        return connection


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


def _said(error: HTTPError) -> str:
    """The server's own words, where it has some."""
    try:
        with error:
            text = error.read(10_000).decode(errors="replace")
    except (HTTPException, OSError, ValueError):  # the last for a chunk of negative length
        text = ""
    try:
        value = loads(text)
    except ValueError:
        value = None
    if isinstance(value, dict):
        text = _message({"error": value} | value)
    return plain(f"{error.code} {error.reason}" + (f": {text}" if text else ""))


def _message(event: Mapping[str, object]) -> str:
    error = event["error"]
    return plain(str(error.get("message", error) if isinstance(error, dict) else error))


def plain(text: str) -> str:
    """The beginning of what a server says, without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:SAID])
