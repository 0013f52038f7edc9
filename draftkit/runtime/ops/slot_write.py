"""Store the keys and values of a forward's rows in the pools of a slot cache.

S slots, G key/value heads, C capacity, D and E widths of keys and values; B sequences, T rows of each.
"""

from __future__ import annotations

from torch import Tensor

from draftkit.runtime.ops.backend import jit, next_power_of_2, tl, uses_triton
from draftkit.runtime.slot_rows import SlotRows


def write(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, rows: SlotRows) -> None:
    """Store `key` [B, G, T, D] and `value` [B, G, T, E] of `rows` in the pools [S, G, C, D] and [S, G, C, E].

    Rows that are not there store nothing. The pools are contiguous.
    """
    if uses_triton(key):
        _write(keys, values, key, value, rows)
    else:
        write_reference(keys, values, key, value, rows)


def write_reference(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, rows: SlotRows) -> None:
    slots, positions = rows.entries
    keys[slots, :, positions] = rows.kept(key.transpose(1, 2))
    values[slots, :, positions] = rows.kept(value.transpose(1, 2))


def _write(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, rows: SlotRows) -> None:
    key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (key, value))
    _, groups, capacity, width = keys.shape
    _write_kernel[rows.positions.numel(), groups](
        keys,
        values,
        key,
        value,
        rows.slots,
        rows.positions,
        *key.stride()[:3],
        *value.stride()[:3],
        capacity,
        rows.positions.shape[1],
        D=width,
        E=values.shape[3],
        BLOCK=next_power_of_2(max(width, values.shape[3])),
        num_warps=1,
        enable_fp_fusion=False,
    )


@jit(varying=("rows",))
def _write_kernel(
    keys: tl.tensor,
    values: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    key_sequence: tl.tensor,
    key_group: tl.tensor,
    key_row: tl.tensor,
    value_sequence: tl.tensor,
    value_group: tl.tensor,
    value_row: tl.tensor,
    capacity: tl.tensor,
    rows: tl.tensor,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program per row and key/value head."""
    index = tl.program_id(0)
    group = tl.program_id(1)
    sequence = (index // rows).to(tl.int64)
    row = index % rows
    slot = tl.load(slots + sequence)
    position = tl.load(positions + index)
    if (slot < 0) | (position < 0) | (position >= capacity):
        return
    entry = (slot * tl.num_programs(1) + group) * capacity + position
    d = tl.arange(0, BLOCK)
    new_key = tl.load(key + sequence * key_sequence + group * key_group + row * key_row + d, mask=d < D)
    tl.store(keys + entry * D + d, new_key, mask=d < D)
    new_value = tl.load(value + sequence * value_sequence + group * value_group + row * value_row + d, mask=d < E)
    tl.store(values + entry * E + d, new_value, mask=d < E)
