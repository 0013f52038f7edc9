"""Keys and values of a fixed set of sequence slots.

Each slot holds one sequence; position p of it lies at index p. A rejected token is undone by not advancing the length:
its entry is overwritten before any row may see it. Shapes: S slots, B rows' sequences, T rows, C capacity, G key/value
heads, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftkit.errors import TargetError


class SlotCache:
    """Pools [S, G, C, D] of keys and of values, one pair per layer, made at the layer's first write."""

    def __init__(self, num_slots: int, capacity: int):
        self.num_slots = num_slots
        self.capacity = capacity
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def pools(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The pools of a layer, for keys and values shaped as `key` and `value` [B, G, T, D]; D may differ."""
        if layer not in self.layers:
            self.layers[layer] = self._pool(key), self._pool(value)
        return self.layers[layer]

    def _pool(self, like: Tensor) -> Tensor:
        # Zeros, not empty memory: masked entries still take part in a product with weight zero, and 0 · NaN is NaN.
        _, heads, _, width = like.shape
        return like.new_zeros(self.num_slots, heads, self.capacity, width)

    def rows(self, slots: Tensor, positions: Tensor, length: int) -> CacheRows:
        """The rows of one forward: sequence b is in slot `slots[b]`, its rows are at `positions[b]` [B, T].

        `length` bounds the positions that are read; it must exceed every entry of `positions`.
        """
        return CacheRows(self, slots, positions, min(length, self.capacity))


class CacheRows:
    """Where the keys and values of one forward are written and read; passed through the model to the attention.

    `windows` tells which layers have attended, each with its sliding window, None for full attention.
    """

    def __init__(self, cache: SlotCache, slots: Tensor, positions: Tensor, length: int):
        self.windows: dict[int, int | None] = {}
        self._cache = cache
        self._slots = slots
        self._positions = positions
        self._length = length
        self._whole = len(slots) == cache.num_slots  # slots are distinct and ascending, so these are all of them
        self._masks: dict[int | None, Tensor] = {}

    def update(self, layer: int, key: Tensor, value: Tensor, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """Store a layer's keys and values [B, G, T, D].

        Returns those of the whole sequences [B, G, length, D], and the mask bool [B, 1, T, length], true where a row
        may look: at itself and at earlier positions, `window` of them in all.
        """
        if layer in self.windows:
            raise TargetError(f"layer {layer} of the model attends twice in one forward", expected="once per layer")
        self.windows[layer] = window
        keys, values = self._cache.pools(layer, key, value)
        keys[self._slots[:, None], :, self._positions] = key.transpose(1, 2)
        values[self._slots[:, None], :, self._positions] = value.transpose(1, 2)
        keys, values = keys[:, :, : self._length], values[:, :, : self._length]
        if not self._whole:
            keys, values = keys[self._slots], values[self._slots]
        if window not in self._masks:
            self._masks[window] = self._mask(window)
        return keys, values, self._masks[window]

    def _mask(self, window: int | None) -> Tensor:
        index = torch.arange(self._length, device=self._positions.device)
        row = self._positions[:, :, None]
        visible = index <= row
        if window is not None:
            visible &= index > row - window
        return visible[:, None]
