"""A round as a function of tensors, and the trace of it.

What lives longer than a round is given to the program: the states of slots and the pools of caches, which it changes in
place, and the weights, among which is whatever else a drafter keeps. S slots, B sequences, K draft tokens, C entries of
a slot, L positions that a round reaches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from draftkit.runtime.batch import Batch, SamplingTensors
from draftkit.runtime.cache import CacheRows, SlotCache
from draftkit.runtime.compiled.attention import DTYPES, attend_ranges, can_attend
from draftkit.runtime.ops.slot_attention import Scoring
from draftkit.runtime.rounds import Rounds, SlotState
from draftkit.runtime.slot_rows import Branches, SlotRows

Pools = list[tuple[Tensor, Tensor]]

# Sizes of example inputs, which a program does not keep: it is scheduled for their order of magnitude.
SEQUENCES, SLOTS, ENTRIES, REACHED = 7, 13, 521, 257


class RoundInputs(NamedTuple):
    """`reach` [L] of any values tells by its length which positions a round may reach; `slots` and `columns` [B] are
    those of a batch, `state` the tensors of `SlotState`, `pools` those of each cache, [S, G, C, D]."""

    reach: Tensor
    slots: Tensor
    columns: list[Tensor]
    state: list[Tensor]
    pools: list[Pools]

    @classmethod
    def of(cls, batch: Batch, state: SlotState, caches: Sequence[SlotCache], reach: Tensor) -> RoundInputs:
        pools = [[*cache.layers.values()] for cache in caches]
        columns = [*batch.target[:-1], *batch.draft[:-1]]
        return cls(reach, batch.slots, columns, [*vars(state).values()], pools)

    def example(self, sequences: int) -> RoundInputs:
        """Inputs of made-up sizes for so many sequences."""

        def sized(*sizes: int, like: Tensor) -> Tensor:
            return torch.empty(*sizes, *like.shape[len(sizes) :], dtype=like.dtype)

        return RoundInputs(
            reach=torch.empty(REACHED),
            slots=sized(sequences, like=self.slots),
            columns=[sized(sequences, like=column) for column in self.columns],
            state=[sized(SLOTS + 1, like=tensor) for tensor in self.state],
            pools=[example_pools(pools) for pools in self.pools],
        )


def example_pools(pools: Pools) -> Pools:
    """Pools of made-up sizes."""

    def sized(like: Tensor) -> Tensor:
        return torch.empty(SLOTS, like.shape[1], ENTRIES, like.shape[3], dtype=like.dtype)

    return [(sized(keys), sized(values)) for keys, values in pools]


@dataclass(frozen=True)
class Kind:
    """What decides the operations of a round: `alone` is a batch of one sequence; `flags` those of `Batch.kind`."""

    alone: bool
    flags: tuple[bool, ...]
    k: int
    drafting: bool

    @classmethod
    def of(cls, batch: Batch, k: int, drafting: bool) -> Kind:
        count, *flags = batch.kind
        return cls(count == 1, tuple(flags), k, drafting)

    def __str__(self) -> str:
        together = "one sequence" if self.alone else "several sequences"
        return f"{together}, {f'K = {self.k}' if self.k else 'plain decoding'}"


def trace(rounds: Rounds, batch: Batch, inputs: RoundInputs, kind: Kind, weights: Sequence[Tensor]) -> ExportedProgram:
    """The trace of `rounds.run` of batches like `batch`, whose `weights` are called w0, w1, … in it.

    Raises what torch raises where something looks at a value on the host, or cannot be traced for another reason;
    `NotImplementedError` for targets that keep or choose what no pool of keys and values holds.
    """
    if rounds.target.chooses or any(cache.states.pools for cache in caches_of(rounds)):
        raise NotImplementedError("layers that keep states, or choose what they attend to, are not compiled")
    any_size = Dim.DYNAMIC
    together = {} if kind.alone else {0: any_size}
    shapes = (
        {0: any_size},
        together,
        [together] * len(inputs.columns),
        [{0: any_size}] * len(inputs.state),
        [[({0: any_size, 2: any_size},) * 2] * len(pools) for pools in inputs.pools],
    )
    with torch.inference_mode(False), torch.no_grad():
        example = inputs.example(1 if kind.alone else SEQUENCES)
        return export(_Round(rounds, batch, kind, weights), tuple(example), dynamic_shapes=shapes, strict=False)


class _Round(nn.Module):
    """`Rounds.run` as a module: its buffers are the weights, its arguments `RoundInputs`."""

    def __init__(self, rounds: Rounds, batch: Batch, kind: Kind, weights: Sequence[Tensor]):
        super().__init__()
        self._rounds, self._batch, self._kind, self._weights = rounds, batch, kind, weights
        for number, weight in enumerate(weights):
            self.register_buffer(f"w{number}", stand_in(weight))

    def forward(
        self, reach: Tensor, slots: Tensor, columns: list[Tensor], state: list[Tensor], pools: list[Pools]
    ) -> Tensor:
        half = len(columns) // 2
        batch = replace(
            self._batch,
            slots=slots,
            target=SamplingTensors._make([*columns[:half], self._batch.target.truncates]),
            draft=SamplingTensors._make([*columns[half:], self._batch.draft.truncates]),
        )
        rounds = copy(self._rounds)
        caches = [TracedCache(cache, own) for cache, own in zip(caches_of(rounds), pools, strict=True)]
        rounds.cache, rounds.state, rounds.trims = caches[0], SlotState(*state), False
        run: Any = type(rounds).run.__wrapped__  # type: ignore[attr-defined]  # without its inference mode
        given = {id(weight): getattr(self, f"w{number}") for number, weight in enumerate(self._weights)}
        with _drafting_in(rounds, caches[1:]), GivenWeights(given):
            return run(rounds, batch, self._kind.k, reach.shape[0], drafting=self._kind.drafting)


def caches_of(rounds: Rounds) -> list[SlotCache]:
    """The caches that rounds store in: the target's, and those of the drafter."""
    return [rounds.cache, *_own_caches(rounds.drafter).values()]


def _own_caches(drafter: object) -> dict[str, SlotCache]:
    kept: Mapping[str, Any] = {} if drafter is None else vars(drafter)
    return {name: value for name, value in kept.items() if isinstance(value, SlotCache)}


@contextmanager
def _drafting_in(rounds: Rounds, caches: Sequence[SlotCache]) -> Iterator[None]:
    """Let the drafter store in other caches while the body runs."""
    own = _own_caches(rounds.drafter)
    try:
        for name, cache in zip(own, caches, strict=True):
            setattr(rounds.drafter, name, cache)
        yield
    finally:
        for name, cache in own.items():
            setattr(rounds.drafter, name, cache)


def stand_in(weight: Tensor) -> Tensor:
    """The weight, or memory that nothing touches in the place of one whose layout is oneDNN's own."""
    return torch.empty(weight.shape, dtype=weight.dtype) if weight.is_mkldnn else weight


class GivenWeights(TorchFunctionMode):
    """Operations are given other tensors in the place of some, by the ids of these."""

    def __init__(self, given: Mapping[int, Tensor]):
        self._given = given

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is Tensor.take_along_dim:
            function = _take_along_dim
        return function(*tree_map(self._instead, args), **tree_map(self._instead, kwargs or {}))

    def _instead(self, argument: Any) -> Any:
        return self._given.get(id(argument), argument) if isinstance(argument, Tensor) else argument


def _take_along_dim(values: Tensor, index: Tensor, dim: int) -> Tensor:
    """`Tensor.take_along_dim` with sizes that a trace leaves open, where torch's own makes them constants."""
    sizes = [index.shape[d] if d == dim else values.shape[d] for d in range(values.dim())]
    return values.gather(dim, index.expand(sizes))


class TracedCache(SlotCache):
    """A cache with the pools that a program is given."""

    def __init__(self, own: SlotCache, pools: Pools):
        super().__init__(0, pools[0][0].shape[2] if pools else 0)
        self.layers = dict(zip(own.layers, pools, strict=True))

    def rows(self, slots: Tensor, positions: Tensor, length: int, *, prompt: bool = False) -> CacheRows:
        return TracedCacheRows(self, self._placed(slots, positions), length, [])

    def rows_of_tree(self, slots: Tensor, branches: Branches, length: int) -> CacheRows:
        return TracedCacheRows(self, TracedRows(slots, branches.entries, branches=branches), length, [])

    def _placed(self, slots: Tensor, entries: Tensor) -> TracedRows:
        return TracedRows(slots, entries)


class TracedCacheRows(CacheRows):
    """Rows whose attention is that of the kernel, where it can say what they see."""

    rows: TracedRows

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
        if query.dtype not in DTYPES or not can_attend(scoring):
            return super().attend(query, keys, values, scoring)
        rows = self.rows
        return attend_ranges(query, keys, values, rows.slots, *rows.ranges(scoring), scoring, rows.branches)


class TracedRows(SlotRows):
    """Rows whose values nobody looks at: those that are not there are stored in the last entry, which is never read."""

    complete = False

    def __init__(self, slots: Tensor, positions: Tensor, *, branches: Branches | None = None):
        super().__init__(slots, positions, branches=branches)
        self._ranges: dict[object, tuple[Tensor, Tensor]] = {}

    def ranges(self, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """The first entry that each row sees, and the first that it does not, int64 [B, T]: what `bias` says, besides
        of branches and `sink_tokens`."""
        key = scoring.window, scoring.chunk, scoring.bidirectional, scoring.anchored
        if key not in self._ranges:
            row = torch.where(self.present, self.places, -1)
            begin, end = torch.zeros_like(row), torch.where(self.present, self.positions, -1) + 1
            if scoring.bidirectional or self.branches is not None:
                end = torch.where(self.present, end.amax(1, keepdim=True), 0)
            if scoring.window is not None:
                begin = (row[:, :1].expand_as(row) if scoring.anchored else row) - scoring.window + 1
                if scoring.bidirectional and not scoring.anchored:
                    end = torch.minimum(end, row + scoring.window)
            if scoring.chunk is not None:
                begin = torch.maximum(begin, row // scoring.chunk * scoring.chunk)
            if self.branches is not None:  # whose entries are told one by one, also where a window begins among them
                begin = torch.minimum(begin, self.branches.first)
            self._ranges[key] = begin.contiguous(), end.contiguous()
        return self._ranges[key]

    @property
    def entries(self) -> tuple[Tensor, Tensor]:
        return self.slots[:, None], torch.where(self.present, self.positions, -1)

    def kept(self, of_rows: Tensor) -> Tensor:
        return of_rows

    def of_sequences(self, pool: Tensor) -> Tensor:
        return pool.index_select(0, self.slots.clamp(min=0))
