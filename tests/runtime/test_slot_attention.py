"""Attention over slots: kernels and torch references against attention written out in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixtures.compiler import NO_COMPILER, compiles
from fixtures.examples import examples
from fixtures.gpu.kernels import DEVICE, NATIVE, references_only
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from draftkit.runtime.attention import slot_attention
from draftkit.runtime.cache import SlotCache
from draftkit.runtime.compiled.attention import DTYPES, attend_ranges, can_attend, load_kernel
from draftkit.runtime.compiled.trace import TracedRows
from draftkit.runtime.ops.slot_attention import MAX_ROWS, Scoring, attend, attend_in_blocks, attend_reference
from draftkit.runtime.ops.slot_write import write, write_reference
from draftkit.runtime.slot_rows import Branches, SlotRows

pytest.importorskip("triton")

torch.set_num_threads(1)

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


# Cases


@dataclass(frozen=True)
class Case:
    """A decode batch; `lengths` are those of the sequences, their rows included, 0 for one that is not there.

    Sequences lie in slots that are neither ordered nor consecutive, unless they are `ordered`. `padding`: rows at the
    end of every second sequence that are not there. `latent`: values are the first part of keys.
    """

    lengths: tuple[int, ...]
    capacity: int
    rows: int = 1
    groups: int = 1
    ratio: int = 1
    width: int = 16
    value_width: int | None = None
    window: int | None = None
    sink_tokens: int = 0
    chunk: int | None = None
    softcap: float | None = None
    sinks: bool = False
    latent: bool = False
    dtype: torch.dtype = torch.float32
    padding: int = 0
    bidirectional: bool = False
    anchored: bool = False
    ordered: bool = False
    seed: int = 0

    def __str__(self) -> str:
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return " ".join(f"{name}={value}" for name, value in changed.items())

    def batch(self) -> Batch:
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(self.dtype)

        count, values = len(self.lengths), self.value_width or self.width
        slots = torch.arange(count) if self.ordered else torch.randperm(2 * count, generator=generator)[:count]
        lengths = torch.tensor(self.lengths)
        positions = lengths[:, None] - self.rows + torch.arange(self.rows)
        if self.padding:
            positions[::2, -self.padding :] = -1
        sinks = normal(self.groups * self.ratio) if self.sinks else None
        keys = normal(2 * count, self.groups, self.capacity, self.width)
        batch = Batch(
            query=normal(count, self.rows, self.groups * self.ratio, self.width).transpose(1, 2),
            keys=keys,
            values=keys[..., :values] if self.latent else normal(2 * count, self.groups, self.capacity, values),
            latent=self.latent,
            slots=slots.masked_fill(lengths == 0, -1),
            positions=positions,
            scoring=Scoring(
                self.width**-0.5,
                self.window,
                self.softcap,
                sinks,
                self.bidirectional,
                self.anchored,
                self.chunk,
                sink_tokens=self.sink_tokens,
            ),
        )
        return batch.poisoned()


@dataclass(frozen=True)
class Batch:
    """The arguments of `attend`."""

    query: Tensor
    keys: Tensor
    values: Tensor
    slots: Tensor
    positions: Tensor
    scoring: Scoring
    latent: bool

    def attend(self, function: Any = attend) -> Tensor:
        values = self.keys[..., : self.values.shape[3]] if self.latent else self.values
        return function(self.query, self.keys, values, SlotRows(self.slots, self.positions), self.scoring)

    def to(self, device: str) -> Batch:
        parts = vars(self) | {name: part.to(device) for name, part in vars(self).items() if isinstance(part, Tensor)}
        sinks = self.scoring.sinks
        return Batch(**parts | {"scoring": self.scoring._replace(sinks=None if sinks is None else sinks.to(device))})

    def seen(self) -> Iterator[tuple[int, int, int, list[int]]]:
        """Sequence, row, slot and the entries that it sees, of the rows that are there."""
        for b, t in product(range(len(self.slots)), range(self.positions.shape[1])):
            slot, position, chunk = int(self.slots[b]), int(self.positions[b, t]), self.scoring.chunk
            last = int(self.positions[b].max()) if self.scoring.bidirectional else position
            origin = int(self.positions[b, 0]) if self.scoring.anchored else position
            begin = 0 if self.scoring.window is None else max(origin - self.scoring.window + 1, 0)
            if self.scoring.window is not None and not self.scoring.anchored:
                last = min(last, position + self.scoring.window - 1)
            first = 0 if chunk is None else position // chunk * chunk
            if slot >= 0 and position >= 0:
                entries = range(first, last + 1)
                yield b, t, slot, [entry for entry in entries if entry >= begin or entry < self.scoring.sink_tokens]

    def poisoned(self) -> Batch:
        """NaN in every entry that no row sees."""
        unseen = torch.ones(self.keys.shape[0], 1, self.keys.shape[2], 1, dtype=torch.bool)
        for _, _, slot, entries in self.seen():
            unseen[slot, :, entries] = False
        return replace(
            self, keys=self.keys.masked_fill(unseen, torch.nan), values=self.values.masked_fill(unseen, torch.nan)
        )

    def cleaned(self) -> Batch:
        return replace(self, keys=self.keys.nan_to_num(9.0), values=self.values.nan_to_num(9.0))

    def written_out(self) -> Tensor:
        """float64, row by row."""
        (count, heads, rows, _), width = self.query.shape, self.values.shape[3]
        out = torch.zeros(count, heads, rows, width, dtype=torch.float64)
        ratio = heads // self.keys.shape[1]
        for b, t, slot, entries in self.seen():
            keys = self.keys[slot, :, entries].double().repeat_interleave(ratio, 0)
            values = self.values[slot, :, entries].double().repeat_interleave(ratio, 0)
            scores = (keys @ self.query[b, :, t].double()[:, :, None])[:, :, 0] * self.scoring.scaling
            if self.scoring.softcap is not None:
                scores = torch.tanh(scores / self.scoring.softcap) * self.scoring.softcap
            if self.scoring.sinks is not None:
                scores = torch.cat((scores, self.scoring.sinks.double()[:, None]), dim=1)
            weights = scores.softmax(1)[:, : keys.shape[1]]
            out[b, :, t] = (weights[:, None] @ values)[:, 0]
        return out


def assert_right(out: Tensor, batch: Batch) -> None:
    expected = batch.written_out()
    assert out.shape == expected.shape
    assert out.dtype == batch.query.dtype
    torch.testing.assert_close(out.cpu().double(), expected, rtol=0, atol=TOLERANCE[batch.query.dtype])
    there = (batch.positions >= 0) & (batch.slots >= 0)[:, None]
    assert not out.transpose(1, 2)[~there.to(out.device)].any()


KERNEL_CASES = [
    # lengths at both sides of a split's end, and beyond
    Case((128, 129), 384, width=16),
    Case((127, 256, 257), 257, groups=2, dtype=torch.bfloat16),
    Case((300, 3, 130), 400, rows=3, ratio=2, width=64, dtype=torch.float16),
    # one row, as when drafting; K + 1 rows; the most
    Case((70,), 70, rows=1, groups=2, ratio=8, width=128, dtype=torch.bfloat16),
    Case((40, 21), 64, rows=5, groups=1, ratio=3, width=80),
    Case((200,), 256, rows=17, ratio=1, width=96, dtype=torch.bfloat16),
    Case((17,), 20, rows=17, ratio=8, width=16),  # more query rows than a tile holds
    # what models add
    Case((150, 300), 300, rows=3, ratio=2, window=140),
    Case((9, 200), 200, rows=2, window=4, groups=2, dtype=torch.float16),
    Case((20, 140), 140, rows=2, ratio=4, softcap=0.5, width=64),
    Case((20, 290), 290, rows=1, ratio=2, sinks=True, dtype=torch.bfloat16),
    Case((4, 160), 170, rows=3, ratio=2, window=150, softcap=1.0, sinks=True),
    Case((35, 150), 150, rows=2, width=24, value_width=40),
    # block drafters
    Case((5, 140, 300), 300, rows=5, ratio=2, bidirectional=True),
    Case((7, 150), 150, rows=4, groups=2, window=3, bidirectional=True, dtype=torch.bfloat16),
    Case((9, 290), 290, rows=6, window=140, anchored=True),
    Case((12, 0, 20), 20, rows=4, window=5, bidirectional=True, anchored=True, padding=1),
    # the first tokens besides a window: in a split of their own, beside it, and before rows that see them anyway
    Case((3, 150, 300), 300, rows=3, ratio=2, window=40, sink_tokens=4),
    Case((20, 290), 290, rows=2, window=9, sink_tokens=150, dtype=torch.bfloat16),
    Case((7, 200), 200, rows=4, ratio=2, window=3, sink_tokens=2, bidirectional=True),
    Case((9, 290), 290, rows=6, window=140, sink_tokens=5, anchored=True),
    Case((6, 150, 130), 150, rows=4, ratio=2, chunk=64),
    Case((3, 300), 300, rows=3, chunk=140, window=150, dtype=torch.bfloat16),
    Case((35, 150), 150, rows=3, ratio=5, width=72, value_width=64, latent=True),
    # sequences and rows that are not there
    Case((0, 140, 0), 140, rows=2, ratio=2, sinks=True),
    Case((0,), 5),
    Case((11, 12, 140), 140, rows=4, padding=2, ratio=2),
    Case((6, 0, 300), 300, rows=3, padding=3, window=2, dtype=torch.bfloat16),
]


@pytest.mark.interpreter
@pytest.mark.parametrize("case", KERNEL_CASES, ids=str)
def test_kernel(case: Case) -> None:
    batch = case.batch()
    assert_right(batch.to(DEVICE).attend(), batch)


BLOCKS = [  # pieces of prompts, whose attention FlashAttention does not know
    Case((70, 100), 128, rows=70, ratio=2, softcap=0.5),
    Case((150,), 150, rows=66, ratio=2, window=40, sinks=True),
    Case((140,), 140, rows=128, width=24, value_width=16, ratio=3, latent=True),
    Case((90,), 90, rows=90, chunk=64, dtype=torch.bfloat16),
]


@pytest.mark.interpreter
@pytest.mark.parametrize("case", BLOCKS, ids=str)
def test_kernel_takes_any_number_of_rows_in_blocks(case: Case) -> None:
    batch = case.batch()
    assert_right(batch.to(DEVICE).attend(attend_in_blocks), batch)


@st.composite
def cases(draw: Any, largest: int, most_rows: int, most_sequences: int) -> Case:
    capacity = draw(st.integers(1, largest))
    value_width = draw(st.none() | st.just(16))
    rows = draw(st.integers(1, min(most_rows, capacity)))
    return Case(
        lengths=tuple(draw(st.lists(st.just(0) | st.integers(rows, capacity), min_size=1, max_size=most_sequences))),
        capacity=capacity,
        rows=rows,
        groups=draw(st.integers(1, 2)),
        ratio=draw(st.integers(1, 8)),
        width=draw(st.sampled_from([16, 64, 80, 96, 128])),
        value_width=value_width,
        latent=value_width is not None and draw(st.booleans()),
        window=draw(st.none() | st.integers(1, largest)),
        sink_tokens=draw(st.just(0) | st.integers(1, largest)),
        chunk=draw(st.none() | st.integers(1, largest)),
        softcap=draw(st.none() | st.just(1.0)),
        sinks=draw(st.booleans()),
        dtype=draw(st.sampled_from(list(TOLERANCE))),
        padding=draw(st.integers(0, rows)),
        bidirectional=draw(st.booleans()),
        anchored=draw(st.booleans()),
        ordered=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )


@pytest.mark.interpreter
@examples(200 if NATIVE else 4)
@given(cases(largest=3000 if NATIVE else 300, most_rows=17 if NATIVE else 3, most_sequences=9 if NATIVE else 2))
def test_kernel_on_random_batches(case: Case) -> None:
    batch = case.batch()
    assert_right(batch.to(DEVICE).attend(), batch)


@pytest.mark.slow
@examples(150)
@given(cases(largest=150, most_rows=MAX_ROWS + 20, most_sequences=4))
def test_reference_on_random_batches(case: Case) -> None:
    batch = case.batch()
    assert_right(batch.cleaned().attend(attend_reference), batch)


def test_the_comparison_notices_one_entry_too_many() -> None:
    batch = Case((9, 14), 20, rows=2, ratio=2).batch()
    later = replace(batch, positions=batch.positions + 1)
    with pytest.raises(AssertionError):
        assert_right(later.cleaned().attend(attend_reference), batch)


# In C++, for compiled rounds


def by_ranges(query: Tensor, keys: Tensor, values: Tensor, rows: SlotRows, scoring: Scoring) -> Tensor:
    load_kernel()
    own = TracedRows(rows.slots, rows.positions, branches=rows.branches)
    return attend_ranges(query, keys, values, own.slots, *own.ranges(scoring), scoring, own.branches)


def by_tokens(query: Tensor, keys: Tensor, values: Tensor, rows: SlotRows, scoring: Scoring) -> Tensor:
    """`by_ranges`, each row a sequence of its own, as the tokens of prompts are."""
    begin, end = TracedRows(rows.slots, rows.positions).ranges(scoring)
    count = query.shape[2]
    alone = query.transpose(1, 2).flatten(0, 1).unsqueeze(2)
    slots = rows.slots.repeat_interleave(count)
    out = attend_ranges(alone, keys, values, slots, begin.reshape(-1, 1), end.reshape(-1, 1), scoring)
    return out[:, :, 0].unflatten(0, (-1, count)).transpose(1, 2)


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cpu_kernel(dtype: torch.dtype, threads: int) -> None:
    """Also where a sequence is cut in parts, as threads outnumber sequences and heads."""
    torch.set_num_threads(threads)
    try:
        for case in (replace(case, dtype=dtype) for case in (*KERNEL_CASES, Case((700,), 900, rows=3, ratio=2))):
            batch = case.batch()
            if can_attend(batch.scoring):
                assert_right(batch.cleaned().attend(by_ranges), batch)
                assert_right(batch.cleaned().attend(by_tokens), batch)
    finally:
        torch.set_num_threads(1)


@compiles
@pytest.mark.slow
@examples(100)
@given(cases(largest=150, most_rows=MAX_ROWS + 20, most_sequences=4))
def test_cpu_kernel_on_random_batches(case: Case) -> None:
    assume(case.dtype in DTYPES and can_attend(case.batch().scoring))
    batch = case.batch()
    assert_right(batch.cleaned().attend(by_ranges), batch)
    assert_right(batch.cleaned().attend(by_tokens), batch)


@compiles
@pytest.mark.slow
def test_cpu_kernel_spreads_nan() -> None:
    """Of what a row sees, so that a forward that is broken is found."""
    batch = Case((40,), 64, rows=1, ratio=2).batch()
    for pool in (batch.keys, batch.values):
        kept = pool[batch.slots[0], 0, 17, 3].clone()
        pool[batch.slots[0], 0, 17, 3] = torch.nan
        assert batch.attend(by_ranges).isnan().any()
        pool[batch.slots[0], 0, 17, 3] = kept


# Writing


def new_rows(case: Case) -> tuple[Tensor, Tensor, SlotRows]:
    batch = case.batch()
    count, rows = batch.positions.shape
    key = torch.randn(count, rows, case.groups, case.width).to(case.dtype).transpose(1, 2)
    value = torch.randn(count, case.groups, rows, case.value_width or case.width).to(case.dtype)
    return key, value, SlotRows(batch.slots, batch.positions)


def written(function: Any, case: Case, device: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(case.seed)
    batch = case.batch().cleaned()
    pools = batch.keys.to(device), batch.values.to(device)
    key, value, rows = new_rows(case)
    function(*pools, key.to(device), value.to(device), SlotRows(rows.slots.to(device), rows.positions.to(device)))
    return pools[0].cpu(), pools[1].cpu()


WRITE_CASES = [
    Case((5, 9, 3), 9, rows=3, groups=2, dtype=torch.bfloat16),
    Case((5, 9), 9, rows=1, ordered=True, width=80),
    Case((5, 0, 9), 9, rows=4, padding=2, value_width=24, dtype=torch.float16),
]


@pytest.mark.parametrize(
    ("function", "device"),
    [(write_reference, "cpu"), pytest.param(write, DEVICE, marks=pytest.mark.interpreter)],
    ids=["reference", "kernel"],
)
@pytest.mark.parametrize("case", WRITE_CASES, ids=str)
def test_rows_are_written_to_their_entries_and_nowhere_else(case: Case, function: Any, device: str) -> None:
    pools = written(function, case, device)
    torch.manual_seed(case.seed)
    batch = case.batch().cleaned()
    for pool, before, new in zip(pools, (batch.keys, batch.values), new_rows(case)[:2], strict=True):
        expected = before.clone()
        for b, t, slot, _ in batch.seen():
            expected[slot, :, batch.positions[b, t]] = new[b, :, t]
        assert torch.equal(pool, expected)


# Through the attention function


def decode(device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Attention outputs of two layers while two sequences are read at once and then row by row."""
    generator = torch.Generator().manual_seed(0)
    cache, slots, outputs = SlotCache(3, 40), torch.tensor([2, 0], device=device), []
    for begin, end in ((0, 3), (3, 4), (4, 6)):
        positions = torch.arange(begin, end, device=device).repeat(2, 1)
        kv = cache.rows(slots, positions, 40)
        for layer in range(2):
            query, key, value = (
                torch.randn(2, end - begin, heads, 16, generator=generator).to(device, dtype).transpose(1, 2)
                for heads in (4, 2, 2)
            )
            module: Any = SimpleNamespace(layer_idx=layer)
            out, _ = slot_attention(module, query, key, value, kv=kv, sliding_window=4 if layer else None)
            outputs.append(out.cpu())
    return torch.cat(outputs, dim=1)


@pytest.mark.interpreter
def test_attention_function_by_kernels_equals_references() -> None:
    with references_only():
        expected = decode("cpu")
    torch.testing.assert_close(decode(DEVICE), expected, rtol=1e-5, atol=1e-5)


# On a GPU alone


@pytest.mark.gpu
def test_a_captured_graph_follows_lengths() -> None:
    """Writing and attending in one CUDA graph, replayed as sequences grow, move to other slots and leave."""
    batch = Case((700, 41, 3000), 4096, rows=5, groups=8, ratio=4, width=128, dtype=torch.bfloat16).batch()
    batch = batch.cleaned().to("cuda")
    key, value = torch.randn(2, 3, 5, 8, 128, device="cuda", dtype=torch.bfloat16).transpose(2, 3)
    rows = SlotRows(batch.slots, batch.positions)

    def step() -> Tensor:
        write(batch.keys, batch.values, key, value, rows)
        return attend(batch.query, batch.keys, batch.values, rows, batch.scoring)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for slots, lengths in (([1, 5, 0], [128, 129, 4096]), ([4, -1, 2], [5, 77, 2049]), ([0, 1, 2], [6, 2048, 300])):
        batch.slots.copy_(torch.tensor(slots))
        batch.positions.copy_(torch.tensor(lengths)[:, None] - 5 + torch.arange(5))
        graph.replay()
        expected = replace(batch, slots=batch.slots.clone(), positions=batch.positions.clone())
        torch.testing.assert_close(out, expected.attend(attend_reference), rtol=0, atol=3e-2)


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    batch = Case((700, 0, 3000), 4096, rows=5, groups=2, ratio=4, width=64, sinks=True).batch().to("cuda")
    rows = SlotRows(batch.slots, batch.positions)
    key, value = torch.randn(2, 3, 2, 5, 64, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        write(batch.keys, batch.values, key, value, rows)
        batch.attend()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Trees


@pytest.mark.interpreter
@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize(("window", "sink_tokens"), [(None, 0), (5, 0), (2, 9)])
@pytest.mark.parametrize("chunk", [None, 8])
@pytest.mark.parametrize(("rows", "most"), [(5, 5), (3, 9), (17, 100)])
def test_rows_of_a_tree_see_what_branches_say(
    rows: int, most: int, window: int | None, sink_tokens: int, chunk: int | None
) -> None:
    """The rows of a whole tree, and those of its last level; entries that belong to no path hold anything finite."""
    generator = torch.Generator().manual_seed(rows)
    visible = torch.rand(3, rows, most, generator=generator) < 0.5
    visible[:, torch.arange(rows), torch.arange(most - rows, most)] = True
    first = torch.tensor([[11], [300], [7]])
    places = first + torch.randint(0, 4, (3, most), generator=generator)
    slots, capacity = torch.tensor([2, 0, -1]), 420
    query = torch.randn(3, 4, rows, 16, generator=generator)
    keys, values = torch.randn(2, 3, 2, capacity, 16, generator=generator)
    scoring = Scoring(0.25, window, chunk=chunk, sink_tokens=sink_tokens)
    wanted = torch.zeros(3, 4, rows, 16, dtype=torch.float64)
    for b, t in product(range(2), range(rows)):
        row = int(places[b, most - rows + t])
        near, own = 0 if window is None else row - window + 1, 0 if chunk is None else row // chunk * chunk
        wide = {place for place in range(row + most) if place >= own and (place >= near or place < sink_tokens)}
        seen = [entry for entry in range(int(first[b])) if entry in wide]
        seen += [int(first[b]) + m for m in range(most) if visible[b, t, m] and int(places[b, m]) in wide]
        for head in range(4):
            own_keys, own_values = (pool[slots[b], head // 2, seen].double() for pool in (keys, values))
            weights = (own_keys @ query[b, head, t].double() * 0.25).softmax(0)
            wanted[b, head, t] = weights @ own_values
    branches = Branches(*(tensor.to(DEVICE) for tensor in (first, places, visible)))
    tree = SlotRows(slots.to(DEVICE), branches.entries, branches=branches)
    found = attend(query.to(DEVICE), keys.to(DEVICE), values.to(DEVICE), tree, scoring)
    torch.testing.assert_close(found.cpu().double(), wanted, atol=2e-5, rtol=2e-5)
    again = SlotRows(slots, branches.entries.cpu(), branches=Branches(first, places, visible))
    reference = attend_reference(query, keys, values, again, scoring)
    torch.testing.assert_close(reference.double(), wanted, atol=2e-5, rtol=2e-5)
    if not NO_COMPILER and can_attend(scoring):
        torch.testing.assert_close(
            by_ranges(query, keys, values, again, scoring).double(), wanted, atol=2e-5, rtol=2e-5
        )
