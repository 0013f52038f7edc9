"""Speculative decoding without models: which tokens answer a prompt, and how many drafts each round accepts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Simulated:
    """An output in chunks: the first token, then what each round emits; and what each round accepted."""

    chunks: list[list[int]]
    accepted: list[int]

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk]


def simulate(prompt: Sequence[int], max_tokens: int, k: int) -> Simulated:
    """Any K (0: no draft) gives the same tokens."""
    tokens = [(7 * sum(prompt) + index) % 97 for index in range(max_tokens)]
    chunks, accepted, at = [tokens[:1]], [], 1
    while at < max_tokens:
        accepted.append((prompt[0] + 3 * len(accepted)) % (k + 1))
        chunks.append(tokens[at : at + accepted[-1] + 1])
        at += accepted[-1] + 1
    return Simulated(chunks, accepted if k else [])


def histogram(accepted: Sequence[int], k: int) -> list[int]:
    return [accepted.count(number) for number in range(k + 1)]


def per_position(accepted: Sequence[int], k: int) -> list[int]:
    return [sum(number > position for number in accepted) for position in range(k)]
