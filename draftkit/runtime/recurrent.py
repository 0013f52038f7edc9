"""The states of recurrent modules, of the newest positions of a fixed set of sequence slots.

The state after position p of a sequence is the (p mod R)-th of its slot, R = k + 1. So a rejected token is undone as
its keys and values are, by not advancing the length: the next round goes on from the state before its first row, and
what lies beyond is overwritten before anything reads it. S slots, B sequences, T rows.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from draftkit.runtime.rows import SlotRows
from draftkit.targets.recurrent import StateKey


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
