"""Parallel drafting with an EAGLE-style draft: P-EAGLE.

One pass over the committed rows and K−1 mask rows, whose hidden input is a learned state, drafts all K tokens. The keys
and values of the mask rows lie beyond the sequence and are overwritten by its rows before anything sees them.
"""

from __future__ import annotations

import torch

from draftkit.models.eagle import EagleModel
from draftkit.runtime.drafters.eagle import EagleDrafter
from draftkit.runtime.drafters.protocol import Committed, Draw, Proposal
from draftkit.runtime.ops.expand_rows import expand_rows


class PEagleDrafter(EagleDrafter):
    """The learned mask state takes the place of captured features: it goes through the same norms and `fc`."""

    def __init__(self, model: EagleModel):
        super().__init__(model)
        assert model.spec.parallel is not None
        self.mask_token_id = model.spec.parallel.mask_token_id
        self.max_positions = model.spec.max_positions
        with torch.inference_mode():
            self.mask_hidden = model.fuse(model.mask_hidden)[0, 0]

    @torch.inference_mode()
    def propose(self, committed: Committed, k: int, draw: Draw) -> Proposal:
        assert committed.features is not None
        rows = expand_rows(
            committed.tokens,
            committed.counts,
            committed.start - 1,
            committed.length,
            masks=k - 1,
            mask_token=self.mask_token_id,
            hidden=self.model.fuse(committed.features),
            mask_hidden=self.mask_hidden,
        )
        assert rows.hidden is not None
        head_input = rows.drafting(self._pass(committed, rows.tokens, rows.hidden, rows.positions).head_input)
        ids = self.model.target_ids
        drafted = [draw(step, self.model.logits(head_input[:, step]), ids) for step in range(k)]
        return Proposal(torch.stack(drafted, dim=1))
