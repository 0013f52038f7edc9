"""What goes into verification and what comes out of it.

B requests, K draft tokens, V vocabulary. A round decides K+1 positions: row i of the target's logits is its prediction
after the first i draft tokens, and decides position start + i.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftkit.runtime.batch import SamplingTensors


class Drafted(NamedTuple):
    """The draft tokens of a round.

    `tokens` int64 [B, K]: the first `lengths` int64 [B] of each row are drafts, the rest is padding of any value.
    `active` bool [B]: the rows that hold a request. `one_hot` bool [B]: the rows whose drafts were chosen, not drawn.
    `probs` float32 [B, K, V]: what the others were drawn from (of any value in one-hot rows and padding); None where
    all rows are one-hot. A length may depend on the text and on probabilities of earlier drafts, never on the token
    drawn at its end: that would bias the output.
    """

    tokens: Tensor
    lengths: Tensor
    active: Tensor
    one_hot: Tensor
    probs: Tensor | None

    @classmethod
    def full(cls, tokens: Tensor, probs: Tensor | None = None) -> Drafted:
        """A round of K drafts in every row, all drawn from `probs`, or all one-hot without them."""
        rows, k = tokens.shape
        lengths = torch.full((rows,), k, device=tokens.device)
        active = torch.ones(rows, dtype=torch.bool, device=tokens.device)
        return cls(tokens, lengths, active, torch.full_like(active, probs is None), probs)

    @property
    def valid(self) -> Tensor:
        """bool [B, K]: drafts of active rows."""
        index = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return (index < self.lengths[:, None]) & self.active[:, None]


class Emitted(NamedTuple):
    """`tokens` int64 [B, K+1]: what the target emits, of which the first `counts` int64 [B] stand; 0 after them.

    `counts` is the number of accepted drafts plus one, 0 in inactive rows. `expected` float32 [B, K]: the probability
    that a draft stands given that those before it do, 0 in padding. Over many rounds, the number that accept at least
    k drafts agrees with the sum of expected[:, k−1] over those that accept at least k−1; it is smaller for drafts
    drawn in coupled mode.
    """

    tokens: Tensor
    counts: Tensor
    expected: Tensor

    def padded(self, k: int) -> Emitted:
        """The same of a round of `k` drafts, of which those beyond K were left out."""
        beyond = k - self.expected.shape[1]
        return Emitted(pad(self.tokens, (0, beyond)), self.counts, pad(self.expected, (0, beyond))) if beyond else self

    @property
    def accepted(self) -> Tensor:
        """int64 [B]: how many drafts stand."""
        return (self.counts - 1).clamp(min=0)


class Verify(Protocol):
    """A verification mode: it decides which drafts are accepted, and which token the target adds."""

    def __call__(self, drafted: Drafted, logits: Tensor, parameters: SamplingTensors, start: Tensor) -> Emitted:
        """Decide a round from the target's `logits` [B, K+1, V]; `start` int64 [B] is the position of the first draft.

        Logits of padding and of inactive rows may be anything, NaN included.
        """


def emit(drafted: Drafted, accepted: Tensor, token: Tensor, expected: Tensor) -> Emitted:
    """The accepted drafts, then `token` [B]."""
    last = pad(drafted.tokens, (0, 1))
    return emit_chosen(drafted, accepted, last.scatter(1, accepted[:, None], token[:, None]), expected)


def emit_chosen(drafted: Drafted, accepted: Tensor, chosen: Tensor, expected: Tensor) -> Emitted:
    """The first tokens of `chosen` [B, K+1], one more than `accepted`."""
    counts = torch.where(drafted.active, accepted + 1, 0)
    index = torch.arange(chosen.shape[1], device=chosen.device)
    return Emitted(torch.where(index < counts[:, None], chosen, 0), counts, expected)
