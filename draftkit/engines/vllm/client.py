"""What draftkit asks a server with OpenAI's `/v1/completions` that takes and returns token ids, as vLLM's."""

from __future__ import annotations

import functools
import itertools
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

from draftkit.engines.vllm.metrics import Metrics, metrics_of, parse_samples
from draftkit.engines.vllm.records import Answer, DraftCounts
from draftkit.engines.vllm.request import completion_body
from draftkit.errors import FormatError, SourceError
from draftkit.io.jsonfile import MAX_BYTES, loads
from draftkit.requests import Request

TRANSIENT = {408, 409, 425, 429, 500, 502, 503, 504}
OF_THE_REQUEST = {400, 413, 422}  # the server understands the request and will not serve this prompt
SETTLING = 5.0  # seconds that the server's metrics may lag behind its answers
POLL = 0.1

T = TypeVar("T")
Event = tuple[float, dict[str, object]]  # when it came, and what it says


class RejectedRequest(SourceError):
    """A request that the server will not serve, though it serves others. `said`: in its own words."""

    def __init__(self, said: str, where: str):
        super().__init__(f"the server rejects the request: {said}", where=where)
        self.said = said


class CompletionsClient:
    """A server at `api`, its address up to `/v1`. `OPENAI_API_KEY` is sent when it is set.

    `timeout`: seconds without a byte. `pauses`: seconds before each further attempt after a failure that may pass.
    `hint`: what to do when the server does not answer. Raises `SourceError` for what is no address.
    """

    def __init__(self, api: str, *, timeout: float, pauses: Sequence[float] = (), hint: str):
        if urlsplit(api).scheme not in ("http", "https"):
            raise SourceError(f"server {api}", expected="http://HOST:PORT/v1")
        self.api = api.rstrip("/")
        self.root = self.api.removesuffix("/v1")
        self._timeout = timeout
        self._pauses = pauses
        self._hint = hint

    def models(self) -> list[str]:
        """The names that the server lists. Raises `SourceError` when it does not answer."""
        listed = self._object(f"{self.api}/models").get("data")
        names = [entry.get("id") for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
        return [name for name in names if isinstance(name, str)]

    def version(self) -> str | None:
        """What vLLM says of itself; None of a server that says nothing."""
        try:
            version = self._object(f"{self.root}/version").get("version")
        except SourceError:
            return None
        return version if isinstance(version, str) else None

    def metrics(self) -> Metrics:
        """vLLM's counters now. Raises `SourceError` when there are none."""
        where = f"{self.root}/metrics"
        page = self._call(where, None, lambda response: response.read(MAX_BYTES).decode(errors="replace"))
        try:
            return metrics_of(parse_samples(page))
        except FormatError as error:
            raise SourceError(f"the server's metrics cannot be read: {error}", where=where) from error

    def settled_metrics(self, finished: int) -> Metrics:
        """The counters once that many requests have finished, or after a while: they follow the answers."""
        until = time.monotonic() + SETTLING
        metrics = self.metrics()
        while metrics.finished is not None and metrics.finished < finished and time.monotonic() < until:
            time.sleep(POLL)
            metrics = self.metrics()
        return metrics

    def complete(self, model: str, request: Request, end_ids: frozenset[int], *, stream: bool = False) -> Answer:
        """The answer to a request; with `stream`, its times too.

        Raises `RejectedRequest` when the server serves no such prompt, and `SourceError` when it fails, gives no token
        ids, or has read another prompt.
        """
        where = f"{self.api}/completions"
        body = completion_body(model, request, end_ids, stream=stream)
        began = time.perf_counter()
        events = self._call(where, body, functools.partial(_events if stream else _whole, where))
        tokens: list[int] = []
        times: list[float] = []
        drafts = None
        for now, event in events:
            drafts = _request_counts(event) or drafts
            choice = _choice(event)
            ids, read = choice.get("token_ids"), choice.get("prompt_token_ids")
            if isinstance(ids, list) and ids and all(type(token) is int for token in ids):
                times.append(now)
                tokens += ids
            if isinstance(read, list) and read != body["prompt"]:
                raise SourceError(
                    f"the server has read {len(read)} prompt tokens where {len(request.prompt)} were sent",
                    where=f"{where}, request {request.id}",
                    hint="something between here and the model sends other prompt tokens: pass the server's address",
                )
        if not tokens:
            raise SourceError(
                "the server returns no token ids",
                where=where,
                expected="token_ids in each choice, as vLLM 0.10.2 and later returns for return_token_ids",
                hint="text without its token ids cannot be turned back into those drawn: serve the target with vLLM",
            )
        if not stream:
            return Answer(tuple(tokens), None, None, drafts=drafts)
        gaps = tuple(after - before for before, after in itertools.pairwise(times))
        return Answer(tuple(tokens), times[0] - began, times[-1] - began, gaps, drafts)

    def _object(self, where: str) -> dict[str, object]:
        ((_, value),) = self._call(where, None, functools.partial(_whole, where))
        return value

    def _call(self, where: str, body: dict[str, object] | None, read: Callable[[HTTPResponse], T]) -> T:
        """What `read` makes of the response; asked for again after failures that may pass."""
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
    raise SourceError("the server has gone away in the middle of an answer", where=where)


def _parsed(data: bytes, where: str) -> dict[str, object]:
    try:
        value = loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise SourceError("the server's answer is not a JSON object", where=where)
    return value


def _choice(event: dict[str, object]) -> dict[str, object]:
    """The only choice of an event; empty in the last event of a stream, which has none."""
    choices = event.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else {}
    return choice if isinstance(choice, dict) else {}


def _request_counts(event: dict[str, object]) -> DraftCounts | None:
    """What a server that runs with `--per-request-spec-decode-metrics` says of a request."""
    metrics = event.get("metrics")
    counted = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
    if not isinstance(counted, dict):
        return None
    histogram, drafted = counted.get("acceptance_histogram"), counted.get("num_draft_tokens")
    if not isinstance(histogram, list) or not isinstance(drafted, int):
        return None  # vLLM calls these fields experimental
    return DraftCounts.of_histogram(histogram, drafted)


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
