"""Attention under a mask that is told of any two rows: of packed samples, and of all chains of parallel drafts at once.

R rows, A attention heads, G of keys and values, D head width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface

from draftkit.errors import TargetError
from draftkit.train.attention import Visible, additive, in_one_dtype, repeated
from draftkit.train.parallel import ParallelRows

NAME = "draftkit_masked"
Sees = Callable[[Tensor, Tensor, int | None], Tensor]


class VisibleRows:
    """Which of `count` rows each row sees; given to the attention function as `visible`.

    `sees(row, other, window)`: bool, of any indices that broadcast. `window`: the positions that a layer looks back,
    itself included; None for all.
    """

    def __init__(self, sees: Sees, count: int, device: torch.device):
        self.sees, self._count, self._device = sees, count, device
        self._biases: dict[tuple[int | None, torch.dtype], Tensor] = {}
        self._blocks: dict[int | None, BlockMask] = {}

    def bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """What is added to scores: [1, 1, R, R]."""
        if (window, dtype) not in self._biases:
            row = torch.arange(self._count, device=self._device)
            self._biases[window, dtype] = additive(self.sees(row[:, None], row, window), dtype)
        return self._biases[window, dtype]

    def blocks(self, window: int | None) -> BlockMask:
        """The same for FlexAttention, on a GPU; compiled, as the mask itself would not fit for long samples."""

        def seen(_batch: Tensor, _head: Tensor, row: Tensor, other: Tensor) -> Tensor:
            return self.sees(row, other, window)

        if window not in self._blocks:
            size = self._count
            self._blocks[window] = _compiled_blocks(seen, None, None, size, size, device=str(self._device))
        return self._blocks[window]


def rows_of_samples(sample_ids: Tensor) -> VisibleRows:
    """A row of packed samples sees those before it in its own: `sample_ids` int64 [1, R]."""

    def sees(row: Tensor, other: Tensor, window: int | None) -> Tensor:
        return Visible(sample_ids, window)(row, other)

    return VisibleRows(sees, sample_ids.shape[1], sample_ids.device)


def rows_of_chains(rows: ParallelRows) -> VisibleRows:
    """What a mask row sees in serving, for every chain of a batch: the true rows up to its anchor, and its own chain up
    to itself."""

    def sees(row: Tensor, other: Tensor, window: int | None) -> Tensor:
        anchor, before = rows.anchors[row], rows.anchors[other]
        depth, its_depth = rows.depths[row], rows.depths[other]
        true = (its_depth == 0) & (before <= anchor) & (rows.sample_ids[row] == rows.sample_ids[other])
        seen = true | ((before == anchor) & (its_depth <= depth))
        return seen if window is None else seen & (before + its_depth > anchor + depth - window)

    return VisibleRows(sees, len(rows.anchors), rows.anchors.device)


def attend_visible(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    visible: VisibleRows | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The attention function for transformers' interface: `query` [1, A, R, D], `key`, `value` [1, G, R, D].

    Raises `TargetError` for a model that does not hand `visible` down, or whose scores are more than products.
    """
    if visible is None or softcap is not None or s_aux is not None:
        problem = "drops the model call's keyword arguments" if visible is None else "caps its scores or has sinks"
        raise TargetError(
            f"{type(module).__name__} {problem}", expected="attention as in transformers' Llama, to be trained"
        )
    attend = _flex if query.is_cuda else _dense
    return attend(*in_one_dtype(query, key, value), visible, scaling, sliding_window).transpose(1, 2), None


def _dense(
    query: Tensor, key: Tensor, value: Tensor, visible: VisibleRows, scaling: float | None, window: int | None
) -> Tensor:
    repeats = query.shape[1] // key.shape[1]  # flash attention on a CPU has no groups
    key, value = repeated(key, repeats), repeated(value, repeats)
    mask = visible.bias(window, query.dtype)
    return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)


def _flex(
    query: Tensor, key: Tensor, value: Tensor, visible: VisibleRows, scaling: float | None, window: int | None
) -> Tensor:
    return _compiled_flex(query, key, value, block_mask=visible.blocks(window), scale=scaling, enable_gqa=True)


_compiled_flex = torch.compile(flex_attention)
_compiled_blocks = torch.compile(create_block_mask)
AttentionInterface.register(NAME, attend_visible)
