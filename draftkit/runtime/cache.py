"""Keys and values of a fixed set of sequence slots.

Each slot holds one sequence; position p of it lies at index p. A rejected token is undone by not advancing the length:
its entry is overwritten before any row may see it. Shapes: S slots, B rows' sequences, T rows, C capacity, G key/value
heads, D head width.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


class SlotCache:
    """Key/value pools [S, G, C, D], one pair per layer, made at the layer's first write."""

    def __init__(self, num_slots: int, capacity: int):
        self.num_slots = num_slots
        self.capacity = capacity
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def pool(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """The pools of a layer, for keys and values shaped as `like` [B, G, T, D]."""
        if layer not in self.layers:
            _, heads, _, width = like.shape
            shape = (self.num_slots, heads, self.capacity, width)
            # Zeros, not empty memory: masked entries still take part in a product with weight zero, and 0 · NaN is NaN.
            self.layers[layer] = (like.new_zeros(shape), like.new_zeros(shape))
        return self.layers[layer]

    def rows(self, slots: Tensor, positions: Tensor, length: int) -> CacheRows:
        """The rows of one forward: sequence b is in slot `slots[b]`, its rows are at `positions[b]` [B, T].

        `length` bounds the positions that are read; it must exceed every entry of `positions`.
        """
        return CacheRows(self, slots, positions, min(length, self.capacity))


class CacheRows:
    """Where the keys and values of one forward are written and read; passed through the model to the attention."""

    def __init__(self, cache: SlotCache, slots: Tensor, positions: Tensor, length: int):
        self._cache = cache
        self._slots = slots
        self._positions = positions
        self._length = length
        self._whole = len(slots) == cache.num_slots  # slots are distinct and ascending, so these are all of them
        self.mask = lru_cache(maxsize=None)(self._mask)

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values [B, G, T, D]; return those of the whole sequences [B, G, length, D]."""
        keys, values = self._cache.pool(layer, key)
        keys[self._slots[:, None], :, self._positions] = key.transpose(1, 2)
        values[self._slots[:, None], :, self._positions] = value.transpose(1, 2)
        if not self._whole:
            keys, values = keys[self._slots], values[self._slots]
        return keys[:, :, : self._length], values[:, :, : self._length]

    def _mask(self, sliding_window: int | None) -> Tensor:
        """bool [B, 1, T, length], true where a row may look: itself and earlier, within the window."""
        index = torch.arange(self._length, device=self._positions.device)
        row = self._positions[:, :, None]
        visible = index <= row
        if sliding_window is not None:
            visible &= index > row - sliding_window
        return visible[:, None]
