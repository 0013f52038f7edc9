"""Which entries of a slot cache the rows of one forward write and see.

S slots, B sequences, T rows of each, L cached positions.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor


class SlotRows:
    """Sequence b is in slot `slots[b]`, its rows are at `positions[b]`: int64 [B] and [B, T].

    A negative slot or position marks a row that is not there: it stores nothing, and its attention is zero. The other
    slots are distinct. On CUDA, what a decode round uses is these two tensors alone; everything derived from them here
    serves the torch references, of which `complete` and `of_sequences` look at values on the host.
    """

    def __init__(self, slots: Tensor, positions: Tensor):
        self.slots = slots.contiguous()
        self.positions = positions.contiguous()
        self._biases: dict[object, Tensor] = {}

    @cached_property
    def present(self) -> Tensor:
        """bool [B, T]: the rows that are there."""
        return (self.positions >= 0) & (self.slots >= 0)[:, None]

    @cached_property
    def complete(self) -> bool:
        """Whether all rows are there."""
        return bool(self.present.all())

    def of_sequences(self, pool: Tensor) -> Tensor:
        """The sequences' part [B, …] of a pool [S, …]: a view where their slots are consecutive."""
        first = self._first_slot
        return pool[self.slots] if first is None else pool[first : first + len(self.slots)]

    def bias(self, length: int, window: int | None, repeats: int, dtype: torch.dtype) -> Tensor:
        """What is added to scores over positions 0 … `length` − 1: [B, 1, repeats · T, length], the T rows repeated.

        0 where a row may look: at itself and at earlier positions, `window` of them in all; −∞ elsewhere.
        """
        key = length, window, repeats, dtype
        if key not in self._biases:
            hidden = ~self._visible(length, window)[:, None].repeat(1, 1, repeats, 1)
            self._biases[key] = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)
        return self._biases[key]

    def _visible(self, length: int, window: int | None) -> Tensor:
        index = torch.arange(length, device=self.positions.device)
        row = self.positions[:, :, None]
        visible = (index <= row) & self.present[:, :, None]
        return visible if window is None else visible & (index > row - window)

    @cached_property
    def _first_slot(self) -> int | None:
        slots = self.slots.tolist()
        first = slots[0]
        return first if first >= 0 and slots == list(range(first, first + len(slots))) else None
