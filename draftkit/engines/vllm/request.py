"""How a request is put to vLLM, so that it draws and stops as draftkit does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from draftkit.engines.stream import endings, logprobs_of, prompt_of, sampling_of
from draftkit.requests import Request

# What a vLLM server takes from the target's generation config where a request leaves it out: the names that
# `ModelConfig.get_diff_sampling_param` of vLLM 0.32 lists. `scripts/check/vllm_engine.py` compares them with the
# installed vLLM. There `max_new_tokens` becomes `max_tokens`.
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
