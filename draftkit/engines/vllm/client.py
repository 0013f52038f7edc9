"""What draftkit asks a server with OpenAI's `/v1/completions` that takes and returns token ids, as vLLM's."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from draftkit.engines.http import Api, Event
from draftkit.engines.prometheus import MetricSample, by_position, total
from draftkit.engines.records import Answer, Counters, DraftCounts, whole_number, whole_numbers
from draftkit.engines.stream import (
    answer_of,
    choice_of,
    chunks_of,
    endings,
    logprobs_of,
    path_of,
    prompt_of,
    sampling_of,
)
from draftkit.errors import SourceError
from draftkit.requests import Request


class CompletionsClient:
    """A server with OpenAI's completions, reached through `api`."""

    def __init__(self, api: Api):
        self.api = api

    def models(self) -> list[str]:
        """The names that the server lists. Raises `SourceError` when it does not answer."""
        listed = self.api.read("/v1/models").get("data")
        names = [entry.get("id") for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
        return [name for name in names if isinstance(name, str)]

    def complete(self, model: str, request: Request, end_ids: frozenset[int] | None, *, stream: bool = False) -> Answer:
        """The answer to a request; with `stream`, its times too.

        Raises `RejectedRequest` when the server serves no such prompt, `OtherPrompt` when it has read other token ids,
        and `SourceError` when it fails or gives no token ids.
        """
        body = completion_body(model, request, end_ids, stream=stream)
        where = self.api.root + path_of(request)
        began = time.perf_counter()
        events = self.api.ask(path_of(request), body, stream=stream)
        read = next((found for _, event in events if (found := _read_prompt(event)) is not None), None)
        if read is not None and request.prompt and read != request.prompt:
            raise OtherPrompt(read, request, where)
        chunks = chunks_of(events)
        if not chunks or any(isinstance(token, str) for chunk in chunks for token in chunk.tokens or ("",)):
            raise SourceError(
                "the server returns no token ids",
                where=where,
                expected="token_ids in each choice, as vLLM returns for return_token_ids",
                hint="text without its token ids cannot be turned back into those drawn: serve the target with vLLM",
            )
        answer = answer_of(chunks, began, _counts(events))
        return answer if stream else Answer(answer.tokens, None, None, drafts=answer.drafts, prompt=read)


class OtherPrompt(SourceError):
    """A server has read other token ids than a request has."""

    def __init__(self, read: tuple[int, ...], request: Request, where: str):
        self.said = f"the server has read {len(read)} prompt tokens where {len(request.prompt)} were sent"
        if request.messages:
            self.said = f"the server reads the messages as {len(read)} other tokens than the {len(request.prompt)} here"
        super().__init__(
            self.said,
            where=f"{where}, request {request.id}",
            hint="something between here and the model sends other prompt tokens: pass the server's address"
            if not request.messages
            else "its chat template or its image processor is another one: serve the same folder that --target names",
        )


def _read_prompt(event: Mapping[str, object]) -> tuple[int, ...] | None:
    """The prompt's ids that the server says it has read: of a completion with the choice, of a chat beside it."""
    read = choice_of(event).get("prompt_token_ids") or event.get("prompt_token_ids")
    return tuple(read) if isinstance(read, list) else None


def _counts(events: list[Event]) -> DraftCounts | None:
    """What a server that runs with `--per-request-spec-decode-metrics` says of a request."""
    for _, event in reversed(events):
        metrics = event.get("metrics")
        counted = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
        if isinstance(counted, dict):
            histogram, drafted = counted.get("acceptance_histogram"), counted.get("num_draft_tokens")
            if isinstance(histogram, list) and drafted is not None:  # vLLM calls these fields experimental
                steps = whole_numbers(histogram, "acceptance_histogram")
                most = sum(steps) * (len(steps) - 1)
                return DraftCounts.of_histogram(steps, whole_number(drafted, "num_draft_tokens", most))
    return None


def counters_of(samples: Sequence[MetricSample]) -> Counters:
    """What a measurement needs of vLLM's counters, summed over its engines."""
    finished, tokens = (total(samples, f"vllm:{name}") for name in ("request_success", "generation_tokens"))
    return Counters(draft_counts(samples), finished, tokens)


def draft_counts(samples: Sequence[MetricSample]) -> DraftCounts | None:
    """The counters of speculative decoding; None of a server without it."""
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    drafts, drafted, accepted = (total(samples, f"vllm:spec_decode_{name}") for name in names)
    if drafts is None or drafted is None or accepted is None:
        return None
    return DraftCounts(drafts, drafted, accepted, by_position(samples, "vllm:spec_decode_num_accepted_tokens_per_pos"))


# What a vLLM server takes from the target's generation config where a request leaves it out: the names that
# `ModelConfig.get_diff_sampling_param` of vLLM 0.32 lists. There `max_new_tokens` becomes `max_tokens`.
SERVER_DEFAULTS = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "max_tokens",
)


def sampling_fields(request: Request, end_ids: frozenset[int] | None) -> dict[str, object]:
    """The fields that `SamplingParams` and `/v1/completions` share, those of `SERVER_DEFAULTS` among them.

    Every token that ends the output is a stop token here, those of `end_ids` unless the request ignores them.
    """
    return sampling_of(request) | endings(request, end_ids)


def completion_body(model: str, request: Request, end_ids: frozenset[int] | None, *, stream: bool) -> dict[str, object]:
    """The whole body of a request to `/v1/completions`, by token ids in both directions; of messages, to the chat."""
    body: dict[str, object] = {"model": model, **prompt_of(request), "return_token_ids": True}
    if request.alternatives:
        body |= logprobs_of(request) | {"return_tokens_as_token_ids": True}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}  # vLLM's counts of the request come with it
    return body | sampling_fields(request, end_ids)


def warm_up(requests: Sequence[Request], concurrency: int, k: int) -> list[Request]:
    """What is run before the measurement, because first calls compile and capture graphs."""
    return [replace(request, max_new_tokens=2 * (k + 1)) for request in requests[:concurrency]]
