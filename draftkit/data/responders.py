"""What answers prompts: the target in draftkit's own engine, or a server that has it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from http.client import HTTPException
from typing import Protocol
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request as HttpRequest
from urllib.request import urlopen

from transformers import PreTrainedModel

from draftkit.engines.vllm.request import sampling_fields
from draftkit.errors import SourceError
from draftkit.io.jsonfile import MAX_BYTES, loads
from draftkit.loading import load_model
from draftkit.models.devices import device_named, dtype_named, limit_threads
from draftkit.models.target import Target
from draftkit.requests import Request, SamplingParameters
from draftkit.runtime.engine import Engine

TIMEOUT = 3600.0  # seconds for one response, which may wait for others
PAUSES = (1.0, 5.0, 30.0)  # seconds before an attempt that failed is made again
TRANSIENT = {408, 409, 425, 429, 500, 502, 503, 504}
OF_THE_ROW = {400, 413, 422}  # the server understands the request and will not serve this prompt


@dataclass(frozen=True)
class Prompt:
    """Token ids to answer, the id of the row, and the seed of the answer's random numbers, below 2⁶³."""

    id: str
    tokens: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Refusal:
    """A prompt that is not answered, and why."""

    reason: str


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn and what ends them. `max_new_tokens` bounds each."""

    parameters: SamplingParameters
    max_new_tokens: int
    end_ids: frozenset[int]


class Responder(Protocol):
    """Answers prompts in their order, with the very token ids; the one that ended an answer is its last."""

    def respond(self, prompts: Sequence[Prompt]) -> list[tuple[int, ...] | Refusal]: ...


class EngineResponder:
    """The target in draftkit's engine, `concurrency` sequences at a time."""

    def __init__(self, model: PreTrainedModel, sampling: Sampling, concurrency: int):
        self.sampling = sampling
        self.engine = Engine(Target(model), None, num_speculative_tokens=0, num_slots=concurrency)

    def respond(self, prompts: Sequence[Prompt]) -> list[tuple[int, ...] | Refusal]:
        """The answers; a prompt that fills the target's context is refused."""
        positions = self.engine.target.positions
        requests = {
            index: Request(
                prompt.id,
                prompt.tokens,
                min(self.sampling.max_new_tokens, positions.room(len(prompt.tokens))),
                replace(self.sampling.parameters, seed=prompt.seed),
                self.sampling.end_ids,
            )
            for index, prompt in enumerate(prompts)
            if positions.room(len(prompt.tokens)) > 0
        }
        generations = self.engine.generate(requests.values())
        answers = {index: tuple(g.tokens) for index, g in zip(requests, generations, strict=True)}
        refusal = f"its tokens fill the target's context of {positions.most}"
        return [answers.get(i, Refusal(f"{len(p.tokens)} prompt tokens: {refusal}")) for i, p in enumerate(prompts)]


def engine_responder(
    target: str, sampling: Sampling, concurrency: int, *, device: str | None = None, dtype: str | None = None
) -> EngineResponder:
    """Load a target (path, Hub id or `zoo:target`) to answer; `device` and `dtype` as in `evaluate.Settings`."""
    place = device_named(device)
    model, _ = load_model(target, device=place, dtype=dtype_named(dtype, place))
    limit_threads(model)
    return EngineResponder(model, sampling, concurrency)


class EndpointResponder:
    """A server with OpenAI's `/v1/completions` that takes and returns token ids, as vLLM does (`return_token_ids`).

    `endpoint` is its address up to `/v1`; `model` None takes the only one that it serves. `OPENAI_API_KEY` is sent when
    it is set. Raises `SourceError` when the server cannot be reached.
    """

    def __init__(self, endpoint: str, sampling: Sampling, concurrency: int, model: str | None = None):
        if urlsplit(endpoint).scheme not in ("http", "https"):
            raise SourceError(f"endpoint {endpoint}", expected="http://HOST:PORT/v1")
        self.endpoint = endpoint.rstrip("/")
        self.sampling = sampling
        self.concurrency = concurrency
        self.model = model or self._served_model()

    def respond(self, prompts: Sequence[Prompt]) -> list[tuple[int, ...] | Refusal]:
        """The answers; a prompt that the server rejects is refused.

        Raises `SourceError` when the server goes away, does not know the model, or returns no token ids.
        """
        pool = ThreadPoolExecutor(self.concurrency)
        try:
            return list(pool.map(self._complete, prompts))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # after an interrupt, what has not begun never does

    def _served_model(self) -> str:
        listed = self._call("/models").get("data")
        names = [str(model["id"]) for model in listed] if isinstance(listed, list) else []
        if len(names) != 1:
            raise SourceError(
                f"the endpoint serves {', '.join(names) or 'no models'}",
                where=self.endpoint,
                hint="say which one with --served-model",
            )
        return names[0]

    def _complete(self, prompt: Prompt) -> tuple[int, ...] | Refusal:
        sampling = self.sampling
        drawn = replace(sampling.parameters, seed=prompt.seed)
        request = Request(prompt.id, prompt.tokens, sampling.max_new_tokens, drawn)
        body = {
            "model": self.model,
            "prompt": list(prompt.tokens),
            "return_token_ids": True,
        } | sampling_fields(request, sampling.end_ids)
        try:
            answer = self._call("/completions", body)
        except _RowError as error:
            return Refusal(str(error))
        choices = answer.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        tokens, read = choice.get("token_ids"), choice.get("prompt_token_ids")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise SourceError(
                "the endpoint returns text without its token ids",
                where=self.endpoint,
                expected="token_ids in each choice, as vLLM 0.10.2 and later returns for return_token_ids",
                hint="text cannot be turned back into the ids that were drawn: serve the target with vLLM",
            )
        if read is not None and read != body["prompt"]:
            raise SourceError(
                f"the endpoint has read {len(read)} prompt tokens where {len(prompt.tokens)} were sent",
                where=f"{self.endpoint}, row {prompt.id}",
                hint="something between here and the model changes prompts: pass the server's own address",
            )
        return tuple(tokens)

    def _call(self, path: str, body: dict[str, object] | None = None) -> dict[str, object]:
        """One request, made again after failures that may pass."""
        for pause in (*PAUSES, None):
            try:
                return self._send(path, body)
            except HTTPError as error:
                problem = _said(error)
                if error.code in OF_THE_ROW and body is not None:
                    raise _RowError(problem) from None
                if error.code not in TRANSIENT:
                    break
            except (URLError, HTTPException, OSError) as error:
                problem = str(getattr(error, "reason", error)) or type(error).__name__
            except ValueError:
                problem = "the answer is not a JSON object"
                break
            if pause is not None:
                time.sleep(pause)
        raise SourceError(
            f"the endpoint does not answer: {problem}",
            where=self.endpoint + path,
            hint="check address, model name and OPENAI_API_KEY; the same command goes on where this one stopped",
        )

    def _send(self, path: str, body: dict[str, object] | None) -> dict[str, object]:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        with urlopen(HttpRequest(self.endpoint + path, data, headers), timeout=TIMEOUT) as answer:
            value = loads(answer.read(MAX_BYTES))
        if not isinstance(value, dict):
            raise ValueError("not an object")
        return value


class _RowError(Exception):
    """The server will not serve one prompt."""


def _said(error: HTTPError) -> str:
    """The server's own words, where it has some."""
    text = error.read(10_000).decode(errors="replace")
    try:
        value = loads(text)
        inner = value.get("error", value)
        text = str(inner.get("message", text))
    except (ValueError, AttributeError):
        pass
    return f"{error.code} {error.reason}: {text[:300]}"
