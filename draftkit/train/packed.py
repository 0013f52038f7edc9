"""Causal attention within each of the packed samples of a row, for causal language models in training.

R rows, A attention heads, G key heads, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from draftkit.errors import TargetError
from draftkit.train.attention import Visible, in_one_dtype

NAME = "draftkit_packed"


class Packed:
    """What the rows of `sample_ids` int64 [1, R] see, by sliding window; given to the model call as `packed`."""

    def __init__(self, sample_ids: Tensor):
        self._sample_ids = sample_ids
        self._rows = torch.arange(sample_ids.shape[1], device=sample_ids.device)
        self._biases: dict[tuple[int | None, torch.dtype], Tensor] = {}
        self._blocks: dict[int | None, BlockMask] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor:
        """`query` [1, A, R, D], `key` and `value` [1, G, R, D], in one dtype; [1, A, R, D]."""
        if query.is_cuda:
            if window not in self._blocks:
                self._blocks[window] = Visible(self._sample_ids, window).blocks(self._rows)
            return _compiled_flex(query, key, value, self._blocks[window], scaling)
        if (window, query.dtype) not in self._biases:
            self._biases[window, query.dtype] = Visible(self._sample_ids, window).bias(self._rows, query.dtype)
        repeats = query.shape[1] // key.shape[1]  # flash attention on a CPU has no groups
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        bias = self._biases[window, query.dtype]
        return scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling)


def _flex(query: Tensor, key: Tensor, value: Tensor, blocks: BlockMask, scaling: float) -> Tensor:
    return flex_attention(query, key, value, block_mask=blocks, scale=scaling, enable_gqa=True)


_compiled_flex = torch.compile(_flex)


def attend_packed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    packed: Packed | None = None,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The attention function for transformers' interface.

    Raises `TargetError` for a model that does not hand `packed` down, or whose scores are more than products.
    """
    if packed is None or softcap is not None or s_aux is not None:
        problem = "drops the model call's keyword arguments" if packed is None else "caps its scores or has sinks"
        raise TargetError(
            f"{type(module).__name__} {problem}", expected="attention as in transformers' Llama, to be trained"
        )
    return packed.attend(*in_one_dtype(query, key, value), scaling, sliding_window).transpose(1, 2), None


AttentionInterface.register(NAME, attend_packed)
