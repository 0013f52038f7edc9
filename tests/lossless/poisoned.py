"""A target that proves that what was rejected is not read.

It looks at values on the host, so its rounds run eagerly. Every forward but those of a prefill is a round.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from draftkit.runtime.cache import CacheRows, SlotStates
from draftkit.targets.attention import KeyValues
from draftkit.targets.target import Target, TargetOutput


class PoisonedTarget(Target):
    """Fills what the last round of a slot has written beyond the new anchor, its rejected rows, with NaN.

    A NaN that is read reaches every logit of its row.
    """

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._ends: dict[int, int] = {}  # of what has been written, by slot
        self._pools: dict[int, tuple[Tensor, Tensor]] = {}  # views of the last round's, by layer

    def forward(
        self, tokens: Tensor, positions: Tensor, kv: KeyValues, *, last_only: bool = False, **others: Any
    ) -> TargetOutput:
        rows = cast(CacheRows, kv)
        slots, written = rows.rows.slots.tolist(), rows.rows.positions.tolist()
        if not last_only:
            for slot, row in zip(slots, positions.tolist(), strict=True):
                self._poison(slot, row[0], rows.states.kept)
        self._ends |= {slot: max(row) + 1 for slot, row in zip(slots, written, strict=True)}
        watched = cast(KeyValues, _WatchedRows(rows, self._pools))
        return super().forward(tokens, positions, watched, last_only=last_only, **others)

    def _poison(self, slot: int, anchor: int, states: SlotStates) -> None:
        rejected = range(anchor, self._ends[slot])
        for pools in self._pools.values():
            for pool in pools:
                pool[slot, :, rejected.start : rejected.stop] = torch.nan
        for pool in states.pools.values():
            for position in rejected:
                pool[slot * states.size + position % states.size] = torch.nan


class _WatchedRows:
    """`CacheRows` that leaves the pools of each layer in `pools`."""

    def __init__(self, rows: CacheRows, pools: dict[int, tuple[Tensor, Tensor]]):
        self._rows = rows
        self._pools = pools

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)

    def update(self, layer: int, key: Tensor, value: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        self._pools[layer] = self._rows.update(layer, key, value, window)
        return self._pools[layer]
