"""Attention of parallel drafts: each row sees the true rows up to its anchor, and its own chain up to itself.

What a mask row sees in serving, for every chain of a batch at once. R rows, A attention heads, G of keys and values, D
head width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface
from transformers.models.llama.modeling_llama import repeat_kv

from draftkit.errors import TargetError
from draftkit.train.attention import in_one_dtype
from draftkit.train.parallel import ParallelRows

NAME = "draftkit_parallel"


class VisibleRows:
    """Which rows each row sees; given to the attention function as `visible`."""

    def __init__(self, rows: ParallelRows):
        self._anchors, self._depths, self._sample_ids = rows.anchors, rows.depths, rows.sample_ids
        self._biases: dict[int | None, Tensor] = {}
        self._blocks: dict[int | None, BlockMask] = {}

    def sees(self, row: Tensor, other: Tensor, window: int | None = None) -> Tensor:
        """bool, of any indices that broadcast. `window`: the positions that a layer looks back, itself included."""
        anchor, before = self._anchors[row], self._anchors[other]
        depth, its_depth = self._depths[row], self._depths[other]
        true = (its_depth == 0) & (before <= anchor) & (self._sample_ids[row] == self._sample_ids[other])
        seen = true | ((before == anchor) & (its_depth <= depth))
        return seen if window is None else seen & (before + its_depth > anchor + depth - window)

    def bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """What is added to scores: [1, 1, R, R]."""
        if window not in self._biases:
            row = torch.arange(len(self._anchors), device=self._anchors.device)
            seen = self.sees(row[:, None], row, window)
            self._biases[window] = torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)[None, None]
        return self._biases[window]

    def blocks(self, window: int | None) -> BlockMask:
        """The same for FlexAttention, on a GPU; compiled, as the mask itself would not fit for long samples."""

        def seen(_batch: Tensor, _head: Tensor, row: Tensor, other: Tensor) -> Tensor:
            return self.sees(row, other, window)

        if window not in self._blocks:
            size = len(self._anchors)
            self._blocks[window] = _compiled_blocks(seen, None, None, size, size, device=str(self._anchors.device))
        return self._blocks[window]


def attend_rows(
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
        problem = "does not hand the model call's arguments down" if visible is None else "caps its scores or has sinks"
        raise TargetError(f"{type(module).__name__} {problem}", expected="attention as in transformers' Llama")
    query, key, value = in_one_dtype(query, key, value)
    if query.is_cuda:
        blocks = visible.blocks(sliding_window)
        out = _compiled_flex(query, key, value, block_mask=blocks, scale=scaling, enable_gqa=True)
    else:
        repeats = query.shape[1] // key.shape[1]
        key, value = repeat_kv(key, repeats), repeat_kv(value, repeats)
        mask = visible.bias(sliding_window, query.dtype)
        out = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return out.transpose(1, 2), None


_compiled_flex = torch.compile(flex_attention)
_compiled_blocks = torch.compile(create_block_mask)
AttentionInterface.register(NAME, attend_rows)
