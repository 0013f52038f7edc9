"""What drafters that keep nothing between rounds have in common: all they read is the newest token and its feature."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from draftkit.runtime.drafters.protocol import Committed, NewSequence
from draftkit.runtime.memory_plan import SlotBytes
from draftkit.targets.states import FINAL, AuxLayers


class LastStateDrafter:
    """Reads the target's hidden state from which it emitted the newest token, the final normed one unless it says
    otherwise. `max_tokens`: how many heads it has, None where one drafts any number."""

    max_positions = None
    positions_end = False
    overlap = 0
    slot_bytes: SlotBytes | None = None

    def __init__(self, max_tokens: int | None, module: nn.Module):
        self.max_tokens = max_tokens
        self.module = module

    @property
    def aux_layers(self) -> AuxLayers:
        return AuxLayers((FINAL,))

    def allocate(self, num_slots: int, capacity: int, k: int) -> None:
        pass

    def prefill(self, prompts: Sequence[NewSequence]) -> None:
        pass


def last_state(committed: Committed) -> tuple[Tensor, Tensor]:
    """The newest token int64 [B] of each sequence and the feature [B, F] it was emitted from."""
    assert committed.features is not None
    last = committed.counts[:, None] - 1
    token = committed.tokens.gather(1, last)[:, 0]
    return token, committed.features.take_along_dim(last[:, :, None], 1)[:, 0]
