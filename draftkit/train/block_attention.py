"""Attention of block drafters in training: blocks at many anchors of the packed samples at once (DFlash, DSpark).

A block at anchor a has seen the target's states up to position a, and its T rows stand at a + 1, a + 2, …: what serving
has at that place. M blocks, N positions, A attention heads, G of keys and values, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from draftkit.train.attention import additive, in_one_dtype, repeated

NAME = "draftkit_blocks"
BLOCKS_AT_ONCE = 8  # on a CPU, where blocks multiply with each other's rows too, in vain

Sight = tuple[int | None, bool, bool]  # window, bidirectional, anchored: what a layer's rows see, as in serving


class Blocks:
    """What the blocks of a pass attend to; given to the attention function as `blocks`.

    `anchors` int64 [M] in the packed row, ascending, `rows` T of each block, `context`: each layer's keys and values
    [1, G, N, D] of the target's states.
    """

    def __init__(
        self, anchors: Tensor, rows: int, sample_ids: Tensor, context: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        self.context = context
        self._anchors = anchors
        self._rows = rows
        self._sample_ids = sample_ids[0]  # of [1, N]
        self._biases: dict[tuple[Sight, int], Tensor] = {}
        self._masks: dict[Sight, BlockMask] = {}

    def sees(self, sight: Sight, row: Tensor, column: Tensor) -> Tensor:
        """bool, of indices that broadcast: of rows of all blocks in turn, and of the N positions, then those rows."""
        window, bidirectional, anchored = sight
        size = len(self._sample_ids)
        anchor, step = self._anchors[row // self._rows], row % self._rows
        other = (column - size).clamp(min=0)
        position = column.clamp(max=size - 1)
        before = (position <= anchor) & (self._sample_ids[position] == self._sample_ids[anchor])
        if window is not None:
            before &= position > anchor + 1 - window + (0 if anchored else step)
        own = other // self._rows == row // self._rows
        later = other % self._rows - step
        if not bidirectional:
            own &= later <= 0
        if window is not None and not anchored:
            own &= later.abs() < window
        return torch.where(column < size, before, own)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, sight: Sight) -> Tensor:
        """`query` [M, A, T, D], `key` and `value` [M, G, T, D] of the rows, in one dtype: [M, A, T, D]."""
        keys, values = (part.to(value.dtype) for part in self.context[layer])
        size = keys.shape[2]
        if query.is_cuda:
            if sight not in self._masks:
                self._masks[sight] = self._blocks(sight, query.shape[0] * self._rows, size)
            parts = (_in_a_row(query), torch.cat((keys, _in_a_row(key)), 2), torch.cat((values, _in_a_row(value)), 2))
            return _apart(_compiled_flex(*parts, self._masks[sight], scaling), self._rows)
        out = []
        for begin in range(0, max(len(query), 1), BLOCKS_AT_ONCE):  # no blocks are one part of none
            some, seen = slice(begin, begin + BLOCKS_AT_ONCE), self._context_of(begin)
            bias = self._bias(sight, begin, query.dtype)
            k = torch.cat((keys[:, :, seen], _in_a_row(key[some])), dim=2)
            v = torch.cat((values[:, :, seen], _in_a_row(value[some])), dim=2)
            repeats = query.shape[1] // k.shape[1]  # flash attention on a CPU has no groups
            k, v = repeated(k, repeats), repeated(v, repeats)
            attended = scaled_dot_product_attention(_in_a_row(query[some]), k, v, attn_mask=bias, scale=scaling)
            out.append(_apart(attended, self._rows))
        return torch.cat(out)

    def _context_of(self, begin: int) -> slice:
        """The n positions that the blocks from `begin` on may see: from the first one's sample to the last anchor."""
        anchors = self._anchors[begin : begin + BLOCKS_AT_ONCE].tolist() or [0]
        first = int((self._sample_ids == self._sample_ids[anchors[0]]).int().argmax())
        return slice(first, anchors[-1] + 1)

    def _bias(self, sight: Sight, begin: int, dtype: torch.dtype) -> Tensor:
        """What is added to the scores of the blocks from `begin` on, over those positions and their own rows:
        [1, 1, m·T, n + m·T]."""
        key = sight, begin
        if key not in self._biases:
            device = self._anchors.device
            size, end = len(self._sample_ids), min(begin + BLOCKS_AT_ONCE, len(self._anchors))
            row = torch.arange(begin * self._rows, end * self._rows, device=device)
            seen = torch.arange(size, device=device)[self._context_of(begin)]
            column = torch.cat((seen, size + row))
            self._biases[key] = additive(self.sees(sight, row[:, None], column), dtype)
        return self._biases[key]

    def _blocks(self, sight: Sight, rows: int, size: int) -> BlockMask:
        def seen(_batch: Tensor, _head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return self.sees(sight, row, column)

        return _compiled_mask(seen, None, None, rows, size + rows, device=str(self._anchors.device))


def _in_a_row(heads: Tensor) -> Tensor:
    """[M, A, T, D] → [1, A, M·T, D]."""
    return heads.transpose(0, 1).flatten(1, 2)[None]


def _apart(heads: Tensor, rows: int) -> Tensor:
    """[1, A, M·T, D] → [M, A, T, D]."""
    return heads[0].unflatten(1, (-1, rows)).transpose(0, 1)


def _flex(query: Tensor, key: Tensor, value: Tensor, blocks: BlockMask, scaling: float) -> Tensor:
    return flex_attention(query, key, value, block_mask=blocks, scale=scaling, enable_gqa=True)


_compiled_flex = torch.compile(_flex)
_compiled_mask = torch.compile(create_block_mask)


def attend_blocks(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    blocks: Blocks,
    scaling: float,
    sliding_window: int | None = None,
    bidirectional: bool = False,
    anchored: bool = False,
    **_: object,
) -> tuple[Tensor, None]:
    """The attention function for transformers' interface."""
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    sight = sliding_window, bidirectional, anchored
    return blocks.attend(layer, *in_one_dtype(query, key, value), scaling, sight).transpose(1, 2), None


AttentionInterface.register(NAME, attend_blocks)
