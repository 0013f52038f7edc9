"""Drafting with a causal language model: token by token (a standalone model), or all in one pass (PARD, PARD-2).

Source of the latter: AMD-AGI/PARD, `pard_infer.py`, `pard2_infer.py`. Their pass has the committed tokens and K−1 mask
tokens. The keys and values of the mask rows lie beyond the sequence and are overwritten by its tokens before anything
sees them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftkit.errors import TargetError
from draftkit.layout.families.causal_lm import CausalLMSpec
from draftkit.layout.folder import Draft
from draftkit.layout.positions import longest_sequence, ropes_of
from draftkit.models.causal_lm import Pard2Model, load_causal_lm, load_pard2
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.cache import CacheRows, SlotCache
from draftkit.runtime.drafters.protocol import Committed, Draw, Grow, NewSequence, Proposal, expand_marginals
from draftkit.runtime.memory_plan import SlotBytes
from draftkit.runtime.ops.expand_rows import ExpandedRows, expand_rows
from draftkit.runtime.prefill import Piece, prefill_forwards
from draftkit.runtime.slot_rows import Branches
from draftkit.targets.chat import load_tokenizer
from draftkit.targets.states import AuxLayers
from draftkit.targets.target import Target, own_model
from draftkit.targets.tokens import TOKENIZERS, same_vocabulary, token_names


class CausalLMDrafter:
    """Newly accepted tokens are fed together with the bonus token, which saves a pass a round.

    `vocabulary`: what the draft shares with a target of another vocabulary; None where the two are the same.
    `head_ids` int64 [Vd]: the draft's tokens that the model has logits for, ascending; None for all.
    """

    max_tokens = None
    overlap = 1  # whose feature goes with the token after it, where the target's are read
    slot_bytes: SlotBytes | None = None

    def __init__(self, model: Target, vocabulary: SharedVocabulary | None = None, head_ids: Tensor | None = None):
        self.model = model
        self.vocabulary = vocabulary
        self.columns, self.target_ids = _proposed(vocabulary, head_ids)
        self.cache = SlotCache(0, 0)
        config = model.model.config.to_dict()
        self.max_positions, self.positions_end = longest_sequence(config), not ropes_of(config)
        if model.without_trees is not None:
            self.expand = None  # type: ignore[method-assign, assignment]  # it does not expand

    @property
    def aux_layers(self) -> AuxLayers | None:
        return None

    @property
    def module(self) -> nn.Module:
        return self.model.model

    def allocate(self, num_slots: int, capacity: int, k: int) -> None:
        self.cache = SlotCache(num_slots, capacity, k)

    def prefill(self, prompts: Sequence[NewSequence]) -> None:
        new = [prompt.tokens[bool(prompt.begin) :] for prompt in prompts]  # the token before a piece is in the cache
        tokens = self._own(torch.cat(new))[None]
        features = self._features_before(prompts)
        pieces = [Piece(p.slot, p.begin + bool(p.begin), p.begin + len(p.tokens)) for p in prompts]
        whole = [p.length or piece.end for p, piece in zip(prompts, pieces, strict=True)]
        lengths = torch.tensor([[n for n, own in zip(whole, new, strict=True) for _ in own]]).to(tokens.device)
        for taken, positions, rows in prefill_forwards(
            self.cache, pieces, tokens.device, joins=self.model.joins_prompts
        ):
            before = None if features is None else features[:, taken]
            self._take_in(tokens[:, taken], before, positions, rows, lengths[:, taken])

    def _features_before(self, prompts: Sequence[NewSequence]) -> Tensor | None:
        """The target's features [1, T, F] of the tokens before those of prompts, one after the other, where it reads
        them."""
        return None

    def _take_in(
        self, tokens: Tensor, features: Tensor | None, positions: Tensor, rows: CacheRows, lengths: Tensor
    ) -> None:
        """Run rows of prompts: int64 [1, T], `lengths` those of their sequences."""
        self.model.forward(tokens, positions, rows, last_only=True, lengths=lengths)

    @torch.inference_mode()
    def propose(self, committed: Committed, k: int, draw: Draw) -> Proposal:
        rows = expand_rows(self._own(committed.tokens), committed.counts, committed.start, committed.length)
        logits = rows.drafting(self._pass(committed, rows.tokens, rows.positions))
        position = rows.positions.gather(1, rows.sampled)  # [B, 1]
        drafted = [self._draw(draw, 0, logits[:, 0])]
        for step in range(1, k):
            logits = self._pass(committed, self._own(drafted[-1])[:, None], position + step)
            drafted.append(self._draw(draw, step, logits[:, 0]))
        return Proposal(torch.stack(drafted, dim=1))

    @torch.inference_mode()
    def expand(self, committed: Committed, depth: int, grow: Grow) -> None:
        rows = expand_rows(self._own(committed.tokens), committed.counts, committed.start, committed.length)
        logits = rows.drafting(self._pass(committed, rows.tokens, rows.positions))
        first = rows.positions.gather(1, rows.sampled) + 1  # [B, 1]
        for level in range(depth):
            frontier = grow(logits if self.columns is None else logits[..., self.columns], self.target_ids)
            if level + 1 < depth:
                branches = Branches(first, first + frontier.depths, frontier.visible)
                kv = self.cache.rows_of_tree(committed.slots, branches, committed.length)
                logits = self.model.forward(self._own(frontier.tokens), branches.of_rows, kv).logits

    def _pass(self, committed: Committed, tokens: Tensor, positions: Tensor) -> Tensor:
        rows = self.cache.rows(committed.slots, positions, committed.length)
        return self.model.forward(tokens, positions, rows).logits

    def _own(self, tokens: Tensor) -> Tensor:
        """The draft's own ids of target tokens."""
        return tokens if self.vocabulary is None else self.vocabulary.to_draft[tokens]

    def _draw(self, draw: Draw, step: int, logits: Tensor) -> Tensor:
        """The target token [B] drawn from the draft's logits [B, Vd]."""
        return draw(step, logits if self.columns is None else logits[:, self.columns], self.target_ids)


class PardDrafter(CausalLMDrafter):
    """PARD, and PARD-2 without the target's features. `mask_token_id` is in the draft's own vocabulary."""

    def __init__(
        self,
        model: Target,
        mask_token_id: int,
        vocabulary: SharedVocabulary | None = None,
        head_ids: Tensor | None = None,
    ):
        super().__init__(model, vocabulary, head_ids)
        self.mask_token_id = mask_token_id

    @torch.inference_mode()
    def propose(self, committed: Committed, k: int, draw: Draw) -> Proposal:
        rows = expand_rows(
            self._own(committed.tokens),
            committed.counts,
            committed.start,
            committed.length,
            masks=k - 1,
            mask_token=self.mask_token_id,
            hidden=committed.features,
        )
        logits = rows.drafting(self._logits(committed, rows))
        drafted = [self._draw(draw, step, logits[:, step]) for step in range(k)]
        return Proposal(torch.stack(drafted, dim=1))

    def expand(self, committed: Committed, depth: int, grow: Grow) -> None:
        expand_marginals(self, committed, depth, grow)

    def _logits(self, committed: Committed, rows: ExpandedRows) -> Tensor:
        return self._pass(committed, rows.tokens, rows.positions)


class Pard2Drafter(PardDrafter):
    """PARD-2: a token is fed with the target's feature of the token before it, a mask token with the last one known."""

    def __init__(
        self,
        model: Pard2Model,
        aux_layers: AuxLayers,
        mask_token_id: int,
        vocabulary: SharedVocabulary | None = None,
        head_ids: Tensor | None = None,
    ):
        super().__init__(model.lm, mask_token_id, vocabulary, head_ids)
        self.projected = model
        self._aux_layers = aux_layers

    @property
    def aux_layers(self) -> AuxLayers:
        return self._aux_layers

    def _features_before(self, prompts: Sequence[NewSequence]) -> Tensor:
        known = [(prompt.features[:-1], prompt.begin) for prompt in prompts if prompt.features is not None]
        padded = [features if begin else pad(features, (0, 0, 1, 0)) for features, begin in known]
        return torch.cat(padded)[None]  # the first token of a prompt has none

    def _take_in(
        self, tokens: Tensor, features: Tensor | None, positions: Tensor, rows: CacheRows, lengths: Tensor
    ) -> None:
        assert features is not None
        self.projected.forward(tokens, features, positions, rows, last_only=True, lengths=lengths)

    def _logits(self, committed: Committed, rows: ExpandedRows) -> Tensor:
        assert rows.hidden is not None
        kv = self.cache.rows(committed.slots, rows.positions, committed.length)
        return self.projected.forward(rows.tokens, rows.hidden, rows.positions, kv)


def _proposed(vocabulary: SharedVocabulary | None, head_ids: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The columns of the logits that are drawn from, None for all, and their tokens in the target's vocabulary, None
    where columns are tokens."""
    if vocabulary is None:
        return None, head_ids
    if head_ids is None:
        return vocabulary.draft_ids, vocabulary.target_ids
    has = torch.isin(vocabulary.draft_ids, head_ids)
    if not has.any():
        raise TargetError("the draft proposes no token that the target has", hint="prune it for this target")
    return torch.searchsorted(head_ids, vocabulary.draft_ids[has]), vocabulary.target_ids[has]


def load_drafter(draft: Draft, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> CausalLMDrafter:
    """The drafter of a causal language model: standalone, PARD or PARD-2."""
    lm = draft.spec.architecture.expect(CausalLMSpec)
    vocabulary = _shared_vocabulary(draft, lm.vocab_size, target, tokenizer)
    head_ids = None if lm.head_ids is None else torch.tensor(lm.head_ids, device=target.device)
    if lm.parallel is None:
        return CausalLMDrafter(load_causal_lm(draft, target, attention=ATTENTION), vocabulary, head_ids)
    mask = lm.parallel.mask_token_id
    if lm.target_features is None:
        return PardDrafter(load_causal_lm(draft, target, attention=ATTENTION), mask, vocabulary, head_ids)
    return Pard2Drafter(*load_pard2(draft, target, attention=ATTENTION), mask, vocabulary, head_ids)


def _shared_vocabulary(
    draft: Draft, draft_vocab_size: int, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> SharedVocabulary | None:
    """What draft and target share, None where their vocabularies are the same."""
    vocab_size = target.config.get_text_config().vocab_size
    has_tokenizer = any(path.name.startswith(TOKENIZERS) for path in draft.files)
    if tokenizer is None or not has_tokenizer:
        if draft_vocab_size == vocab_size:
            return None
        raise TargetError(
            f"the draft has {draft_vocab_size} tokens, the target {vocab_size}",
            where=draft.path,
            hint="pass a draft with the target's vocabulary, or one with its tokenizer",
        )
    own = load_tokenizer(draft.path, "draft")
    if draft_vocab_size == vocab_size and same_vocabulary(tokenizer, own, vocab_size):
        return None
    return SharedVocabulary.of(
        tokenizer, own, vocab_size=vocab_size, draft_vocab_size=draft_vocab_size, device=target.device
    )


def slot_bytes(draft: Draft, dtype: torch.dtype) -> SlotBytes:
    """The bytes of a slot: the model's keys, values and recurrent states."""
    return partial(draft.kept(own_model).footprint.slot_bytes, dtype)


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
