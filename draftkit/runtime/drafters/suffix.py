"""Suffix decoding: of all that followed the text's end earlier in it, the most frequent is proposed again.

The rule is that of vLLM's `SuffixDecodingProposer` without answers to earlier requests, which is
`SuffixTree::speculate` of arctic-inference on the request's own text. A suffix tree is not needed for it: the
occurrences of a match are marked positions, and a step along the tree keeps those that go on with the same token.
B sequences, C positions, M lengths of a match, K draft tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftkit.layout.families.suffix import SuffixSpec
from draftkit.layout.folder import Draft
from draftkit.runtime.drafters.lookup import LookupDrafter, matched_lengths, numbered, text_bytes
from draftkit.runtime.memory_plan import SlotBytes


class SuffixDrafter(LookupDrafter):
    """Find, for a match of every length, the path of the most frequent tokens after it; the best score counts.

    A token's frequency on the path is how many of the occurrences of the match, the text's end among them, go on like
    that. The score of a path is the sum of the frequencies, and of equal scores that of the longest match counts.
    """

    def __init__(self, vocab_size: int, spec: SuffixSpec, device: torch.device | str = "cpu"):
        super().__init__(vocab_size, device)
        self.spec = spec

    def occurrences(self, context: Tensor, known: Tensor) -> Tensor:
        """The earlier occurrences of the longest match."""
        lengths = matched_lengths(context, known, self.spec.max_depth - 1)
        return (lengths == lengths.amax(1, keepdim=True)) & (lengths > 0)

    def look_up(self, context: Tensor, known: Tensor, k: int) -> tuple[Tensor, Tensor]:
        spec = self.spec
        size = torch.arange(1, spec.max_depth, device=context.device)  # [M]
        budget = (size.double() * spec.max_spec_factor + 1e-6).long().clamp(max=k)
        occurs = matched_lengths(context, known, spec.max_depth - 1)[:, None] >= size[:, None]  # [B, M, C] ends
        counts = occurs.sum(2) + 1  # the text's end is an occurrence
        distinct = numbered(context)
        frequency = torch.ones(counts.shape, device=context.device)
        score, lengths, path = torch.zeros_like(frequency), torch.zeros_like(counts), []
        going = size < known[:, None].clamp(max=spec.max_depth)  # [B, M]
        for step in range(k):
            token, occurs, followed = _most_frequent(context, distinct, known, occurs, step)
            going = going & (followed > 0) & (step < budget) & (size + step < spec.max_depth)
            frequency = frequency * (followed.float() / counts)
            going = going & (frequency >= spec.min_token_prob)
            score = score + frequency * going
            lengths = lengths + going
            counts = followed.clamp(min=1)
            path.append(token)
        best = spec.max_depth - 2 - score.flip(1).argmax(1, keepdim=True)  # the last of equals
        tokens = torch.stack(path, dim=2).take_along_dim(best[:, :, None], 1)[:, 0]
        return tokens, lengths.gather(1, best)[:, 0]


def _most_frequent(
    context: Tensor, distinct: Tensor, known: Tensor, occurs: Tensor, step: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The most frequent token [B, M], `step` tokens further, after the marked positions [B, M, C].

    Returns it with the positions that go on with it, and their number [B, M], 0 where none goes on. Of equally frequent
    tokens, single ones count from the first on; of others that which occurred last.
    """
    positions = context.shape[1]
    at = torch.arange(positions, device=context.device)
    next = (at + step + 1).clamp(max=positions - 1).expand_as(context)
    occurs = occurs & (at + step + 1 < known[:, None])[:, None]
    follower = distinct.gather(1, next)[:, None].expand_as(occurs)
    number = torch.zeros(occurs.shape, dtype=context.dtype, device=context.device)
    number = number.scatter_add_(2, follower, occurs.to(context.dtype)).gather(2, follower) * occurs
    order = torch.where(number > 1, at, positions - 1 - at)
    chosen = (number * positions + order).masked_fill(~occurs, -1).argmax(2, keepdim=True)  # [B, M, 1]
    token = context.gather(1, next).gather(1, chosen[:, :, 0])
    occurs = occurs & (follower == follower.gather(2, chosen))
    return token, occurs, number.gather(2, chosen)[:, :, 0]


def load_drafter(draft: Draft, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> SuffixDrafter:
    """The drafter of suffix decoding."""
    vocab_size = target.config.get_text_config().vocab_size
    return SuffixDrafter(vocab_size, draft.spec.architecture.expect(SuffixSpec), target.device)


def slot_bytes(draft: Draft, dtype: torch.dtype) -> SlotBytes:
    """The bytes of the slot's text, which is all that look-up keeps."""
    return text_bytes
