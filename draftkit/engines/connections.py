"""Connections to servers: what they bring, up to limits, and which are used again.

Every byte of a server comes through `Incoming`, headers and all. A connection of which a response was read to its end
is kept, so that the next request need not connect.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from io import BufferedReader, RawIOBase
from typing import Any
from urllib.request import AbstractHTTPHandler, OpenerDirector, ProxyHandler
from urllib.request import Request as HttpRequest
from weakref import WeakSet

from draftkit.errors import SourceError

Reached = tuple[type[HTTPConnection], str, str | None]  # how a server is reached: kind, host, and host beyond a proxy


@dataclass(frozen=True)
class Limits:
    """What is taken of a server: seconds without a byte, seconds for a page that it shows and for a whole answer, the
    bytes of either with their headers, and the events of a stream."""

    silence: float = 600.0
    page: float = 60.0
    answer: float = 3600.0
    bytes: int = 256 << 20
    events: int = 1 << 20


USUAL = Limits()


class Connections:
    """What requests are sent through, from any number of threads; no other protocol than HTTP is spoken."""

    def __init__(self, limits: Limits):
        self._limits = limits
        self._handler = _Handler(self._incoming)
        self._opener = OpenerDirector()  # of none but these: no redirects, no file
        for handler in (ProxyHandler(), self._handler):
            self._opener.add_handler(handler)
        self._open: WeakSet[Incoming] = WeakSet()
        self._opening = threading.Lock()
        self.left = threading.Event()

    @contextmanager
    def response(self, request: Sent) -> Iterator[HTTPResponse]:
        """The response to a request, whatever its status. Raises `HTTPException` or `OSError` where there is none."""
        response: HTTPResponse | None = None
        try:
            response = self._opener.open(request, timeout=min(request.seconds, self._limits.silence))
            yield response
        finally:
            self._handler.settle(request, response)

    def leave(self) -> None:
        """End what other threads still wait for, which fails there, and whatever is kept."""
        self.left.set()
        with self._opening:
            open_now = list(self._open)
        for incoming in open_now:
            incoming.cut()
        self._handler.close()

    def _incoming(self, connection: socket.socket, request: Sent) -> Incoming:
        incoming = Incoming(connection, self._limits, request.where, request.until, request.seconds)
        with self._opening:
            self._open.add(incoming)
        if self.left.is_set():
            incoming.cut()
        return incoming


class Incoming(RawIOBase):
    """What a connection brings, up to the limits: `HTTPResponse` takes it for the socket that it reads from."""

    def __init__(self, connection: socket.socket, limits: Limits, where: str, until: float, seconds: float):
        self._connection, self._file = connection, connection.makefile("rb", buffering=0)
        self._limits, self._where, self._seconds, self._until = limits, where, seconds, until
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


class Sent(HttpRequest):
    """A request, the `seconds` that its response may take, and `until` when; then the connection that it went through.

    Raises `ValueError` for what is no address.
    """

    connection: HTTPConnection | None = None
    place: Reached

    def __init__(self, where: str, data: bytes | None, headers: dict[str, str], until: float, seconds: float):
        super().__init__(where, data, headers)
        self.where, self.until, self.seconds = where, until, seconds


class _Handler(AbstractHTTPHandler):
    """Sends requests, through connections that were kept where there are some."""

    http_request = https_request = AbstractHTTPHandler.do_request_

    def __init__(self, incoming: Callable[[socket.socket, Sent], Incoming]):
        super().__init__()
        self._incoming = incoming
        self._kept: dict[Reached, list[HTTPConnection]] = {}
        self._lock = threading.Lock()

    def http_open(self, request: Sent) -> HTTPResponse:
        return self._respond(HTTPConnection, request)

    def https_open(self, request: Sent) -> HTTPResponse:
        return self._respond(HTTPSConnection, request)

    def _respond(self, kind: type[HTTPConnection], request: Sent) -> HTTPResponse:
        """The response, of which the headers are read. What was kept may just have ended: then another is tried."""
        request.place = kind, request.host, getattr(request, "_tunnel_host", None)
        while (connection := self._kept_at(request.place)) is not None:
            try:
                return self._response(connection, request)
            except ConnectionError:
                connection.close()
        return self._response(self._new(request), request)

    def _new(self, request: Sent) -> HTTPConnection:
        kind, host, beyond = request.place
        connection = kind(host)
        if beyond is not None:
            proxy = {name: value for name, value in request.headers.items() if name == "Proxy-authorization"}
            connection.set_tunnel(beyond, headers=proxy)
        return connection

    def _response(self, connection: HTTPConnection, request: Sent) -> HTTPResponse:
        def response(opened: socket.socket, *rest: Any, **named: Any) -> HTTPResponse:
            stands_for: Any = self._incoming(opened, request)
            return HTTPResponse(stands_for, *rest, **named)

        request.connection = connection
        connection.timeout = request.timeout
        connection.response_class = response  # type: ignore[assignment]
        if connection.sock is not None:
            connection.sock.settimeout(request.timeout)
        headers = {**request.headers, **request.unredirected_hdrs}
        if request.place[2] is not None:
            headers.pop("Proxy-authorization", None)  # it is for the proxy, not for who is behind it
        connection.request(request.get_method(), request.selector, request.data, headers)
        return connection.getresponse()

    def settle(self, request: Sent, response: HTTPResponse | None) -> None:
        """Keep the connection of a request where it can be used again, else close it."""
        connection = request.connection
        if connection is None:
            return
        whole = response is not None and (response.isclosed() or response.length == 0) and not response.will_close
        if response is not None:
            response.close()
        if whole and connection.sock is not None:
            with self._lock:
                self._kept.setdefault(request.place, []).append(connection)
        else:
            connection.close()

    def _kept_at(self, place: Reached) -> HTTPConnection | None:
        """The newest connection that is kept and has not ended."""
        while True:
            with self._lock:
                kept = self._kept.get(place)
                if not kept:
                    return None
                connection = kept.pop()
            if not _has_something(connection.sock):
                return connection
            connection.close()

    def close(self) -> None:
        """Close what is kept."""
        with self._lock:
            kept = [connection for of_place in self._kept.values() for connection in of_place]
            self._kept.clear()
        for connection in kept:
            connection.close()


def _has_something(connection: socket.socket) -> bool:
    """Whether there is something to read before anything was asked, which is the end, or nonsense."""
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        return bool(selector.select(0))
