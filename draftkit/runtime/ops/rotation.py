"""Rotary positions of queries and keys in one kernel, rounded as transformers' models round them.

B sequences, N query heads, G key/value heads, T rows, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftkit.runtime.ops.backend import jit, next_power_of_2, tl, uses_triton


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`query` [B, N, T, D] and `key` [B, G, T, D] of one dtype, rotated by the angles of `cos` and `sin` [B, T, D].

    The first half of a head turns with the second, as in Llama.
    """
    if uses_triton(query) and query.numel():
        return _rotate(query, key, cos, sin)
    return rotate_reference(query, cos, sin), rotate_reference(key, cos, sin)


def rotate_reference(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def _rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    query, key = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key))
    batch, heads, rows, width = query.shape
    groups = key.shape[1]
    out_query, out_key = query.new_empty(batch, rows, heads, width), key.new_empty(batch, rows, groups, width)
    _rotation_kernel[batch * rows, heads + groups](
        query,
        key,
        cos.contiguous(),
        sin.contiguous(),
        out_query,
        out_key,
        *query.stride()[:3],
        *key.stride()[:3],
        rows,
        HEADS=heads,
        GROUPS=groups,
        D=width,
        BLOCK=next_power_of_2(width),
        num_warps=1,
        enable_fp_fusion=False,
    )
    return out_query.transpose(1, 2), out_key.transpose(1, 2)


@jit(varying=("rows",))
def _rotation_kernel(
    query: tl.tensor,
    key: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out_query: tl.tensor,
    out_key: tl.tensor,
    query_sequence: tl.tensor,
    query_head: tl.tensor,
    query_row: tl.tensor,
    key_sequence: tl.tensor,
    key_head: tl.tensor,
    key_row: tl.tensor,
    rows: tl.tensor,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program per row and head, those of keys after those of queries."""
    index = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    sequence = index // rows
    row = index % rows
    if head < HEADS:
        heads = query + sequence * query_sequence + head * query_head + row * query_row
        out = out_query + (index * HEADS + head) * D
    else:
        heads = key + sequence * key_sequence + (head - HEADS) * key_head + row * key_row
        out = out_key + (index * GROUPS + head - HEADS) * D
    d = tl.arange(0, BLOCK)
    inside = d < D
    own = tl.load(heads + d, mask=inside, other=0).to(tl.float32)
    other = tl.load(heads + (d + D // 2) % D, mask=inside, other=0).to(tl.float32)
    other = tl.where(d < D // 2, -other, other)
    rounded = out_query.dtype.element_ty  # each product is, and their sum
    straight = (own * tl.load(cos + index * D + d, mask=inside, other=0).to(tl.float32)).to(rounded)
    across = (other * tl.load(sin + index * D + d, mask=inside, other=0).to(tl.float32)).to(rounded)
    tl.store(out + d, (straight.to(tl.float32) + across.to(tl.float32)).to(rounded), mask=inside)
