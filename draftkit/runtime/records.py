"""The raw record of a run: one entry per round. Every statistic is derived from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["eos", "length"]


@dataclass(frozen=True, slots=True)
class Round:
    """One draft–verify round of one request.

    `position`: tokens of prompt and output before it. `drafted` = K and `accepted` ≤ K count draft tokens, before any
    truncation; `emitted` tokens went into the output (at most accepted + 1, fewer where the generation ended).
    """

    position: int
    drafted: int
    accepted: int
    emitted: int


@dataclass
class Generation:
    """The output of one request: token ids (an end-of-sequence token included), and the rounds that made it.

    The first token comes from the prefill and belongs to no round. `finished` is None while the request runs.
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finished: FinishReason | None = None


@dataclass(frozen=True)
class Request:
    """A prompt as token ids, and how many tokens to generate at most."""

    id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
