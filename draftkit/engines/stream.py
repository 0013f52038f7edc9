"""OpenAI's way of streaming an answer, as every server speaks it, with the token ids that some add."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftkit.engines.http import Event
from draftkit.engines.records import Answer, DraftCounts, Token, whole_number
from draftkit.requests import Request

ID = "token_id:"  # how vLLM writes a token among log-probabilities for `return_tokens_as_token_ids`


@dataclass(frozen=True)
class Chunk:
    """What one event adds to an answer, at `time`: one round's tokens, unless the server puts rounds together.

    `tokens`: ids, else their texts where log-probabilities name them; empty where only `text` is told.
    """

    time: float
    text: str
    tokens: tuple[Token, ...] = ()
    logprobs: tuple[float, ...] = ()
    alternatives: tuple[Mapping[Token, float], ...] = ()


def sampling_of(request: Request) -> dict[str, object]:
    """How a request is drawn, in the names that servers share; what a server would else take from elsewhere is said."""
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
    }
    return fields | ({"seed": drawn.seed % 2**63} if drawn.temperature else {})


def endings(request: Request, end_ids: frozenset[int] | None) -> dict[str, object]:
    """What ends an answer, every token of it by name; where `end_ids` are not known (None), the server's own tokens."""
    if end_ids is None:
        return {"ignore_eos": request.ignore_eos, "stop_token_ids": sorted(request.stop_token_ids)}
    stops = request.stop_token_ids | (frozenset() if request.ignore_eos else end_ids)
    return {"ignore_eos": True, "stop_token_ids": sorted(stops)}


def prompt_of(request: Request) -> dict[str, object]:
    """The prompt as `/v1/completions` takes it, or the messages as `/v1/chat/completions` does."""
    if not request.messages:
        return {"prompt": list(request.prompt)}
    messages = [{"role": role, "content": content} for role, content in request.messages]
    body: dict[str, object] = {"messages": messages, **request.chat}
    return body if request.thinking is None else body | {"chat_template_kwargs": {"enable_thinking": request.thinking}}


def logprobs_of(request: Request, *, always: bool = False) -> dict[str, object]:
    """Ask for log-probabilities: as many beside each token's as the request says."""
    count = request.alternatives
    if not count and not always:
        return {}
    return {"logprobs": True, "top_logprobs": count} if request.messages else {"logprobs": max(count, 1)}


def path_of(request: Request) -> str:
    return "/v1/chat/completions" if request.messages else "/v1/completions"


def chunks_of(events: Sequence[Event]) -> list[Chunk]:
    """The chunks of a stream; an event that adds no token is not one."""
    chunks = [_chunk(time, choice_of(event)) for time, event in events]
    return [chunk for chunk in chunks if chunk.tokens or chunk.text]


def answer_of(chunks: Sequence[Chunk], began: float, drafts: DraftCounts | None, count: int | None = None) -> Answer:
    """The whole answer. `count`: its tokens, as the server says, where chunks name none. Chunks are one or more.

    Log-probabilities of some tokens alone are of no use: nothing says of which.
    """
    times = [chunk.time for chunk in chunks]
    tokens = tuple(itertools.chain.from_iterable(chunk.tokens for chunk in chunks))
    alternatives = tuple(itertools.chain.from_iterable(chunk.alternatives for chunk in chunks))
    logprobs = tuple(itertools.chain.from_iterable(chunk.logprobs for chunk in chunks))
    return Answer(
        tokens,
        times[0] - began,
        times[-1] - began,
        tuple(after - before for before, after in itertools.pairwise(times)),
        drafts,
        text="".join(chunk.text for chunk in chunks),
        count=count,
        logprobs=logprobs if logprobs and len(logprobs) == len(tokens) else None,
        alternatives=alternatives if alternatives and len(alternatives) == len(tokens) else None,
    )


def choice_of(event: Mapping[str, object]) -> dict[str, object]:
    """The only choice of an event; empty in the last event of a stream, which has none."""
    choices = event.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else {}
    return choice if isinstance(choice, dict) else {}


def completion_tokens(events: Sequence[Event]) -> int | None:
    """How many tokens the server counts in the answer. Raises `ValueError` for what is no count."""
    for _, event in reversed(events):
        usage = event.get("usage")
        count = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if count is not None:
            return whole_number(count, "completion_tokens")
    return None


def _chunk(time: float, choice: Mapping[str, object]) -> Chunk:
    message = choice.get("delta") or choice.get("message")
    if isinstance(message, dict):
        said = (message.get("reasoning") or message.get("reasoning_content"), message.get("content"))
        text = "".join(part for part in said if isinstance(part, str))
    else:
        text = str(choice.get("text") or "")
    rows = _rows(choice.get("logprobs"))
    ids = choice.get("token_ids")
    named = tuple(ids) if isinstance(ids, list) else None
    return Chunk(
        time,
        text,
        tuple(token for token, _, _ in rows) if named is None else named,
        tuple(logprob for _, logprob, _ in rows),
        tuple(others for _, _, others in rows),
    )


def _rows(logprobs: object) -> list[tuple[Token, float, dict[Token, float]]]:
    """Read of each token itself, its log-probability, and those of the likeliest ones, in either form of OpenAI's."""
    if not isinstance(logprobs, dict):
        return []
    content = logprobs.get("content")
    if isinstance(content, list):
        return [
            (_token(row["token"]), float(row["logprob"]), {_token(o["token"]): o["logprob"] for o in _tops(row)})
            for row in content
        ]
    names, values, tops = (logprobs.get(name) or [] for name in ("tokens", "token_logprobs", "top_logprobs"))
    if not any(value is not None for value in values):
        return []
    return [
        (_token(name), float(value), {_token(o): p for o, p in (top or {}).items()})
        for name, value, top in itertools.zip_longest(names, values, tops)
    ]


def _tops(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    tops = row.get("top_logprobs")
    return tops if isinstance(tops, list) else []


def _token(name: object) -> Token:
    """A token as log-probabilities name it. Raises `ValueError` for what is no name."""
    if not isinstance(name, str):
        raise ValueError(f"a token is called {name}")
    number = name.removeprefix(ID)
    return int(number) if number != name and number.isdecimal() else name
