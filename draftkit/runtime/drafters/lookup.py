"""Drafters that look the next tokens up in the text itself. B sequences, C positions, K draft tokens, V vocabulary."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from draftkit.runtime.drafters.protocol import Committed, Draw, Grow, NewSequence, Proposal
from draftkit.runtime.memory_plan import SlotBytes
from draftkit.runtime.ops.expand_rows import expand_rows
from draftkit.targets.states import AuxLayers

TOKENS = torch.int64


class LookupDrafter(ABC):
    """Keeps the text of every slot, and proposes what `look_up` finds in it.

    The tokens are certain, so they are drawn from logits that leave no other choice.
    """

    max_tokens = None
    max_positions = None
    positions_end = False
    overlap = 0
    module = None
    slot_bytes: SlotBytes | None = None

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu"):
        self.vocab_size = vocab_size
        self.context = torch.zeros(0, 0, dtype=TOKENS, device=device)  # [slots + 1, C]

    @abstractmethod
    def look_up(self, context: Tensor, known: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Drafts int64 [B, K] for texts int64 [B, C] of `known` int64 [B] tokens, and how many of them count [B].

        What follows those may be any tokens.
        """

    @property
    def aux_layers(self) -> AuxLayers | None:
        return None

    def allocate(self, num_slots: int, capacity: int, k: int) -> None:
        self.context = self.context.new_zeros(num_slots + 1, capacity)  # the last one for slot −1, which is none

    def prefill(self, prompts: Sequence[NewSequence]) -> None:
        for prompt in prompts:
            self.context[prompt.slot, : len(prompt.tokens)] = prompt.tokens

    @abstractmethod
    def occurrences(self, context: Tensor, known: Tensor) -> Tensor:
        """Where in texts int64 [B, C] the match of their ends that counts for a tree occurs earlier: bool [B, C], true
        at its last token."""

    @torch.inference_mode()
    def propose(self, committed: Committed, k: int, draw: Draw) -> Proposal:
        context, known = self._texts(committed)
        tokens, lengths = self.look_up(context, known, k)
        drafted = [draw(step, self._only(tokens[:, step])) for step in range(k)]
        return Proposal(torch.stack(drafted, dim=1), lengths)

    @torch.inference_mode()
    def expand(self, committed: Committed, depth: int, grow: Grow) -> None:
        """A node's children are the tokens that went on like that, each with its share of the occurrences."""
        context, known = self._texts(committed)
        distinct = numbered(context)
        tokens = torch.zeros_like(context).scatter_(1, distinct, context)  # by their numbers
        occurs = self.occurrences(context, known)[:, None]  # [B, W, C]
        for step in range(depth):
            follower, number = context.roll(-step - 1, 1)[:, None], distinct.roll(-step - 1, 1)[:, None]
            going = occurs & _has(context, known, step)[:, None]
            counts = torch.zeros_like(going, dtype=torch.float32)
            counts = counts.scatter_add_(2, number.expand_as(going), going.float())
            shares = counts / (occurs.sum(2, keepdim=True) + 1)  # the text's end is an occurrence
            shares, order = shares.sort(dim=2, descending=True, stable=True)
            frontier = grow.children(shares.log(), tokens[:, None].expand_as(order).gather(2, order))
            occurs = going.take_along_dim(frontier.parents[:, :, None], 1) & (follower == frontier.tokens[:, :, None])

    def _texts(self, committed: Committed) -> tuple[Tensor, Tensor]:
        """Take in the committed tokens; the texts int64 [B, C] and how many tokens they have [B]."""
        rows = expand_rows(committed.tokens, committed.counts, committed.start, committed.length)
        self.context[committed.slots[:, None], rows.positions] = rows.tokens
        return self.context[committed.slots, : committed.length], committed.start + committed.counts

    def _only(self, tokens: Tensor) -> Tensor:
        logits = torch.full((tokens.shape[0], self.vocab_size), -torch.inf, device=tokens.device)
        return logits.scatter_(1, tokens[:, None], 0.0)


def numbered(context: Tensor) -> Tensor:
    """A number below C for each token of a text [B, C], the same for the same token, ascending with them."""
    ordered, at = context.sort(1)
    fresh = torch.zeros_like(ordered)
    fresh[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return torch.zeros_like(context).scatter_(1, at, fresh.cumsum(1))


def _has(context: Tensor, known: Tensor, step: int) -> Tensor:
    """bool [B, C]: positions of a text that it has a token `step` + 1 after."""
    return torch.arange(context.shape[1], device=context.device) + step + 1 < known[:, None]


def text_bytes(capacity: int, k: int) -> int:
    """What is kept of a text with room for `capacity` tokens, whatever number of draft tokens `k` a round has."""
    return capacity * TOKENS.itemsize


def matched_lengths(context: Tensor, known: Tensor, most: int) -> Tensor:
    """How many tokens, up to `most`, end alike at each position of a text and at its end: int64 [B, C].

    `context` int64 [B, C] with `known` int64 [B] tokens each; 0 at positions from the last token on.
    """
    at = torch.arange(context.shape[1], device=context.device)
    last = known[:, None] - 1
    agrees = (at < last).long()
    lengths = torch.zeros_like(agrees)
    for back in range(most):
        suffix = context.gather(1, (last - back).clamp(min=0))
        agrees = agrees * (context.roll(back, 1) == suffix) * (at >= back)
        lengths = lengths + agrees
    return lengths
