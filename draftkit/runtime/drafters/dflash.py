"""Drafting a block in one pass: DFlash, DSpark, DFlash2, JetSpec.

The cache holds keys and values that were made from the target's states, one entry per position of the context. The rows
of a block, an anchor and masks after it, store theirs behind the context, where the next round's context overwrites
them. B sequences, J committed tokens, K drafts, T rows of a block, H draft width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftkit.layout.families.dflash import DFlashSpec
from draftkit.layout.folder import Draft
from draftkit.models.dflash import DFlashModel, load_dflash
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.cache import CacheRows, SlotCache
from draftkit.runtime.drafters.protocol import Committed, Draw, Grow, NewSequence, Proposal
from draftkit.runtime.fusion.packed_linear import dtype_of
from draftkit.runtime.memory_plan import SlotBytes
from draftkit.runtime.prefill import features_before_last, pieces_before_last, prefill_forwards
from draftkit.targets.states import FINAL, AuxLayers


class DFlashDrafter:
    """Drafts K tokens from a block of as many rows as that takes. `num_layers`: those of the target."""

    max_tokens: int | None = None
    overlap = 1  # whose state comes with the token that it emitted
    slot_bytes: SlotBytes | None = None

    positions_end = False

    def __init__(self, model: DFlashModel, num_layers: int):
        self.model = model
        self.cache = SlotCache(0, 0)
        limit = model.spec.max_positions
        self.max_positions = None if limit is None else limit.tokens
        self.fill_in = model.spec.slots == "fill-in"
        self._num_layers = num_layers

    @property
    def aux_layers(self) -> AuxLayers:
        spec = self.model.spec
        last = FINAL if spec.last_state == "after_norm" else self._num_layers
        return AuxLayers(tuple(last if i == self._num_layers else i for i in spec.aux_layer_ids))

    @property
    def dtype(self) -> torch.dtype:
        return dtype_of(self.model)

    @property
    def module(self) -> nn.Module:
        return self.model

    def allocate(self, num_slots: int, capacity: int, k: int) -> None:
        self.cache = SlotCache(num_slots, capacity)

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[NewSequence]) -> None:
        """Take in prompts but for their last token, whose state comes with the token that it emitted."""
        known = [prompt for prompt in prompts if len(prompt.tokens) > 1]
        if known:
            features = features_before_last(known)
            for taken, positions, rows in prefill_forwards(self.cache, pieces_before_last(known), features.device):
                self._take_in(features[:, taken], positions, rows)

    @torch.inference_mode()
    def propose(self, committed: Committed, k: int, draw: Draw) -> Proposal:
        anchor, output = self._rows(committed, k)
        return self._drafted(anchor[:, 0], output, draw)

    @torch.inference_mode()
    def expand(self, committed: Committed, depth: int, grow: Grow) -> None:
        tokens, output = self._rows(committed, depth)
        model, state = self.model, self._start(output)[:, None]
        logits, alike = model.logits(output), model.markov_head is None and model.candidate_selector is None
        for step in range(depth):
            if alike:
                grow(logits[:, step, None], model.target_ids)
                continue
            many = tokens.shape  # [B, W]
            row, each = (x[:, step, None].expand(*many, -1).flatten(0, 1) for x in (logits, output))
            row, state = self._after(tokens.flatten(), row, each, state.flatten(0, 1))
            frontier = grow(row.unflatten(0, many), model.target_ids)
            tokens, state = frontier.tokens, state.unflatten(0, many).take_along_dim(frontier.parents[:, :, None], 1)

    def _rows(self, committed: Committed, k: int) -> tuple[Tensor, Tensor]:
        """Take in what is committed; the anchors int64 [B, 1] and the outputs [B, K, H] of the rows that draft."""
        assert committed.features is not None
        index = torch.arange(committed.tokens.shape[1], device=committed.tokens.device)
        positions = committed.start[:, None] - 1 + index
        positions = torch.where(index < committed.counts[:, None], positions, -1)  # padding stores nothing
        rows = self.cache.rows(committed.slots, positions, committed.length)
        self._take_in(committed.features, positions, rows)
        anchor = committed.tokens.gather(1, committed.counts[:, None] - 1)
        output = self._block(committed, anchor, k)
        return anchor, output[:, 1:] if self.fill_in else output

    def _take_in(self, features: Tensor, positions: Tensor, rows: CacheRows) -> None:
        """Store each layer's keys and values of target features [B, J, F] at `positions` [B, J], −1 for none."""
        context = self.model.fuse(features)
        cos_sin = self.model.rotary(context, positions)
        for layer, window in enumerate(self.model.spec.decoder.windows):
            rows.update(layer, *self.model.context(layer, context, cos_sin), window)

    def _block(self, committed: Committed, anchor: Tensor, k: int) -> Tensor:
        """The outputs [B, T, H] of the block that begins with `anchor` [B, 1]."""
        first = committed.start + committed.counts - 1
        rows = k + 1 if self.fill_in else k
        positions = first[:, None] + torch.arange(rows, device=anchor.device)
        masks = anchor.new_full((anchor.shape[0], rows - 1), self.model.spec.parallel.mask_token_id)
        hidden = self.model.embed(torch.cat((anchor, masks), dim=1), self.dtype)
        return self.model(hidden, positions, kv=self.cache.rows(committed.slots, positions, committed.length))

    def _drafted(self, previous: Tensor, output: Tensor, draw: Draw) -> Proposal:
        """Draws the drafts from left to right; `previous` int64 [B] is the anchor, `output` [B, K, H] the rows'."""
        model, ids = self.model, self.model.target_ids
        logits, drafted, confidences = model.logits(output), [], []
        state = self._start(output)
        for step in range(output.shape[1]):
            row = logits[:, step]
            if model.confidence_head is not None:  # of the row and the token before: not of the one that is drawn
                confidences.append(model.confidence(previous, output[:, step]))
            row, state = self._after(previous, row, output[:, step], state)
            previous = draw(step, row, ids)
            drafted.append(previous)
        return Proposal(torch.stack(drafted, 1), confidences=torch.stack(confidences, 1) if confidences else None)

    def _start(self, output: Tensor) -> Tensor:
        """The Markov head's state [B, r] before a block; of no width without one."""
        head = self.model.markov_head
        return output[:, 0, :0] if head is None else head.start(output)

    def _after(self, previous: Tensor, row: Tensor, output: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The logits `row` [B, V] of a row with `output` [B, H], once it knows the token before it, `previous` int64
        [B]; and the next state."""
        model = self.model
        if model.markov_head is not None:
            latent, state = model.markov_head.latent(previous, output, state)
            row = row + model.markov_head.bias(latent)
        if model.candidate_selector is not None:
            row = self._selected(previous, row, output)
        return row, state

    def _selected(self, previous: Tensor, logits: Tensor, output: Tensor) -> Tensor:
        """Logits [B, V] of a row's candidates after the token before; those of all other tokens are −∞."""
        selector = self.model.candidate_selector
        assert selector is not None
        values, candidates = logits.topk(selector.top_k, dim=-1)
        scores = values + selector(previous, candidates, output)
        return torch.full_like(logits, -torch.inf).scatter_(1, candidates, scores)


def load_drafter(draft: Draft, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> DFlashDrafter:
    """The drafter for a draft of a block family: DFlash, DSpark, DFlash2 or JetSpec."""
    model = load_dflash(draft, target, attention=ATTENTION)
    return DFlashDrafter(model, target.config.get_text_config().num_hidden_layers)


def slot_bytes(draft: Draft, dtype: torch.dtype) -> SlotBytes:
    """The bytes of a slot: the keys and values of the context."""
    per_position = draft.spec.architecture.expect(DFlashSpec).decoder.cached_numbers * dtype.itemsize
    return lambda capacity, _: capacity * per_position
