"""Answers by servers that have the target: any number of them, kept full by one window over all prompts."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from queue import PriorityQueue, SimpleQueue

from draftkit.data.responses import NextRow, Refusal, Responded, RowPrompt, Sampling
from draftkit.data.samples import Reason
from draftkit.engines.connections import Limits
from draftkit.engines.http import Api, RejectedRequest, Unanswered
from draftkit.engines.servers.server import possible
from draftkit.engines.vllm.client import CompletionsClient, OtherPrompt
from draftkit.errors import SourceError
from draftkit.media import RefusedMedia
from draftkit.requests import Request

LIMITS = Limits(silence=3600.0)  # one response, of which nothing is to be seen before its end, may wait for others
PAUSES = (1.0, 5.0, 30.0)  # seconds before an attempt that failed is made again
KEY = "OPENAI_API_KEY"  # the environment variable with the key of an endpoint that names no other

_log = logging.getLogger(__name__)


@dataclass
class _Endpoint:
    """A server, and how many of its answers are waited for."""

    client: CompletionsClient
    waiting: int = 0

    @property
    def root(self) -> str:
        return self.client.api.root


class EndpointResponder:
    """Servers with OpenAI's `/v1/completions` that take and return token ids, as vLLM does (`return_token_ids`).

    `endpoints`: their addresses up to `/v1`, each with `=NAME` behind it where the environment variable NAME has its
    key; to the others `OPENAI_API_KEY` is sent when it is set. `concurrency`: requests that are waited for together,
    over all. `model` None takes the only one that they serve. A server that does not answer, be it at once or later, is
    left out with a warning. Raises `SourceError` when none is left, and when they serve different models.
    """

    def __init__(self, endpoints: str | Sequence[str], sampling: Sampling, concurrency: int, model: str | None = None):
        named = [endpoints] if isinstance(endpoints, str) else list(dict.fromkeys(endpoints))
        self.sampling = sampling
        self.concurrency = concurrency
        self._endpoints = [_endpoint(name) for name in named]
        self._lock = threading.Lock()
        self._turn = itertools.count()
        self.model = model if model is not None and len(named) == 1 else self._served_model(model)

    def respond(self, ask: NextRow) -> Iterator[Responded]:
        """The answers; a prompt that the server rejects is refused.

        As many again as are waited for lie ready, so that no server waits for this process; a prompt that goes on with
        a row comes before those that begin one. Raises `SourceError` when no server is left, one does not know the
        model, or returns no token ids.
        """
        ready: PriorityQueue[tuple[int, int, RowPrompt | None]] = PriorityQueue()
        done: SimpleQueue[Responded | BaseException] = SimpleQueue()
        number, under_way = itertools.count(), 0
        threads: list[threading.Thread] = []
        try:
            while True:
                while under_way < 2 * self.concurrency and (prompt := ask()) is not None:
                    ready.put((0 if prompt.goes_on else 1, next(number), prompt))
                    under_way += 1
                    if len(threads) < self.concurrency:
                        threads.append(threading.Thread(target=self._work, args=(ready, done), daemon=True))
                        threads[-1].start()
                if not under_way:
                    return
                responded = done.get()
                if isinstance(responded, BaseException):
                    raise responded
                under_way -= 1
                yield responded
        finally:
            for _ in threads:  # after an interrupt, what has not begun never does
                ready.put((-1, next(number), None))

    def _work(
        self,
        ready: PriorityQueue[tuple[int, int, RowPrompt | None]],
        done: SimpleQueue[Responded | BaseException],
    ) -> None:
        """Answer what is ready, until there is None."""
        while (prompt := ready.get()[2]) is not None:
            try:
                done.put(self._answer(prompt))
            except BaseException as error:
                done.put(error)
                return

    def _answer(self, prompt: RowPrompt) -> Responded:
        """The answer of one server, and of another where that fails."""
        while True:
            endpoint = self._take()
            try:
                return self._complete(endpoint.client, prompt)
            except RejectedRequest as error:
                return prompt, Refusal(error.said)
            except RefusedMedia as error:
                return prompt, Refusal(str(error).partition("\n")[0], Reason.BAD_IMAGE)
            except Unanswered as error:
                self._leave_out(endpoint, error)
            finally:
                with self._lock:
                    endpoint.waiting -= 1

    def _take(self) -> _Endpoint:
        """The endpoint of which the fewest answers are waited for, in turn where that are several."""
        with self._lock:
            turn = next(self._turn)
            endpoints = self._endpoints[turn % len(self._endpoints) :] + self._endpoints[: turn % len(self._endpoints)]
            taken = min(endpoints, key=lambda endpoint: endpoint.waiting)
            taken.waiting += 1
            return taken

    def _leave_out(self, endpoint: _Endpoint, error: Unanswered) -> None:
        """Ask an endpoint nothing more. Raises `error` where it is the last one."""
        with self._lock:
            if endpoint not in self._endpoints:
                return
            if len(self._endpoints) == 1:
                raise error
            self._endpoints.remove(endpoint)
            left = len(self._endpoints)
        endpoint.client.api.leave()  # what else is waited for there is asked elsewhere at once
        why = str(error).partition("\n")[0]  # what to do next is for a run that ends by it
        _log.warning("%s is left out, %d left of the servers: %s", endpoint.root, left, why)

    def _complete(self, client: CompletionsClient, prompt: RowPrompt) -> Responded:
        """The answer; to messages with images only where the server has read them as the tokens of the prompt. Raises
        `SourceError` for what `respond` says."""
        drawn = replace(self.sampling.parameters, seed=prompt.seed)
        request = Request(prompt.id, prompt.tokens, self.sampling.max_new_tokens, drawn)
        if prompt.media is not None:
            request = replace(request, messages=prompt.media.sent(), chat=prompt.media.chat)
        ask = functools.partial(client.complete, self.model, request, self.sampling.end_ids)
        try:
            answer = possible(ask, request, client.api.root)
        except OtherPrompt as error:
            if prompt.media is None:
                raise
            return prompt, Refusal(error.said, Reason.OTHER_IDS)
        if prompt.media is not None and answer.prompt is None:
            raise SourceError(
                "the server does not say which tokens it has read of messages",
                where=client.api.root,
                expected="prompt_token_ids, as vLLM returns for return_token_ids",
            )
        return replace(prompt, tokens=answer.prompt or prompt.tokens), answer.ids

    def _served_model(self, wanted: str | None) -> str:
        """The model that all endpoints serve, the one that is `wanted` where they serve several."""
        with ThreadPoolExecutor(len(self._endpoints)) as pool:
            listed = list(pool.map(_models, self._endpoints))
        for endpoint, names in zip(list(self._endpoints), listed, strict=True):
            if isinstance(names, Unanswered):
                self._leave_out(endpoint, names)
        served = {endpoint.root: names for endpoint, names in zip(self._endpoints, _lists(listed), strict=True)}
        names = next(iter(served.values()))
        if wanted is not None:
            names = [wanted]
            served = {root: [name for name in of if name == wanted] or of for root, of in served.items()}
        if any(of != names for of in served.values()):
            raise SourceError(
                "the endpoints serve different models:"
                + "".join(f"\n    {root}: {', '.join(of) or 'none'}" for root, of in served.items()),
                hint="give endpoints of one model, and its name with --served-model where they have several",
            )
        if len(names) != 1:
            raise SourceError(
                f"the endpoint serves {', '.join(names) or 'no models'}",
                where=next(iter(served)),
                hint="say which one with --served-model",
            )
        return names[0]


def _endpoint(name: str) -> _Endpoint:
    """The endpoint of an address, or of `ADDRESS=NAME` with the variable of its key.

    Raises `SourceError` for what is no address, and for a key that is not there.
    """
    address, equals, key = name.rpartition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*", key):
        address, key = name, KEY
    elif not os.environ.get(key):
        raise SourceError(f"{key} is not set", where=name, expected="an environment variable with the endpoint's key")
    hint = f"check address, model name and {key}; the same command goes on where this one stopped"
    return _Endpoint(CompletionsClient(Api(address, limits=LIMITS, pauses=PAUSES, hint=hint, key=key)))


def _models(endpoint: _Endpoint) -> list[str] | Unanswered:
    try:
        return sorted(endpoint.client.models())
    except Unanswered as error:
        return error


def _lists(listed: Sequence[list[str] | Unanswered]) -> list[list[str]]:
    return [names for names in listed if not isinstance(names, Unanswered)]
