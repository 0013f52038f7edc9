"""Deciding which draft tokens stand.

B sequences, K draft tokens, V target vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Verdict(NamedTuple):
    """`tokens` int64 [B, K+1]: what the target emits; the first `counts` int64 [B] of each row stand."""

    tokens: Tensor
    counts: Tensor


def verify_greedy(drafted: Tensor, logits: Tensor) -> Verdict:
    """Accept the longest prefix of `drafted` [B, K] that equals the target's argmax.

    `logits` [B, K+1, V]: row i is the target's prediction after the first i draft tokens. An accepted draft token *is*
    the argmax of its row, so the argmax row holds accepted prefix and the target's own token alike.
    """
    best = logits.argmax(-1)
    agreed = (drafted == best[:, :-1]).long().cumprod(-1).sum(-1)
    return Verdict(best, agreed + 1)


def draw_greedy(step: int, logits: Tensor, ids: Tensor | None = None) -> Tensor:
    """`protocol.Draw` at temperature 0: the most likely token."""
    best = logits.argmax(-1)
    return best if ids is None else ids[best]
