"""What every server is asked by: JSON over HTTP, its event streams, and what goes wrong on the way."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException, HTTPResponse
from typing import TypeVar
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request as HttpRequest
from urllib.request import urlopen

from draftkit.errors import SourceError
from draftkit.io.jsonfile import MAX_BYTES, loads

TRANSIENT = {408, 409, 425, 429, 500, 502, 503, 504}
OF_THE_REQUEST = {400, 413, 422}  # the server understands the request and will not serve this prompt

T = TypeVar("T")
Event = tuple[float, dict[str, object]]  # when it came, and what it says


class RejectedRequest(SourceError):
    """A request that the server will not serve, though it serves others. `said`: in its own words."""

    def __init__(self, said: str, where: str):
        super().__init__(f"the server rejects the request: {said}", where=where)
        self.said = said


class Api:
    """A server at `root`, its address without `/v1`. `OPENAI_API_KEY` is sent when it is set.

    `timeout`: seconds without a byte. `pauses`: seconds before each further attempt after a failure that may pass.
    `hint`: what to do when the server does not answer. Raises `SourceError` for what is no address.
    """

    def __init__(self, url: str, *, timeout: float, pauses: Sequence[float] = (), hint: str):
        if urlsplit(url).scheme not in ("http", "https"):
            raise SourceError(f"server {url}", expected="http://HOST:PORT/v1")
        self.root = url.rstrip("/").removesuffix("/v1")
        self._timeout = timeout
        self._pauses = pauses
        self._hint = hint

    def read(self, path: str) -> dict[str, object]:
        """The JSON object at a path. Raises `SourceError` when there is none."""
        ((_, value),) = self._call(path, None, functools.partial(_whole, self.root + path))
        return value

    def page(self, path: str) -> str:
        """The text at a path. Raises `SourceError` when there is none."""
        return self._call(path, None, lambda response: response.read(MAX_BYTES).decode(errors="replace"))

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
        return self._call(path, body, functools.partial(_events if stream else _whole, self.root + path))

    def _call(self, path: str, body: dict[str, object] | None, read: Callable[[HTTPResponse], T]) -> T:
        """What `read` makes of the response; asked for again after failures that may pass."""
        where = self.root + path
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        for pause in (*self._pauses, None):
            failed = "does not answer"
            try:
                with urlopen(HttpRequest(where, data, headers), timeout=self._timeout) as response:
                    failed = "has gone away"
                    return read(response)
            except HTTPError as error:
                problem = _said(error)
                if error.code in OF_THE_REQUEST and body is not None:
                    raise RejectedRequest(problem, where) from None
                if error.code not in TRANSIENT:
                    break
            except (HTTPException, OSError) as error:
                problem = str(getattr(error, "reason", error)) or type(error).__name__
            if pause is not None:
                time.sleep(pause)
        raise SourceError(f"the server {failed}: {problem}", where=where, hint=self._hint)


def _whole(where: str, response: HTTPResponse) -> list[Event]:
    """The one JSON object of a response."""
    return [(time.perf_counter(), _parsed(response.read(MAX_BYTES), where))]


def _events(where: str, response: HTTPResponse) -> list[Event]:
    """The JSON objects of an event stream, each with when it came."""
    events: list[Event] = []
    while line := response.readline(MAX_BYTES):
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
    text = error.read(10_000).decode(errors="replace")
    try:
        value = loads(text)
    except ValueError:
        value = None
    if isinstance(value, dict):
        text = _message({"error": value} | value)
    return f"{error.code} {error.reason}" + (f": {text[:300]}" if text else "")


def _message(event: Mapping[str, object]) -> str:
    error = event["error"]
    return str(error.get("message", error) if isinstance(error, dict) else error)
