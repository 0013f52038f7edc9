"""Rounds run by compiled programs, one for each kind of batch and K, made at its first use."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftkit.runtime.batch import Batch
from draftkit.runtime.compiled.inventory import Inventory
from draftkit.runtime.compiled.programs import Program, or_warning, program
from draftkit.runtime.compiled.trace import Kind, RoundInputs, caches_of, trace
from draftkit.runtime.rounds import Rounds


class CompiledRounds:
    """`Rounds` with the same results. The last entry of their caches is that of rows that are not there."""

    def __init__(self, rounds: Rounds, capacity: int):
        self._rounds = rounds
        self._reach = torch.empty(capacity)
        self._programs: dict[Kind, Program | None] = {}  # None for what cannot be compiled
        self._held: tuple[Batch, list[Tensor]] | None = None  # the last batch, and the inputs that go with it
        self._taken: list[int] = []  # its slots

    def rows(self, slots: Sequence[int]) -> list[int]:
        return self._rounds.rows(slots)

    @torch.inference_mode()
    def run(self, batch: Batch, k: int, length: int, *, drafting: bool = True) -> Tensor:
        """`Rounds.run`."""
        kind = Kind.of(batch, k, drafting)
        if kind not in self._programs:
            self._programs[kind] = self._prepared(batch, kind, length)
        chosen = self._programs[kind]
        if chosen is None:
            return self._rounds.run(batch, k, length, drafting=drafting)
        (out,) = chosen([self._reach[:length], *self._inputs(batch)])
        return out

    def _inputs(self, batch: Batch) -> list[Tensor]:
        """All inputs but the first."""
        if self._held is None or self._held[0] is not batch:
            inputs = RoundInputs.of(batch, self._rounds.state, caches_of(self._rounds), self._reach)
            pools = [pool for pools in inputs.pools for pair in pools for pool in pair]
            self._held = batch, [inputs.slots, *inputs.columns, *inputs.state, *pools]
            self._taken = [slot for slot in batch.slots.tolist() if slot >= 0]
        for stored in caches_of(self._rounds):
            stored.mark_full(self._taken)
        return self._held[1]

    def _prepared(self, batch: Batch, kind: Kind, length: int) -> Program | None:
        """The program of a kind of batch; None, and a warning, where there is none."""
        self._rounds.run(batch.vacant(), kind.k, length, drafting=kind.drafting)  # makes the pools that are not there
        inventory = Inventory(self._rounds)
        weights = list(inventory.weights.values())
        inputs = RoundInputs.of(batch, self._rounds.state, caches_of(self._rounds), self._reach)

        def made() -> Program:
            return program(
                f"{inventory.digest} {kind}  {kind.flags} {kind.drafting}",
                lambda: trace(self._rounds, batch, inputs, kind, weights),
                weights,
                what=f"rounds of {kind}",
            )

        return or_warning(made, f"rounds of {kind} are not compiled, and slower")
