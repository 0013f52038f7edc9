"""Keys and values of a fixed set of sequence slots.

Each slot holds one sequence; position p of it lies at index p. A rejected token is undone by not advancing the length:
its entry is overwritten before any row may see it. Until then it may hold NaN, which a weight of zero does not stop; so
on the CPU, whose attention multiplies unseen entries by zero, what lies beyond a sequence's newest row is cleared.
Of multi-head latent attention, entries are the latents: keys of one head, and values of no width.
Shapes: S slots, B sequences, T rows, C capacity, G key/value heads, D and E widths of keys and values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from functools import cached_property, partial
from weakref import proxy

import torch
from torch import Tensor

from draftkit.runtime.ops.backend import uses_triton
from draftkit.runtime.ops.slot_attention import Scoring, attend
from draftkit.runtime.ops.slot_write import write
from draftkit.runtime.slot_rows import Branches, SlotRows
from draftkit.targets.attention import Latents
from draftkit.targets.recurrent import StateKey


class SlotCache:
    """Pools [S, G, C, D] of keys and of values, one pair per layer, made at the layer's first write.

    `k`: how many tokens may be taken back of a sequence whose states recurrent modules keep.
    """

    def __init__(self, num_slots: int, capacity: int, k: int = 0):
        self.states = SlotStates(num_slots, k)
        self.num_slots = num_slots
        self.capacity = capacity
        self.layers: dict[Hashable, tuple[Tensor, Tensor]] = {}
        self.written = [0] * num_slots  # entries of each slot beyond these are zero; on the host, kept on the CPU only

    def pools(self, layer: Hashable, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The pools of a layer, or of its indexer, for what is shaped as `key` and `value` [B, G, T, D or E]."""
        if layer not in self.layers:
            self.layers[layer] = self._pool(key), self._pool(value)
        return self.layers[layer]

    def stored(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """The keys and values that a layer has stored of positions below `length`: [S, G, length, D] and [S, G, length,
        E]."""
        keys, values = self.layers[layer, 1]
        return keys[:, :, :length], values[:, :, :length]

    def take_over(self, other: SlotCache, slots: Tensor, length: int) -> None:
        """Store what another cache, of rows at the same positions, has of `slots` [B] at positions below `length`."""
        length = min(length, self.capacity)
        rows = SlotRows(slots, torch.arange(length, device=slots.device).expand(len(slots), -1))
        for layer, pools in other.layers.items():
            key, value = (pool[:, :, :length].index_select(0, slots.clamp(min=0)) for pool in pools)
            write(*self.pools(layer, key, value), key, value, rows)

    def keep_path(self, slots: Tensor, first: Tensor, path: Tensor) -> None:
        """Of a tree whose rows lie from entry `first` int64 [B] on, keep those of `path` int64 [B, T], ascending, −1
        after the last: they become the entries from `first` on. Keys are rotated for that place already."""
        index = torch.arange(path.shape[1], device=path.device).expand_as(path)
        source = (first[:, None] + torch.where(path >= 0, path, index)).clamp(max=self.capacity - 1)
        rows = self._placed(slots, (first[:, None] + index).clamp(max=self.capacity - 1))
        slot = slots.clamp(min=0)[:, None]
        for keys, values in self.layers.values():
            at = slot.to(keys.device), source.to(keys.device)
            key, value = keys.transpose(1, 2)[at].transpose(1, 2), values.transpose(1, 2)[at].transpose(1, 2)
            write(keys, values, key, value, rows.on(keys.device))

    def _placed(self, slots: Tensor, entries: Tensor) -> SlotRows:
        return SlotRows(slots, entries)

    def _pool(self, like: Tensor) -> Tensor:
        # Zeros, not empty memory: masked entries still take part in a product with weight zero, and 0 · NaN is NaN.
        _, heads, _, width = like.shape
        return like.new_zeros(self.num_slots, heads, self.capacity, width)

    def rows(self, slots: Tensor, positions: Tensor, length: int, *, prompt: bool = False) -> CacheRows:
        """The rows of one forward, `slots` [B], `positions` [B, T] and `prompt` as in `SlotRows`.

        `length` bounds the positions that are read; it must exceed every entry of `positions`. Where the host does not
        know one, as in a captured CUDA graph, it is the capacity.
        """
        left_over = [] if uses_triton(slots) else self.left_over(slots.tolist(), positions.tolist())
        return CacheRows(self, SlotRows(slots, positions, prompt=prompt), min(length, self.capacity), left_over)

    def rows_of_tree(self, slots: Tensor, branches: Branches, length: int) -> CacheRows:
        """The rows of one forward over a tree, or over one level of it; `length` as in `rows`, of entries."""
        entries = branches.entries
        left_over = [] if uses_triton(slots) else self.left_over(slots.tolist(), entries.tolist())
        rows = SlotRows(slots, entries, branches=branches)
        return CacheRows(self, rows, min(length, self.capacity), left_over)

    def mark_full(self, slots: Sequence[int]) -> None:
        """Nobody has counted what was stored in these slots: it may be everything."""
        for slot in slots:
            self.written[slot] = self.capacity

    def left_over(self, slots: list[int], positions: list[list[int]]) -> list[tuple[int, slice]]:
        """Slots and entries, beyond the rows there, which earlier rows have written and these will clear."""
        found = []
        for slot, row in zip(slots, positions, strict=True):
            end = max(row) + 1
            if slot >= 0 and end > 0:
                if end < self.written[slot]:
                    found.append((slot, slice(end, self.written[slot])))
                self.written[slot] = end
        return found


class CacheRows:
    """Where the keys and values of one forward are written and read; passed through the model to the attention.

    `windows` tells which layers have attended, each with its sliding window, None for full attention. `latents`: of
    layers that are about to attend, see `Latents`. `left_over`: slots and entries that no row may see, and that may
    hold anything. `whole` as of `KeyValues`.
    """

    def __init__(self, cache: SlotCache, rows: SlotRows, length: int, left_over: list[tuple[int, slice]]):
        self.rows = rows
        self.windows: dict[int, int | None] = {}
        # Weak, as a cycle would keep the cache of an engine that has made room anew until Python looks for cycles.
        self.latents = Latents(partial(CacheRows.store_index, proxy(self)))
        self.whole = False
        self._cache = cache
        self._length = length
        self._left_over = left_over
        self._attended: Counter[int] = Counter()  # how often each layer has

    @property
    def states(self) -> StateRows:
        """The memory in which recurrent modules keep their states."""
        return StateRows(self._cache.states, self.rows)

    def update(self, layer: int, key: Tensor, value: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        """Store a layer's keys [B, G, T, D] and values [B, G, T, E]; each time that it attends in a forward elsewhere.

        Returns the part of the pools that the rows may read: [S, G, length, D] and [S, G, length, E].
        """
        self.windows.setdefault(layer, window)
        self._attended[layer] += 1
        return self._store((layer, self._attended[layer]), key, value)

    def store_index(self, layer: int, key: Tensor) -> Tensor:
        """Store what a layer's indexer compares queries with [B, T, W]; returns that of all positions, [B, C, W]."""
        pool, _ = self._store(("indexer", layer), key[:, None], key[:, None, :, :0])
        return self.rows.of_sequences(pool)[:, 0]

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
        """`slot_attention.attend` of the rows, over what `update` has returned."""
        return attend(query, keys, values, self.rows.on(query.device), scoring)

    @property
    def mask(self) -> Tensor:
        """The bias that is added to the scores of the rows: float32 [B, 1, T, length]."""
        return self.rows.bias(self._length, None, 1, torch.float32)

    def _store(self, name: Hashable, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self._cache.pools(name, key, value)
        for slot, entries in self._left_over:
            keys[slot, :, entries] = 0
            values[slot, :, entries] = 0
        self._write(keys, values, key, value)
        return keys[:, :, : self._length], values[:, :, : self._length]

    def _write(self, keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> None:
        write(keys, values, key, value, self.rows.on(key.device))


class SlotStates:
    """Pools [S · R + 1, …], one for each kind of state, made when it is first kept.

    The last entry is that of all rows that are not there.
    """

    def __init__(self, num_slots: int, k: int):
        self.num_slots = num_slots
        self.size = k + 1
        self.pools: dict[StateKey, Tensor] = {}

    def pool(self, key: StateKey, like: Tensor) -> Tensor:
        """The pool for states shaped as `like` [B, …]."""
        if key not in self.pools:
            self.pools[key] = like.new_zeros(self.num_slots * self.size + 1, *like.shape[1:])
        return self.pools[key]

    def entries(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Where the states after `positions` int64 [B] of `slots` int64 [B] lie; −1 for what is not there."""
        return torch.where((slots >= 0) & (positions >= 0), slots * self.size + positions % self.size, -1)


class StateRows:
    """The states before and after the rows of one forward (`targets.recurrent.KeptStates`), among those `kept`.

    Rows that are not there come last in their sequence.
    """

    def __init__(self, kept: SlotStates, rows: SlotRows):
        self.kept = kept
        self._rows = rows

    @cached_property
    def at_once(self) -> bool:
        return self._rows.prompt and self._rows.complete

    @cached_property
    def begins(self) -> bool:
        return self.at_once and not bool(self._rows.positions[:, 0].any())

    def load(self, key: StateKey) -> Tensor | None:
        if key not in self.kept.pools:
            return None
        first = self._rows.positions[:, 0]
        states = self.kept.pools[key][self.kept.entries(self._rows.slots, first - 1)]
        return states.masked_fill_((first == 0).view(-1, *[1] * (states.dim() - 1)), 0)

    def keep(self, key: StateKey, state: Tensor, row: int) -> None:
        entries = self.kept.entries(self._rows.slots, self._rows.positions[:, row])
        self.kept.pool(key, state)[entries] = state
