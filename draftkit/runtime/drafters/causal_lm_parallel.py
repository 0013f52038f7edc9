"""Parallel drafting with a causal language model: PARD and PARD-2 (AMD-AGI/PARD, `pard_infer.py`, `pard2_infer.py`).

One pass over the committed tokens and K−1 mask tokens drafts all K. The keys and values of the mask rows lie beyond the
sequence and are overwritten by its tokens before anything sees them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftkit.models.causal_lm import Pard2Model
from draftkit.runtime.cache import CacheRows
from draftkit.runtime.drafters.causal_lm import CausalLMDrafter
from draftkit.runtime.drafters.protocol import Committed, Draw, NewSequence, Proposal
from draftkit.runtime.drafters.shared_vocabulary import SharedVocabulary
from draftkit.runtime.ops.expand_rows import Rows, expand_rows
from draftkit.targets.states import AuxLayers
from draftkit.targets.target import Target


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

    def _logits(self, committed: Committed, rows: Rows) -> Tensor:
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
        known = [prompt.features[:-1] for prompt in prompts if prompt.features is not None]
        return torch.cat([pad(features, (0, 0, 1, 0)) for features in known])[None]  # a first token has none

    def _take_in(
        self, tokens: Tensor, features: Tensor | None, positions: Tensor, rows: CacheRows, lengths: Tensor
    ) -> None:
        assert features is not None
        self.projected.forward(tokens, features, positions, rows, last_only=True, lengths=lengths)

    def _logits(self, committed: Committed, rows: Rows) -> Tensor:
        assert rows.hidden is not None
        kv = self.cache.rows(committed.slots, rows.positions, committed.length)
        return self.projected.forward(rows.tokens, rows.hidden, rows.positions, kv)
