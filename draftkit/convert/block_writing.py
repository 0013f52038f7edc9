"""Writing the layouts of block drafters: what their readers make of a draft that no key of theirs states."""

from __future__ import annotations

from draftkit.convert.block_reading import BlockLayout, LastState
from draftkit.convert.export import Outgoing
from draftkit.layout.block import BlockDraft


def last_state_at(outgoing: Outgoing, draft: BlockDraft, layout: BlockLayout) -> LastState:
    """Where a layout's readers take the state after the target's last layer, if the draft reads it at all."""
    last = None if outgoing.target is None else outgoing.target.num_hidden_layers
    return layout.last_state if last in draft.aux_layer_ids else draft.last_state
