"""What answers prompts: the target in draftkit's own engine, or a server that has it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

from transformers import PreTrainedModel

from draftkit.engines.http import Api, Limits, RejectedRequest
from draftkit.engines.servers.server import possible
from draftkit.engines.vllm.client import CompletionsClient
from draftkit.errors import SourceError, command
from draftkit.layout.digest import weights_sha256
from draftkit.loading import OpenedTarget, open_target
from draftkit.requests import Request, SamplingParameters
from draftkit.runtime.engine import Engine
from draftkit.targets.devices import device_named, dtype_named, tune_for_cpu
from draftkit.targets.target import Target

LIMITS = Limits(silence=3600.0)  # one response, of which nothing is to be seen before its end, may wait for others
PAUSES = (1.0, 5.0, 30.0)  # seconds before an attempt that failed is made again


@dataclass(frozen=True)
class RowPrompt:
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

    def respond(self, prompts: Sequence[RowPrompt]) -> list[tuple[int, ...] | Refusal]: ...


class EngineResponder:
    """The target in draftkit's engine, `concurrency` sequences at a time."""

    def __init__(self, model: PreTrainedModel, sampling: Sampling, concurrency: int):
        self.sampling = sampling
        self.engine = Engine(Target(model), None, num_speculative_tokens=0, num_slots=concurrency)

    def respond(self, prompts: Sequence[RowPrompt]) -> list[tuple[int, ...] | Refusal]:
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


def engine_weights(target: str | OpenedTarget) -> str:
    """The digest of the weights that `engine_responder` loads. Raises `DraftkitError` where it would not load them."""
    target = open_target(target)
    target.require_runtime(_served_instead(target.name))  # before all of them are read
    return weights_sha256(target.folder)


def engine_responder(
    target: str | OpenedTarget,
    sampling: Sampling,
    concurrency: int,
    *,
    device: str | None = None,
    dtype: str | None = None,
) -> EngineResponder:
    """Load a target (path, Hub id or `zoo:target`) to answer; `device` and `dtype` as in `evaluate.Settings`."""
    target = open_target(target)
    target.require_runtime(_served_instead(target.name))
    place = device_named(device)
    model = target.load(device=place, dtype=dtype_named(dtype, place))
    tune_for_cpu(model)
    return EngineResponder(model, sampling, concurrency)


def _served_instead(target: str) -> str:
    return f"{command('vllm', 'serve', target)}, and --endpoint http://HOST:PORT/v1 of that server"


class EndpointResponder:
    """A server with OpenAI's `/v1/completions` that takes and returns token ids, as vLLM does (`return_token_ids`).

    `endpoint` is its address up to `/v1`; `model` None takes the only one that it serves. `OPENAI_API_KEY` is sent when
    it is set. Raises `SourceError` when the server cannot be reached.
    """

    def __init__(self, endpoint: str, sampling: Sampling, concurrency: int, model: str | None = None):
        self.client = CompletionsClient(
            Api(
                endpoint,
                limits=LIMITS,
                pauses=PAUSES,
                hint="check address, model name and OPENAI_API_KEY; the same command goes on where this one stopped",
            )
        )
        self.sampling = sampling
        self.concurrency = concurrency
        self.model = model or self._served_model()

    def respond(self, prompts: Sequence[RowPrompt]) -> list[tuple[int, ...] | Refusal]:
        """The answers; a prompt that the server rejects is refused.

        Raises `SourceError` when the server goes away, does not know the model, or returns no token ids.
        """
        pool = ThreadPoolExecutor(self.concurrency)
        try:
            return list(pool.map(self._complete, prompts))
        except BaseException:
            self.client.api.leave()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # after an interrupt, what has not begun never does

    def _served_model(self) -> str:
        names = self.client.models()
        if len(names) != 1:
            raise SourceError(
                f"the endpoint serves {', '.join(names) or 'no models'}",
                where=self.client.api.root,
                hint="say which one with --served-model",
            )
        return names[0]

    def _complete(self, prompt: RowPrompt) -> tuple[int, ...] | Refusal:
        drawn = replace(self.sampling.parameters, seed=prompt.seed)
        request = Request(prompt.id, prompt.tokens, self.sampling.max_new_tokens, drawn)
        ask = functools.partial(self.client.complete, self.model, request, self.sampling.end_ids)
        try:
            return possible(ask, request, self.client.api.root).ids
        except RejectedRequest as error:
            return Refusal(error.said)
