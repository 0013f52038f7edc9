"""How a request is put to vLLM, so that it draws and stops as draftkit does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from draftkit.requests import Request

# What a vLLM server takes from the target's generation config where a request leaves it out: the names that
# `ModelConfig.get_diff_sampling_param` of vLLM 0.32 lists. `scripts/check_vllm_engine.py` compares them with the
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


def sampling_fields(request: Request, end_ids: frozenset[int]) -> dict[str, object]:
    """The fields that `SamplingParams` and `/v1/completions` share, those of `SERVER_DEFAULTS` among them.

    Every token that ends the output is a stop token here, those of `end_ids` unless the request ignores them.
    """
    drawn = request.sampling
    fields: dict[str, object] = {
        "max_tokens": request.max_new_tokens,
        "temperature": drawn.temperature,
        "top_p": drawn.top_p,
        "top_k": drawn.top_k or -1,
        "min_p": drawn.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": sorted(request.stop_token_ids | (frozenset() if request.ignore_eos else end_ids)),
        "ignore_eos": True,
    }
    return fields | ({"seed": drawn.seed % 2**63} if drawn.temperature else {})


def completion_body(model: str, request: Request, end_ids: frozenset[int], *, stream: bool) -> dict[str, object]:
    """The whole body of a request to `/v1/completions`, by token ids in both directions."""
    body: dict[str, object] = {"model": model, "prompt": list(request.prompt), "return_token_ids": True}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}  # vLLM's counts of the request come with it
    return body | sampling_fields(request, end_ids)


def warm_up(requests: Sequence[Request], concurrency: int, k: int) -> list[Request]:
    """What is run before the measurement, because first calls compile and capture graphs."""
    return [replace(request, max_new_tokens=2 * (k + 1)) for request in requests[:concurrency]]
