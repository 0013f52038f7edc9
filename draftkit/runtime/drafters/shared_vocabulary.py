"""The tokens that a target and a draft with another tokenizer have in common (token-level intersection).

Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies",
arXiv 2502.05202; the rules are those of vLLM's `VocabMapping`, but tokens are compared as bytes. The draft proposes
shared tokens only, which keeps the output exact. Limits: every target token is one token of the draft's context, so one
that the draft lacks is its unknown or end token there, where the draft's own tokenizer would write several; a shared
token may be one that the draft's tokenizer would not have chosen at that place; special tokens are shared under the
same name only, so that a draft with another end token never proposes the end. All three cost accepted tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from draftkit.errors import TargetError
from draftkit.targets.tokens import token_names


@dataclass(frozen=True)
class SharedVocabulary:
    """S shared tokens of V target and Vd draft tokens.

    `draft_ids`, `target_ids` int64 [S]: their ids. `to_draft` int64 [V]: the draft's id of each target token.
    """

    draft_ids: Tensor
    target_ids: Tensor
    to_draft: Tensor

    @classmethod
    def of(
        cls,
        target: PreTrainedTokenizerBase,
        draft: PreTrainedTokenizerBase,
        *,
        vocab_size: int,
        draft_vocab_size: int,
        device: torch.device,
    ) -> SharedVocabulary:
        """Match two tokenizers; ids at or beyond a model's vocabulary do not count.

        Raises `TargetError` where nothing is shared, or the draft has neither an unknown nor an end token.
        """
        theirs, own = token_names(target, vocab_size), token_names(draft, draft_vocab_size)
        pairs = sorted((own[name], token) for name, token in theirs.items() if name in own)
        fallback = draft.eos_token_id if draft.unk_token_id is None else draft.unk_token_id
        if not pairs or fallback is None:
            raise TargetError(
                "the draft's tokenizer has neither an unknown nor an end token for what it lacks"
                if pairs
                else "the tokenizers of draft and target have no token in common",
                hint="pass a draft with the target's tokenizer",
            )
        draft_ids, target_ids = torch.tensor(pairs, device=device).unbind(1)
        to_draft = torch.full((vocab_size,), fallback, device=device)
        to_draft[target_ids] = draft_ids
        return cls(draft_ids.contiguous(), target_ids.contiguous(), to_draft)
