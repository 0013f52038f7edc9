"""Rotary positions of queries and keys in one kernel, after their norms, rounded as transformers' models round them.

B sequences, N query heads, G key/value heads, T rows, D head width.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftkit.runtime.fusion.norms import rms_norm_reference
from draftkit.runtime.ops.backend import jit, next_power_of_2, tl, uses_triton


class HeadNorms(NamedTuple):
    """Norms of each head, as in Qwen3: their weights [D] for queries and keys; the rest is that of `rms_norm`."""

    query: Tensor
    key: Tensor
    eps: float
    one_plus: bool


def rotate(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None = None
) -> tuple[Tensor, Tensor]:
    """`query` [B, N, T, D] and `key` [B, G, T, D] of one dtype, rotated by the angles of `cos` and `sin` [B, T, D].

    The first half of a head turns with the second, as in Llama. With `norms` heads are normalized before.
    """
    if uses_triton(query) and query.numel():
        return _rotate(query, key, cos, sin, norms)
    if norms is not None:
        query, key = normed_heads(query, key, norms)
    return rotate_reference(query, cos, sin), rotate_reference(key, cos, sin)


def rotate_joint(
    joint: Tensor, heads: int, cos: Tensor, sin: Tensor, norms: HeadNorms | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`rotate` of the queries and keys in `joint` [B, T, (N + 2G) · D], N `heads` and G of keys and of values in it:
    queries [B, N, T, D], keys and values [B, G, T, D]."""
    each = joint.unflatten(-1, (-1, cos.shape[-1]))
    groups = (each.shape[2] - heads) // 2
    if uses_triton(joint) or norms is not None:
        query, key, value = (part.transpose(1, 2) for part in each.split((heads, groups, groups), dim=2))
        return *rotate(query, key, cos, sin, norms), value
    cos, signed = _turns(cos, sin)
    turning = each[:, :, : heads + groups]
    turned = turning * cos + turning.roll(cos.shape[-1] // 2, -1) * signed
    return (
        turned[:, :, :heads].transpose(1, 2),
        turned[:, :, heads:].transpose(1, 2),
        each[:, :, heads + groups :].transpose(1, 2),
    )


@lru_cache(maxsize=1)  # which knows tensors by their identity: all layers of a forward are given the same
def _turns(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines, and sines with the signs of a rotation, of all heads: [B, T, 1, D]."""
    first, second = sin.chunk(2, dim=-1)
    return cos[:, :, None], torch.cat((-first, second), dim=-1)[:, :, None]


def normed_heads(query: Tensor, key: Tensor, norms: HeadNorms) -> tuple[Tensor, Tensor]:
    return (
        rms_norm_reference(query, norms.query, norms.eps, norms.one_plus),
        rms_norm_reference(key, norms.key, norms.eps, norms.one_plus),
    )


def rotate_reference(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def _rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None) -> tuple[Tensor, Tensor]:
    query, key = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key))
    batch, heads, rows, width = query.shape
    groups = key.shape[1]
    out_query, out_key = query.new_empty(batch, rows, heads, width), key.new_empty(batch, rows, groups, width)
    _rotation_kernel[batch * rows, heads + groups](
        query,
        key,
        cos.contiguous(),
        sin.contiguous(),
        None if norms is None else norms.query,
        None if norms is None else norms.key,
        out_query,
        out_key,
        *query.stride()[:3],
        *key.stride()[:3],
        rows,
        0.0 if norms is None else norms.eps,
        ONE_PLUS=norms is not None and norms.one_plus,
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
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    out_query: tl.tensor,
    out_key: tl.tensor,
    query_sequence: tl.tensor,
    query_head: tl.tensor,
    query_row: tl.tensor,
    key_sequence: tl.tensor,
    key_head: tl.tensor,
    key_row: tl.tensor,
    rows: tl.tensor,
    eps: tl.tensor,
    ONE_PLUS: tl.constexpr,
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
    across = (d + D // 2) % D
    own = tl.load(heads + d, mask=inside, other=0).to(tl.float32)
    other = tl.load(heads + across, mask=inside, other=0).to(tl.float32)
    rounded = out_query.dtype.element_ty
    if query_norm is not None:
        norm = query_norm if head < HEADS else key_norm
        shrink = tl.rsqrt(tl.sum(own * own, axis=0) / D + eps)
        own = _weighted(own * shrink, norm, d, inside, rounded, ONE_PLUS)
        other = _weighted(other * shrink, norm, across, inside, rounded, ONE_PLUS)
    other = tl.where(d < D // 2, -other, other)
    # Each product is rounded, and their sum.
    straight = (own * tl.load(cos + index * D + d, mask=inside, other=0).to(tl.float32)).to(rounded)
    crossed = (other * tl.load(sin + index * D + d, mask=inside, other=0).to(tl.float32)).to(rounded)
    tl.store(out + d, (straight.to(tl.float32) + crossed.to(tl.float32)).to(rounded), mask=inside)


@jit
def _weighted(
    normed: tl.tensor,
    weight: tl.tensor,
    d: tl.tensor,
    inside: tl.tensor,
    rounded: tl.constexpr,
    ONE_PLUS: tl.constexpr,
) -> Any:
    """As `rms_norm` ends."""
    factor = tl.load(weight + d, mask=inside, other=0).to(tl.float32)
    if not ONE_PLUS:
        normed = normed.to(rounded).to(tl.float32)
    return (normed * (factor + ONE_PLUS)).to(rounded).to(tl.float32)


def angles(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of `positions` int64 [B, T] times `frequencies` float32 [D / 2], twice side by side, times
    `scale`: [B, T, D] of `dtype`."""
    if uses_triton(positions) and positions.numel():
        return _angles(positions.contiguous(), frequencies, scale, dtype)
    return angles_reference(positions, frequencies, scale, dtype)


def angles_reference(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    turned = positions[..., None].float() * frequencies.float()
    turned = torch.cat((turned, turned), dim=-1)
    return (turned.cos() * scale).to(dtype), (turned.sin() * scale).to(dtype)


def _angles(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    half = len(frequencies)
    cos, sin = (positions.new_empty(*positions.shape, 2 * half, dtype=dtype) for _ in range(2))
    _angles_kernel[(positions.numel(),)](
        positions, frequencies, cos, sin, scale, HALF=half, BLOCK=next_power_of_2(half), num_warps=1,
        enable_fp_fusion=False,
    )  # fmt: skip
    return cos, sin


@jit
def _angles_kernel(
    positions: tl.tensor,
    frequencies: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    scale: tl.tensor,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < HALF
    turned = tl.load(positions + row).to(tl.float32) * tl.load(frequencies + d, mask=inside, other=0.0).to(tl.float32)
    cosine = (tl.cos(turned) * scale).to(cos.dtype.element_ty)
    sine = (tl.sin(turned) * scale).to(sin.dtype.element_ty)
    at = row * 2 * HALF + d
    tl.store(cos + at, cosine, mask=inside)
    tl.store(cos + at + HALF, cosine, mask=inside)
    tl.store(sin + at, sine, mask=inside)
    tl.store(sin + at + HALF, sine, mask=inside)
