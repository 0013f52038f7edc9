"""Attention of a few query rows per sequence over the filled part of their slots.

Flash-decoding: the sequence is split among programs, each of which takes all query heads and rows of one key/value head
as one tile, so that every key and value is read once; a second kernel joins the splits. Grid and shapes follow from the
capacity; what a sequence really holds is known to the programs alone.
Shapes: S slots, G key/value heads, C entries, D and E widths of keys and values; B sequences, N query heads, T rows.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from draftkit.runtime.ops.backend import jit, next_power_of_2, tl, uses_triton
from draftkit.runtime.slot_rows import SlotRows

MAX_ROWS = 64  # rows of a sequence that count as few
_SHORTEST_SPLIT = 128  # entries; less work than that is not worth a partial result
LONGEST_SPLIT = 2048  # entries; a longer sequence is split however many others there are
_ANY_LENGTH = 1 << 30  # entries of a split of a prompt, whose rows keep a device busy: partial results would be large
_PROGRAMS_PER_PROCESSOR = 2
_TILE_BYTES = 16384  # of keys, and of values, that a program loads at once
_JOINED = 32  # splits that are joined at once
_LOG2_E = math.log2(math.e)


class Scoring(NamedTuple):
    """How scores follow from products of query and key.

    `window`: a row sees itself and the `window` − 1 positions before, all where None; and besides the sequence's first
    `sink_tokens`. `softcap` bounds the scores by a tanh (Gemma 2). `sinks` [N] are one more score per head, which takes
    weight and gives no value (gpt-oss). `bidirectional`: a row sees the later rows of its sequence too, those of this
    forward, as far ahead as its window goes back. `anchored`: the window of all rows is that of the sequence's first
    one, and bounds no later row. `chunk`: positions are cut into chunks of so many, and a row sees nothing before its
    own (Llama 4). `chosen` int [B, T, …]: the entries that each row sees, of those that it would see. `seen` bool
    [B, 1, T, T]: of a whole prompt, the entries that each row sees, whatever else is said.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    bidirectional: bool = False
    anchored: bool = False
    chunk: int | None = None
    chosen: Tensor | None = None
    sink_tokens: int = 0
    seen: Tensor | None = None

    @property
    def bounds(self) -> tuple[int | None, int | None, int]:
        """Window, chunk, and the tokens seen besides the window."""
        return self.window, self.chunk, self.sink_tokens


def attend(query: Tensor, keys: Tensor, values: Tensor, rows: SlotRows, scoring: Scoring) -> Tensor:
    """Attention of `query` [B, N, T, D] over `keys` [S, G, C, D] and `values` [S, G, C, E], in which the rows'
    own are stored: [B, N, T, E]; zeros where a row is not there. `values` may be a part of each entry of `keys`.

    C bounds the positions from above: the pools' capacity, or less where the host knows better. In a round on CUDA
    nothing depends on values on the host up to `MAX_ROWS` rows, and entries that no row sees are not read; the
    reference multiplies them by zero, so they must be finite: `SlotCache` clears what rejected tokens and earlier
    sequences leave. A kernel is compiled for its number of rows, and every prompt has its own: on CUDA prompts are
    taken as sequences of `MAX_ROWS` rows, elsewhere by the reference.
    """
    if uses_triton(query) and scoring.chosen is None and scoring.seen is None and query.numel():
        if not rows.prompt and query.shape[2] <= MAX_ROWS:
            return _attend(query, keys, values, rows, scoring)
        if query.is_cuda and not scoring.bidirectional:
            return attend_in_blocks(query, keys, values, rows, scoring)
    return attend_reference(query, keys, values, rows, scoring)


def attend_in_blocks(query: Tensor, keys: Tensor, values: Tensor, rows: SlotRows, scoring: Scoring) -> Tensor:
    """`attend` by the kernel for any number of rows: `MAX_ROWS` of them at a time are a sequence of their own, over the
    same slot. No bias, no score and no copy of the keys is in memory, however long the sequence is."""
    batch, _, count, _ = query.shape
    blocks = _ceil(count, MAX_ROWS)
    missing = blocks * MAX_ROWS - count
    positions = pad(rows.positions, (0, missing), value=-1).view(batch * blocks, MAX_ROWS)
    own = SlotRows(rows.slots.repeat_interleave(blocks), positions)
    parts = pad(query, (0, 0, 0, missing)).unflatten(2, (blocks, MAX_ROWS)).transpose(1, 2).flatten(0, 1)
    found = _attend(parts, keys, values, own, scoring, longest=_ANY_LENGTH)
    return found.unflatten(0, (batch, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :count]


def attend_reference(query: Tensor, keys: Tensor, values: Tensor, rows: SlotRows, scoring: Scoring) -> Tensor:
    keys, values = rows.of_sequences(keys), rows.of_sequences(values)
    explicit = scoring.softcap is not None or scoring.sinks is not None
    if explicit or query.shape[2] <= MAX_ROWS:
        out = _folded(query, keys, values, rows, scoring, explicit)
    else:
        out = _by_head(query, keys, values, rows, scoring)
    return out if rows.complete else out.masked_fill(~rows.present[:, None, :, None], 0)


def _folded(query: Tensor, keys: Tensor, values: Tensor, rows: SlotRows, scoring: Scoring, explicit: bool) -> Tensor:
    """The query heads of a key/value head become further rows of it: larger products, at the price of a larger bias."""
    batch, heads, count, width = query.shape
    groups, length = keys.shape[1:3]
    bias = _bias(rows, length, heads // groups, query.dtype, scoring)
    query = query.reshape(batch, groups, -1, width)
    if explicit:
        out = _written_out(query, keys, values, bias, scoring)
    else:
        out = scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=scoring.scaling)
    return out.reshape(batch, heads, count, -1)


def _by_head(query: Tensor, keys: Tensor, values: Tensor, rows: SlotRows, scoring: Scoring) -> Tensor:
    bias = _bias(rows, keys.shape[2], 1, query.dtype, scoring)
    repeats = query.shape[1] // keys.shape[1]
    if query.is_cuda and repeats > 1:  # with a bias, enable_gqa would store all scores there
        keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
    return scaled_dot_product_attention(
        query, keys, values, attn_mask=bias, scale=scoring.scaling, enable_gqa=query.shape[1] != keys.shape[1]
    )


def _bias(rows: SlotRows, length: int, repeats: int, dtype: torch.dtype, scoring: Scoring) -> Tensor:
    if scoring.seen is not None:
        hidden = ~scoring.seen.repeat(1, 1, repeats, 1)
        return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)
    bias = rows.bias(
        length,
        scoring.window,
        repeats,
        dtype,
        bidirectional=scoring.bidirectional,
        anchored=scoring.anchored,
        chunk=scoring.chunk,
        sink_tokens=scoring.sink_tokens,
    )
    if scoring.chosen is None:
        return bias
    batch, count, _ = scoring.chosen.shape
    hidden = scoring.chosen.new_ones(batch, count, length, dtype=torch.bool).scatter_(2, scoring.chosen.long(), False)
    return bias.masked_fill(hidden.repeat(1, repeats, 1)[:, None], -torch.inf)


def _written_out(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scoring: Scoring) -> Tensor:
    """Folded attention with the scores that the fused function lacks."""
    scores = query @ keys.transpose(2, 3) * scoring.scaling
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    scores = scores + bias
    length = keys.shape[2]
    if scoring.sinks is not None:
        rows = query.shape[1] * query.shape[2] // len(scoring.sinks)
        column = scoring.sinks.to(scores.dtype).repeat_interleave(rows).view(1, *query.shape[1:3], 1)
        scores = torch.cat((scores, column.expand(query.shape[0], -1, -1, -1)), dim=-1)
    weights = scores.float().softmax(-1)[..., :length]
    return weights.to(values.dtype) @ values


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, rows: SlotRows, scoring: Scoring, longest: int = LONGEST_SPLIT
) -> Tensor:
    batch, heads, count, _ = query.shape
    _, groups, capacity, width = values.shape
    query = query if query.stride(3) == 1 else query.contiguous()
    tiles, block_m = _tiles(heads // groups * count, width, query)
    fill, splits = _splits(batch * groups * tiles, capacity, longest, query.device)
    out = query.new_empty(batch, count, heads, width)
    several = splits if splits > 1 else 0  # a sequence in one split leaves no partial result
    partial = query.new_empty(batch, heads, count, several, width, dtype=torch.float32)
    masses = query.new_empty(batch, heads, count, splits, dtype=torch.float32)
    tree = _tree_of(rows, scoring)
    bounds = scoring.window, scoring.sink_tokens or None, scoring.chunk
    arguments = rows.slots, *tree, capacity, fill, *bounds, scoring.sinks, out, partial, masses
    sizes = _sizes(query, keys, values) | {"LONGEST": longest}
    scale, cap = scoring.scaling * _LOG2_E, None
    if scoring.softcap is not None:
        scale, cap = scoring.scaling / scoring.softcap, scoring.softcap * _LOG2_E
    _attention_kernel[splits, groups * tiles, batch](
        *arguments,
        query,
        keys,
        values,
        *query.stride()[:3],
        *keys.stride()[:2],
        *values.stride()[:3],
        scale,
        cap,
        **sizes,
        D=query.shape[3],
        BLOCK_M=block_m,
        BLOCK_D=_block(query.shape[3]),
        BIDIRECTIONAL=scoring.bidirectional,
        ANCHORED=scoring.anchored,
        WIDEN=not query.is_cuda,
        num_warps=4 if block_m * max(width, sizes["BLOCK_N"]) <= 8192 else 8,
        num_stages=_device(query.device).stages,
        enable_fp_fusion=True,
    )
    if splits > 1:
        _join_kernel[batch * heads * count,](
            *arguments, splits, **sizes, BLOCK=_JOINED, num_warps=4, enable_fp_fusion=True
        )
    return out.transpose(1, 2)


def _tree_of(rows: SlotRows, scoring: Scoring) -> tuple[Tensor, Tensor | None, Tensor | None, int]:
    """The places of rows; of a tree, where its entries begin, which of them each row sees, and how many there are."""
    branches = rows.branches
    if branches is None:
        return rows.positions, None, None, 0
    seen = rows.seen(*scoring.bounds)
    return branches.of_rows.contiguous(), branches.first.contiguous(), seen, branches.places.shape[1]


def _tiles(rows: int, width: int, query: Tensor) -> tuple[int, int]:
    """How many tiles the query rows of a key/value head make, and the rows of a tile."""
    accumulated = 16384 if query.itemsize == 2 else 4096  # numbers; a product of float32 takes more registers
    held = _device(query.device).shared // 2 // (_block(query.shape[3]) * query.itemsize)  # the rest is for keys
    most = min(accumulated // width, 1 << held.bit_length() - 1)
    tiles = _ceil(rows, min(max(most, 16), 128))
    return tiles, _block(_ceil(rows, tiles))


def _splits(busy: int, capacity: int, longest: int, device: torch.device) -> tuple[int, int]:
    """Splits that a device with `busy` tiles needs in order to be full, and the most that a sequence can have, of up to
    `longest` entries each."""
    programs = _device(device).processors * _PROGRAMS_PER_PROCESSOR
    fill = max(min(programs // busy, _ceil(capacity, _SHORTEST_SPLIT)), 1)
    return fill, max(fill, _ceil(capacity, longest))


def _sizes(query: Tensor, keys: Tensor, values: Tensor) -> dict[str, int]:
    """The sizes that both kernels are compiled for."""
    _, heads, count, width = query.shape
    entry_bytes = max(_block(width), _block(values.shape[3])) * values.itemsize
    return {
        "HEADS": heads,
        "GROUP": heads // keys.shape[1],
        "ROWS": count,
        "E": values.shape[3],
        "BLOCK_N": min(max(_TILE_BYTES // entry_bytes, 16), _SHORTEST_SPLIT),
        "BLOCK_E": _block(values.shape[3]),
        "BLOCK_ROWS": next_power_of_2(count),
        "SHORTEST": _SHORTEST_SPLIT,
    }


def _block(size: int) -> int:
    """The side of a tile that takes part in a product."""
    return max(next_power_of_2(size), 16)


def _ceil(number: int, divisor: int) -> int:
    return (number + divisor - 1) // divisor


class _Device(NamedTuple):
    """`processors` of a device, the bytes that one of them has `shared`, and the `stages` of loading that fit there."""

    processors: int
    shared: int
    stages: int


@lru_cache
def _device(device: torch.device) -> _Device:
    if device.type != "cuda":
        return _Device(processors=16, shared=1 << 20, stages=1)  # the interpreter
    properties = torch.cuda.get_device_properties(device)
    shared = properties.shared_memory_per_multiprocessor
    return _Device(properties.multi_processor_count, shared, 3 if shared >= 160 << 10 else 2)


@jit(varying=("newest", "capacity", "fill"))
def _attention_kernel(
    slots: tl.tensor,
    positions: tl.tensor,
    roots: tl.tensor,
    seen: tl.tensor,
    newest: tl.tensor,
    capacity: tl.tensor,
    fill: tl.tensor,
    window: tl.tensor,
    sink_tokens: tl.tensor,
    chunk: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    masses: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    query_sequence: tl.tensor,
    query_head: tl.tensor,
    query_row: tl.tensor,
    keys_slot: tl.tensor,
    keys_group: tl.tensor,
    values_slot: tl.tensor,
    values_group: tl.tensor,
    values_entry: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SHORTEST: tl.constexpr,
    LONGEST: tl.constexpr,
    BIDIRECTIONAL: tl.constexpr,
    ANCHORED: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """One program per split, tile of query rows, and sequence.

    Of a tree, `positions` are places, whose entries begin at `roots`; an entry lies at its place or beyond, so that a
    window and a chunk, which `seen` respects, leave out too little of it at most. A sequence in one split is finished
    here; otherwise each split leaves its own result and the mass, in powers of 2,
    that it stands for. WIDEN: products in float32, because the interpreter has no bfloat16.
    """
    split = tl.program_id(0)
    tiles = tl.num_programs(1) // (HEADS // GROUP)
    group = tl.program_id(1) // tiles
    sequence = tl.program_id(2).to(tl.int64)
    first, begins, end, size = _span(
        slots,
        positions,
        roots,
        newest,
        capacity,
        fill,
        window,
        sink_tokens,
        chunk,
        sequence,
        ROWS,
        BLOCK_N,
        BLOCK_ROWS,
        SHORTEST,
        LONGEST,
    )
    splits = tl.cdiv(end - begins, size)
    if split >= tl.maximum(splits, 1):
        return
    m = tl.program_id(1) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    head = group * GROUP + m // ROWS
    row = m % ROWS
    inside = m < GROUP * ROWS
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    position = tl.load(positions + sequence * ROWS + row, mask=inside, other=-1).to(tl.int32)
    queries = query + (sequence * query_sequence + head * query_head + row * query_row)[:, None]
    q = tl.load(queries + d, mask=inside[:, None] & (d < D), other=0)
    if WIDEN:
        q = q.to(tl.float32)
    slot = tl.load(slots + sequence)
    keys += slot * keys_slot + group.to(tl.int64) * keys_group
    values += slot * values_slot + group.to(tl.int64) * values_group
    peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    start = begins + split * size
    end = tl.minimum(start + size, end)
    for begin in range(start, end, BLOCK_N):
        n = begin + tl.arange(0, BLOCK_N)
        stored = n < end
        if sink_tokens is not None:
            n = tl.where(n < first, n - begins, n)  # the sequence's first ones come before those of the window
        k = tl.load(keys + n[:, None] * D + d, mask=stored[:, None] & (d < D), other=0)
        v = tl.load(values + n[:, None] * values_entry + e, mask=stored[:, None] & (e < E), other=0)
        if WIDEN:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="tf32x3") * scale
        if cap is not None:
            scores = cap * _tanh(scores)
        there = position >= 0
        if roots is not None:
            root = tl.load(roots + sequence).to(tl.int32)
            own = _branch(seen, sequence * ROWS + row, begin - root, tl.cdiv(newest, 32), there, BLOCK_N)
            visible = stored & own
        else:
            visible = stored & there[:, None]
            if not BIDIRECTIONAL:
                visible &= n <= position[:, None]
        if window is not None:
            near = n
            if sink_tokens is not None:
                always = n < sink_tokens
                if roots is not None:
                    always |= n >= root
                near = tl.where(always, 1 << 30, n)  # beyond every position
            if ANCHORED:
                visible &= near > tl.load(positions + sequence * ROWS).to(tl.int32) - window
            else:
                visible &= near > position[:, None] - window
            if BIDIRECTIONAL and not ANCHORED:
                visible &= n < position[:, None] + window
        if chunk is not None:
            visible &= n >= position[:, None] // chunk * chunk
        scores = tl.where(visible, scores, -float("inf"))
        top = tl.maximum(peak, tl.max(scores, axis=1))
        shift = tl.where(top == -float("inf"), 0.0, top)
        weights = tl.exp2(scores - shift[:, None])
        kept = tl.exp2(peak - shift)
        mass = mass * kept + tl.sum(weights, axis=1)
        total = tl.dot(weights.to(v.dtype), v, total * kept[:, None], input_precision="tf32x3")
        peak = top
    some = tl.where(mass == 0, 1.0, mass)  # a row may see nothing of a split
    result = total / some[:, None]
    mass = tl.where(mass == 0, -float("inf"), peak + tl.log2(some))
    held = inside[:, None] & (e < E)
    if splits <= 1:
        if sinks is not None:
            result *= _share(mass, tl.load(sinks + head, mask=inside, other=0))[:, None]
        at = (sequence * ROWS + row) * HEADS + head
        tl.store(out + at[:, None] * E + e, result, mask=held)
    else:
        at = ((sequence * HEADS + head) * ROWS + row) * tl.num_programs(0) + split
        tl.store(masses + at, mass, mask=inside)
        tl.store(partial + at[:, None] * E + e, result, mask=held)


@jit(varying=("newest", "capacity", "fill", "allocated"))
def _join_kernel(
    slots: tl.tensor,
    positions: tl.tensor,
    roots: tl.tensor,
    seen: tl.tensor,
    newest: tl.tensor,
    capacity: tl.tensor,
    fill: tl.tensor,
    window: tl.tensor,
    sink_tokens: tl.tensor,
    chunk: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    masses: tl.tensor,
    allocated: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SHORTEST: tl.constexpr,
    LONGEST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program per row of a head: the mean of the splits' results, weighted by their masses."""
    index = tl.program_id(0).to(tl.int64)
    row = index % ROWS
    head = index // ROWS % HEADS
    sequence = index // (ROWS * HEADS)
    _, begins, end, size = _span(
        slots,
        positions,
        roots,
        newest,
        capacity,
        fill,
        window,
        sink_tokens,
        chunk,
        sequence,
        ROWS,
        BLOCK_N,
        BLOCK_ROWS,
        SHORTEST,
        LONGEST,
    )
    splits = tl.cdiv(end - begins, size)
    if splits <= 1:
        return
    e = tl.arange(0, BLOCK_E)
    peak = tl.full([], -float("inf"), tl.float32)
    mass = tl.full([], 0.0, tl.float32)
    total = tl.zeros([BLOCK_E], tl.float32)
    for begin in range(0, splits, BLOCK):
        split = begin + tl.arange(0, BLOCK)
        at = index * allocated + split
        log_mass = tl.load(masses + at, mask=split < splits, other=-float("inf"))
        results = tl.load(partial + at[:, None] * E + e, mask=(split < splits)[:, None] & (e < E), other=0)
        top = tl.maximum(peak, tl.max(log_mass, axis=0))
        shift = tl.where(top == -float("inf"), 0.0, top)
        weights = tl.exp2(log_mass - shift)
        kept = tl.exp2(peak - shift)
        mass = mass * kept + tl.sum(weights, axis=0)
        total = total * kept + tl.sum(results * weights[:, None], axis=0)
        peak = top
    some = tl.where(mass == 0, 1.0, mass)
    result = total / some
    if sinks is not None:
        result *= _share(tl.where(mass == 0, -float("inf"), peak + tl.log2(some)), tl.load(sinks + head))
    tl.store(out + ((sequence * ROWS + row) * HEADS + head) * E + e, result, mask=e < E)


@jit
def _span(
    slots: tl.tensor,
    positions: tl.tensor,
    roots: tl.tensor,
    newest: tl.tensor,
    capacity: tl.tensor,
    fill: tl.tensor,
    window: tl.tensor,
    sink_tokens: tl.tensor,
    chunk: tl.tensor,
    sequence: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SHORTEST: tl.constexpr,
    LONGEST: tl.constexpr,
) -> Any:
    """The first entry that a row of the sequence sees in its window; where those that are read begin, if its first ones
    came right before; the end of what the rows see; and how many go into one split."""
    row = tl.arange(0, BLOCK_ROWS)
    position = tl.load(positions + sequence * ROWS + row, mask=row < ROWS, other=-1).to(tl.int32)
    end = tl.max(position, axis=0) + 1
    if roots is not None:
        end = tl.load(roots + sequence).to(tl.int32) + newest
    end = tl.minimum(end, capacity)
    end = tl.where(tl.load(slots + sequence) < 0, 0, end)
    first = end * 0
    lowest = tl.min(tl.where(position < 0, end, position), axis=0)
    if window is not None:
        first = tl.minimum(tl.maximum(lowest - window + 1, 0), end)
    if chunk is not None:
        first = tl.maximum(first, tl.minimum(lowest // chunk * chunk, end))
    begins = first
    if sink_tokens is not None:
        if roots is not None:  # a tree may have some of the first tokens
            first = tl.minimum(first, tl.load(roots + sequence).to(tl.int32))
        begins = first - tl.minimum(first, sink_tokens)
    size = tl.minimum(tl.maximum(tl.cdiv(end - begins, fill), SHORTEST), LONGEST)
    return first, begins, end, tl.cdiv(size, BLOCK_N) * BLOCK_N


@jit
def _branch(
    seen: tl.tensor, row: tl.tensor, at: tl.tensor, words: tl.tensor, there: tl.tensor, BLOCK_N: tl.constexpr
) -> Any:
    """Which entries of a block rows of a tree see, if the block begins `at` entries after the root's.

    One word is read for 32 entries: an address for each of them would take more registers than there are."""
    first = at >> 5
    within = (at & 31).to(tl.uint32)
    n = tl.arange(0, BLOCK_N)
    found = tl.zeros([1, 1], tl.uint32)
    word = _word(seen, row, first, words, there)
    for i in tl.static_range((BLOCK_N + 31) // 32):
        following = _word(seen, row, first + i + 1, words, there)
        aligned = (word >> within) | (following << 1 << (31 - within))
        found = tl.where((n // 32 == i)[None, :], aligned[:, None], found)
        word = following
    return (found >> (n % 32).to(tl.uint32)[None, :] & 1) != 0


@jit
def _word(seen: tl.tensor, row: tl.tensor, index: tl.tensor, words: tl.tensor, there: tl.tensor) -> Any:
    """What rows see of 32 entries, by bits; all where they lie before the root, none where a row is not `there`."""
    index = tl.where(there, index, words)
    word = tl.load(seen + row * words + index, mask=(index >= 0) & (index < words), other=0)
    return tl.where(index < 0, -1, word).to(tl.uint32, bitcast=True)


@jit
def _tanh(x: tl.tensor) -> tl.tensor:
    shrunk = tl.exp2(tl.abs(x) * -2.8853900817779268)
    return tl.where(x < 0, shrunk - 1, 1 - shrunk) / (1 + shrunk)


@jit
def _share(mass: tl.tensor, sink: tl.tensor) -> tl.tensor:
    """What a sink leaves to the entries of that mass, which is in powers of 2."""
    return 1 / (1 + tl.exp2(sink.to(tl.float32) * 1.4426950408889634 - mass))
