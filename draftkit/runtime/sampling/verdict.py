"""What goes into verification and what comes out of it.

B requests, K draft tokens, V vocabulary. A round decides K+1 positions: row i of the target's logits is its prediction
after the first i draft tokens, and decides position start + i.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from draftkit.runtime.sampling.parameters import SamplingTensors


class Drafted(NamedTuple):
    """The draft tokens of a round.

    `tokens` int64 [B, K]: the first `lengths` int64 [B] of each row are drafts, the rest is padding of any value.
    `active` bool [B]: rows that hold a request. `probs` float32 [B, K, V]: what the tokens were drawn from, whatever
    in rows of `one_hot` bool [B], whose drafts were not drawn but chosen; None where all were. A length may depend on
    the text and on earlier drafts' probabilities, never on the token drawn at its end, or the output is biased.
    """

    tokens: Tensor
    lengths: Tensor
    active: Tensor
    one_hot: Tensor
    probs: Tensor | None

    @classmethod
    def of(cls, tokens: Tensor, probs: Tensor | None = None) -> Drafted:
        """A full batch: K drafts in every row, all drawn from `probs`, or all one-hot without them."""
        rows = torch.full_like(tokens[:, :1], True, dtype=torch.bool).flatten() if tokens.shape[1] else None
        return cls(tokens, tokens, tokens, rows or tokens, probs)


class Verdict(NamedTuple):
    """`tokens` int64 [B, K+1]: what the target emits, of which the first `counts` int64 [B] stand; 0 after them.

    `counts` is the number of accepted drafts plus one, 0 in inactive rows. `expected` float32 [B, K]: the probability,
    given that all drafts before it stand, that the next one does, known before it was drawn; 0 where there is none. So
    over many rounds, the rounds that accept k drafts and the sum of expected[:, k−1] over those that accept k−1 agree.
    """

    tokens: Tensor
    counts: Tensor
    expected: Tensor

    @property
    def accepted(self) -> Tensor:
        """int64 [B]: how many drafts stand."""
        return (self.counts - 1).clamp(min=0)


class Verify(Protocol):
    """A verification mode."""

    def __call__(self, drafted: Drafted, logits: Tensor, parameters: SamplingTensors, start: Tensor) -> Verdict:
        """Decide a round from the target's `logits` [B, K+1, V]; `start` int64 [B] is the position of the first draft.

        Logits of padding and of inactive rows may be anything, NaN included.
        """
