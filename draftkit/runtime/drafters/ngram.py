"""N-gram prompt lookup: what followed the same tokens earlier in the text is proposed again.

The rule is that of vLLM's `NgramProposer`. B sequences, C positions, K draft tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftkit.layout.families.ngram import NgramSpec
from draftkit.layout.folder import Draft
from draftkit.models.states import AuxLayers
from draftkit.runtime.drafters.protocol import Committed, Draw, Proposal
from draftkit.runtime.ops.expand_rows import expand_rows

TOKENS = torch.int64


class NgramDrafter:
    """Looks up the text's last `min_n` … `max_n` tokens; rows without an earlier occurrence draft nothing.

    The tokens are certain, so they are drawn from logits that leave no other choice.
    """

    max_tokens = None
    max_positions = None
    module = None

    def __init__(self, vocab_size: int, *, min_n: int, max_n: int, device: torch.device | str = "cpu"):
        self.vocab_size = vocab_size
        self.min_n = min_n
        self.max_n = max_n
        self.context = torch.zeros(0, 0, dtype=TOKENS, device=device)  # [slots + 1, C]

    @property
    def aux_layers(self) -> AuxLayers | None:
        return None

    def slot_bytes(self, capacity: int, k: int) -> int:
        return capacity * TOKENS.itemsize

    def allocate(self, num_slots: int, capacity: int, k: int) -> None:
        self.context = self.context.new_zeros(num_slots + 1, capacity)  # the last one for slot −1, which is none

    def prefill(self, slot: int, prompt: Tensor, features: Tensor | None) -> None:
        self.context[slot, : len(prompt)] = prompt

    @torch.inference_mode()
    def propose(self, committed: Committed, k: int, draw: Draw) -> Proposal:
        rows = expand_rows(committed.tokens, committed.counts, committed.start, committed.length)
        self.context[committed.slots[:, None], rows.positions] = rows.tokens
        context = self.context[committed.slots, : committed.length]
        known = committed.start + committed.counts
        end, matched = earliest_longest_match(context, known, self.max_n)
        followers = end[:, None] + 1 + torch.arange(k, device=end.device)
        tokens = context.gather(1, followers.clamp(max=context.shape[1] - 1))
        lengths = torch.where(matched >= self.min_n, (known - 1 - end).clamp(max=k), 0)
        drafted = [draw(step, self._only(tokens[:, step])) for step in range(k)]
        return Proposal(torch.stack(drafted, dim=1), lengths)

    def _only(self, tokens: Tensor) -> Tensor:
        logits = torch.full((len(tokens), self.vocab_size), -torch.inf, device=tokens.device)
        return logits.scatter_(1, tokens[:, None], 0.0)


def load_drafter(draft: Draft, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> NgramDrafter:
    """The drafter of n-gram lookup."""
    spec = draft.spec.architecture.expect(NgramSpec)
    vocab_size = target.config.get_text_config().vocab_size
    return NgramDrafter(vocab_size, min_n=spec.min_n, max_n=spec.max_n, device=target.device)


def slot_bytes(draft: Draft, dtype: torch.dtype, capacity: int, k: int) -> int:
    """The text."""
    return capacity * TOKENS.itemsize


def earliest_longest_match(context: Tensor, known: Tensor, max_n: int) -> tuple[Tensor, Tensor]:
    """Where the last tokens of a text stood before.

    `context` int64 [B, C] with `known` int64 [B] tokens each. Returns the last position int64 [B] of the earliest among
    the longest earlier occurrences of the text's end, and their length int64 [B], counted up to `max_n`.
    """
    at = torch.arange(context.shape[1], device=context.device)
    last = known[:, None] - 1
    agrees = (at < last).long()
    lengths = torch.zeros_like(agrees)
    for back in range(max_n):
        suffix = context.gather(1, (last - back).clamp(min=0))
        agrees = agrees * (context.roll(back, 1) == suffix) * (at >= back)
        lengths = lengths + agrees
    end = lengths.argmax(1)  # the first of equals
    return end, lengths.gather(1, end[:, None])[:, 0]
