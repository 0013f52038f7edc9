"""What draftkit asks a vLLM server: one completion, streamed and timed; and its counters."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request as HttpRequest
from urllib.request import urlopen

from draftkit.engines.vllm.metrics import draft_counts, parse_samples, total
from draftkit.engines.vllm.records import Answer, DraftCounts
from draftkit.engines.vllm.request import sampling_fields
from draftkit.errors import FormatError, SourceError
from draftkit.io.jsonfile import loads
from draftkit.requests import Request

TIMEOUT = 600.0  # seconds without a byte
SETTLING = 5.0  # seconds that the server's metrics may lag behind its answers
POLL = 0.1


@dataclass(frozen=True)
class Metrics:
    """A server's counters at one time: of drafts, and of requests and tokens where it has them."""

    drafts: DraftCounts | None
    finished: int | None
    tokens: int | None


class VllmServer:
    """The OpenAI-compatible server at `url`, with or without `/v1`. `OPENAI_API_KEY` is sent when it is set."""

    def __init__(self, url: str):
        if urlsplit(url).scheme not in ("http", "https"):
            raise SourceError(f"server {url}", expected="http://HOST:PORT")
        self.url = url.rstrip("/").removesuffix("/v1")

    def model(self) -> str:
        """The first name that the server lists. Raises `SourceError` when it does not answer."""
        listed = self._json("/v1/models").get("data")
        names = [entry.get("id") for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
        if not names or not isinstance(names[0], str):
            raise SourceError("the server lists no models", where=f"{self.url}/v1/models")
        return names[0]

    def version(self) -> str | None:
        """What vLLM says of itself; None of a server that says nothing."""
        try:
            version = self._json("/version").get("version")
        except SourceError:
            return None
        return version if isinstance(version, str) else None

    def metrics(self) -> Metrics:
        """The counters now. Raises `SourceError` when there are none."""
        path = "/metrics"
        try:
            with self._open(path) as response:
                samples = parse_samples(response.read().decode(errors="replace"))
        except FormatError as error:
            raise SourceError(f"the server's metrics cannot be read: {error}", where=self.url + path) from error
        finished, tokens = (total(samples, f"vllm:{name}") for name in ("request_success", "generation_tokens"))
        return Metrics(draft_counts(samples), finished, tokens)

    def settled_metrics(self, finished: int) -> Metrics:
        """The counters once that many requests have finished, or after a while: they follow the answers."""
        until = time.monotonic() + SETTLING
        metrics = self.metrics()
        while metrics.finished is not None and metrics.finished < finished and time.monotonic() < until:
            time.sleep(POLL)
            metrics = self.metrics()
        return metrics

    def complete(self, model: str, request: Request, end_ids: frozenset[int]) -> Answer:
        """One request, streamed. Raises `SourceError` when the server fails, or gives no token ids."""
        body = {
            "model": model,
            "prompt": list(request.prompt),
            "stream": True,
            "stream_options": {"include_usage": True},  # vLLM's counts of the request come with it
            "return_token_ids": True,
        } | sampling_fields(request, end_ids)
        tokens: list[int] = []
        times: list[float] = []
        drafts = None
        began = time.perf_counter()
        for event in self._events("/v1/completions", body):
            drafts = _request_counts(event) or drafts
            choice = _choice(event)
            ids, read = choice.get("token_ids"), choice.get("prompt_token_ids")
            if isinstance(ids, list) and ids:
                times.append(time.perf_counter())
                tokens += ids
            if read is not None and read != body["prompt"]:
                raise SourceError(
                    f"the server has read other prompt tokens than were sent in request {request.id}",
                    where=self.url,
                    hint="something between here and the model changes prompts: pass the server's own address",
                )
        if not tokens:
            raise SourceError(
                "the server returns no token ids",
                where=f"{self.url}/v1/completions",
                expected="token_ids in each choice, as vLLM 0.10.2 and later returns for return_token_ids",
            )
        gaps = tuple(after - before for before, after in itertools.pairwise(times))
        return Answer(tuple(tokens), times[0] - began, times[-1] - began, gaps, drafts)

    def _events(self, path: str, body: dict[str, object]) -> Iterator[dict[str, object]]:
        """The JSON objects of an event stream."""
        with self._open(path, body) as response:
            try:
                for line in response:
                    data = line.removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        return
                    if not line.startswith(b"data:"):
                        continue
                    event = _object(data, self.url + path)
                    if "error" in event:
                        raise SourceError(f"the server has failed: {_message(event)}", where=self.url + path)
                    yield event
            except (HTTPException, OSError) as error:
                raise SourceError(f"the server has gone away: {_reason(error)}", where=self.url + path) from error
        raise SourceError("the server has gone away in the middle of an answer", where=self.url + path)

    def _json(self, path: str) -> dict[str, object]:
        with self._open(path) as response:
            return _object(response.read(), self.url + path)

    def _open(self, path: str, body: dict[str, object] | None = None) -> HTTPResponse:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            return urlopen(HttpRequest(self.url + path, data, headers), timeout=TIMEOUT)
        except HTTPError as error:
            said = error.read(1000).decode(errors="replace")
            problem = f"{error.code} {error.reason}{f': {said}' if said else ''}"
        except (HTTPException, OSError) as error:
            problem = _reason(error)
        raise SourceError(
            f"the server does not answer: {problem}",
            where=self.url + path,
            hint="pass the address of a running `vllm serve`, and OPENAI_API_KEY where it asks for a key",
        )


def _object(data: bytes, where: str) -> dict[str, object]:
    try:
        value = loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise SourceError("the server's answer is not a JSON object", where=where)
    return value


def _choice(event: dict[str, object]) -> dict[str, object]:
    """The only choice of an event; empty in the last event, which has none."""
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


def _message(event: dict[str, object]) -> str:
    error = event["error"]
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", error)) or type(error).__name__
