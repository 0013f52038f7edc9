"""Prompts taken in by a compiled program: the target's forward over rows of several sequences.

T rows of all prompts, P pieces, S slots, G key/value heads, C entries of a slot, D and E widths of keys and values,
N query heads, F feature width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from draftkit.runtime.cache import SlotCache
from draftkit.runtime.compiled.inventory import Inventory
from draftkit.runtime.compiled.programs import Program, or_warning, program
from draftkit.runtime.compiled.trace import (
    GivenWeights,
    Pools,
    TracedCache,
    TracedCacheRows,
    TracedRows,
    example_pools,
    stand_in,
)
from draftkit.runtime.ops.slot_attention import Scoring
from draftkit.runtime.ops.slot_write import write
from draftkit.targets.target import Target, TargetOutput

ROWS, PIECES = 241, 5  # of example inputs


class CompiledPrompts:
    """The forwards of a `target` that takes several prompts at once, into its `cache`."""

    def __init__(self, target: Target, cache: SlotCache):
        self._target, self._cache = target, cache
        self._program: Program | None = None
        self._pools: list[Tensor] = []
        self._tried = False

    def forward(
        self, tokens: Tensor, positions: Tensor, lengths: Tensor, slots: Tensor, last: Tensor
    ) -> TargetOutput | None:
        """The logits [1, P, V] after the `last` row int64 [P] of each piece, and the features [1, T, F] of rows of
        `tokens`, at `positions`, of prompts of `lengths`, int64 [1, T], in `slots` int64 [T].

        None where there is no program for them: of one row, and where none can be made.
        """
        if not self._tried:
            self._program, self._tried = self._made(), True
        if self._program is None or tokens.shape[1] == 1:
            return None
        twice = last.repeat(2) if len(last) == 1 else last  # a size of one would be a kind of its own
        logits, *features = self._program([tokens, positions, lengths, slots, twice, *self._pools])
        self._cache.mark_full(slots.unique().tolist())
        return TargetOutput(logits[:, : len(last)], features[0] if features else None)

    def _made(self) -> Program | None:
        nothing = torch.zeros(1, 1, dtype=torch.int64)
        self._target.forward(nothing, nothing, self._cache.rows(nothing[0] - 1, nothing, 1))  # makes the pools
        inventory = Inventory(self._target)
        weights = list(inventory.weights.values())
        pools = [*self._cache.layers.values()]
        self._pools = [pool for pair in pools for pool in pair]

        def made() -> Program:
            return program(
                f"{inventory.digest} prompts", lambda: _trace(self._target, self._cache, pools, weights), weights,
                what="prompts",
            )  # fmt: skip

        return or_warning(made, "prompts are not taken in by a compiled program, and slower")


def _trace(target: Target, cache: SlotCache, pools: Pools, weights: Sequence[Tensor]) -> ExportedProgram:
    any_size = Dim.DYNAMIC
    row, places = {1: any_size}, {0: any_size}
    shapes = row, row, row, places, places, [({0: any_size, 2: any_size},) * 2] * len(pools)
    with torch.inference_mode(False), torch.no_grad():
        rows, pieces = (torch.ones(count, dtype=torch.int64) for count in (ROWS, PIECES))
        inputs = *(rows[None].clone() for _ in range(3)), rows, pieces, example_pools(pools)
        return export(_Prompts(target, cache, weights), inputs, dynamic_shapes=shapes, strict=False)


class _Prompts(nn.Module):
    """`Target.forward` of prompts as a module: its buffers are the weights."""

    def __init__(self, target: Target, cache: SlotCache, weights: Sequence[Tensor]):
        super().__init__()
        self._target, self._cache, self._weights = target, cache, weights
        for number, weight in enumerate(weights):
            self.register_buffer(f"w{number}", stand_in(weight))

    def forward(
        self, tokens: Tensor, positions: Tensor, lengths: Tensor, slots: Tensor, last: Tensor, pools: Pools
    ) -> list[Tensor]:
        cache = TracedCache(self._cache, pools)
        rows = _TracedPromptRows(cache, TracedRows(slots, positions[0, :, None]), cache.capacity, [])
        run: Any = type(self._target).forward.__wrapped__  # type: ignore[attr-defined]  # without its inference mode
        with GivenWeights({id(weight): getattr(self, f"w{number}") for number, weight in enumerate(self._weights)}):
            out = run(self._target, tokens, positions, rows, last_only=True, last_rows=last, lengths=lengths)
        return [out.logits] if out.features is None else [out.logits, out.features]


class _TracedPromptRows(TracedCacheRows):
    """`TracedCacheRows` of a forward of one row of T tokens, each a sequence of its own."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
        """Attend from `query` [1, N, T, D]: [1, N, T, E]."""
        return super().attend(query.transpose(0, 2), keys, values, scoring).transpose(0, 2)

    def _write(self, keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> None:
        write(keys, values, key.transpose(0, 2), value.transpose(0, 2), self.rows)
