"""N-gram prompt lookup: what followed the same tokens earlier in the text is proposed again.

The rule is that of vLLM's `NgramProposer`. B sequences, C positions, K draft tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftkit.layout.families.ngram import NgramSpec
from draftkit.layout.folder import Draft
from draftkit.runtime.drafters.lookup import LookupDrafter, matched_lengths, text_bytes
from draftkit.runtime.memory_plan import SlotBytes


class NgramDrafter(LookupDrafter):
    """Looks up the text's last `min_n` … `max_n` tokens; rows without an earlier occurrence draft nothing.

    Of the longest earlier occurrences, the earliest counts.
    """

    def __init__(self, vocab_size: int, *, min_n: int, max_n: int, device: torch.device | str = "cpu"):
        super().__init__(vocab_size, device)
        self.min_n = min_n
        self.max_n = max_n

    def occurrences(self, context: Tensor, known: Tensor) -> Tensor:
        """The earlier occurrences of the longest match."""
        lengths = matched_lengths(context, known, self.max_n)
        return (lengths == lengths.amax(1, keepdim=True)) & (lengths >= self.min_n)

    def look_up(self, context: Tensor, known: Tensor, k: int) -> tuple[Tensor, Tensor]:
        lengths = matched_lengths(context, known, self.max_n)
        end = lengths.argmax(1)  # the first of equals
        matched = lengths.gather(1, end[:, None])[:, 0]
        followers = end[:, None] + 1 + torch.arange(k, device=end.device)
        tokens = context.gather(1, followers.clamp(max=context.shape[1] - 1))
        return tokens, torch.where(matched >= self.min_n, (known - 1 - end).clamp(max=k), 0)


def load_drafter(draft: Draft, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> NgramDrafter:
    """The drafter of n-gram lookup."""
    spec = draft.spec.architecture.expect(NgramSpec)
    vocab_size = target.config.get_text_config().vocab_size
    return NgramDrafter(vocab_size, min_n=spec.min_n, max_n=spec.max_n, device=target.device)


def slot_bytes(draft: Draft, dtype: torch.dtype) -> SlotBytes:
    """The bytes of the slot's text, which is all that look-up keeps."""
    return text_bytes
