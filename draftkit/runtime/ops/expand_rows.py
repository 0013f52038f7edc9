"""The input rows of a drafter's pass, from the tokens that the target has committed.

B sequences of up to J committed tokens and M mask slots, R = J + M rows, F feature width. Each sequence has first its
committed rows, then its mask slots, then padding for the slots that its rejected tokens leave.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draftkit.runtime.ops.backend import jit, next_power_of_2, tl, uses_triton

_MAX_BLOCK = 1024


class ExpandedRows(NamedTuple):
    """`tokens` int64 [B, R], `positions` int64 [B, R], `hidden` [B, R, F] or None.

    `sampled` int64 [B, M+1]: the rows that draft, namely the last committed one and the mask slots.
    """

    tokens: Tensor
    positions: Tensor
    hidden: Tensor | None
    sampled: Tensor

    def drafting(self, output: Tensor) -> Tensor:
        """What a model made of the rows that draft: [B, R, …] → [B, M+1, …]."""
        return output.take_along_dim(self.sampled[:, :, None], 1)


def expand_rows(
    tokens: Tensor,
    counts: Tensor,
    first: Tensor,
    limit: int,
    *,
    masks: int = 0,
    mask_token: int = 0,
    hidden: Tensor | None = None,
    mask_hidden: Tensor | None = None,
) -> ExpandedRows:
    """Lay out committed tokens int64 [B, J], of which the first `counts` int64 [B] are real, and `masks` mask slots.

    - `first` int64 [B]: the position of the first row. A drafter whose rows pair a token with the feature before it
      (EAGLE) counts by the feature: one less than the token's own position.
    - `limit`: rows reach positions below limit − 1. That one is spare: what would lie beyond it lies there, so that it
      overwrites no cache entry that is read.
    - `hidden` [B, J, F]: the target's features of the committed rows. Mask slots get `mask_hidden` [F], or without it
      the sequence's last feature. Padding gets zeros, whatever the rejected slots hold.

    All padding lies at the position after the last row, which no row sees and the sequence's next one overwrites. A
    sequence with count 0 has padding only, at the spare position.
    """
    inputs = tokens, counts, first, hidden, mask_hidden
    expand = _expand_rows if uses_triton(tokens) and tokens.numel() else expand_rows_reference
    return expand(*inputs, limit, masks, mask_token)


def expand_rows_reference(
    tokens: Tensor,
    counts: Tensor,
    first: Tensor,
    hidden: Tensor | None,
    mask_hidden: Tensor | None,
    limit: int,
    masks: int,
    mask_token: int,
) -> ExpandedRows:
    columns, device = tokens.shape[1], tokens.device
    row = torch.arange(columns + masks, device=device)
    count = counts[:, None]
    last = (count - 1).clamp(min=0)
    used = torch.where(count > 0, count + masks, 0)
    is_used = row < used
    is_mask = is_used & (row >= count)
    source = torch.minimum(row, last)
    token = torch.where(is_mask, mask_token, tokens.gather(1, source))
    position = torch.where(count > 0, first[:, None] + torch.minimum(row, used), limit)
    features = None
    if hidden is not None:
        features = hidden.take_along_dim(source[:, :, None], 1)
        if mask_hidden is not None:
            features = torch.where(is_mask[:, :, None], mask_hidden, features)
        features = torch.where(is_used[:, :, None], features, 0)
    return ExpandedRows(
        tokens=torch.where(is_used, token, 0),
        positions=position.clamp(max=limit - 1),
        hidden=features,
        sampled=last + torch.arange(masks + 1, device=device),
    )


def _expand_rows(
    tokens: Tensor,
    counts: Tensor,
    first: Tensor,
    hidden: Tensor | None,
    mask_hidden: Tensor | None,
    limit: int,
    masks: int,
    mask_token: int,
) -> ExpandedRows:
    sequences, columns = tokens.shape
    size = (sequences, columns + masks)
    width = 0 if hidden is None else hidden.shape[2]
    block = min(next_power_of_2(width), _MAX_BLOCK)
    rows = ExpandedRows(
        tokens=tokens.new_empty(size),
        positions=tokens.new_empty(size),
        hidden=None if hidden is None else hidden.new_empty(*size, width),
        sampled=tokens.new_empty(sequences, masks + 1),
    )
    _expand_kernel[(*size, max((width + block - 1) // block, 1))](
        tokens.contiguous(),
        counts.contiguous(),
        first.contiguous(),
        None if hidden is None else hidden.contiguous(),
        None if mask_hidden is None else mask_hidden.contiguous(),
        *rows,
        limit,
        masks,
        mask_token,
        columns,
        width,
        BLOCK=block,
        enable_fp_fusion=False,
    )
    return rows


@jit(varying=("limit", "masks", "columns"))
def _expand_kernel(
    tokens: tl.tensor,
    counts: tl.tensor,
    first: tl.tensor,
    hidden: tl.tensor,
    mask_hidden: tl.tensor,
    out_tokens: tl.tensor,
    out_positions: tl.tensor,
    out_hidden: tl.tensor,
    sampled: tl.tensor,
    limit: tl.tensor,
    masks: tl.tensor,
    mask_token: tl.tensor,
    columns: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program per sequence, row and block of features."""
    sequence = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1)
    at = sequence * tl.num_programs(1) + row
    count = tl.load(counts + sequence)
    last = tl.maximum(count - 1, 0)
    used = tl.where(count > 0, count + masks, 0)
    if tl.program_id(2) == 0:
        token = tl.load(tokens + sequence * columns + row, mask=row < count, other=0)
        tl.store(out_tokens + at, tl.where((row >= count) & (row < used), mask_token, token))
        position = tl.where(count > 0, tl.load(first + sequence) + tl.minimum(row, used), limit)
        tl.store(out_positions + at, tl.minimum(position, limit - 1))
        if row <= masks:
            tl.store(sampled + sequence * (masks + 1) + row, last + row)
    if hidden is not None:
        feature = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        source = (sequence * columns + tl.minimum(row, last)) * width + feature
        value = tl.load(hidden + source, mask=feature < tl.where(row < used, width, 0), other=0.0)
        if mask_hidden is not None:
            learned = tl.load(mask_hidden + feature, mask=feature < width, other=0.0)
            value = tl.where((row >= count) & (row < used), learned, value)
        tl.store(out_hidden + at * width + feature, value, mask=feature < width)
