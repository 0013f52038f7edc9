"""Attention of a training-time test: chains of drafts from every position at once (EAGLE-3, arXiv 2503.01840).

At step t a row sees what its position saw at step 0, and of the later steps only its own rows. Step 0 is an ordinary
causal attention; the further steps add t columns to it, which are joined by their log-sums.
R rows, N positions, A attention heads, D head width, T steps after the first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface

NAME = "draftkit_chain"


class Visible:
    """Which positions each position sees: those before it in its sample, within the window.

    `step`: rows stand so many positions after their own, where a window moves on with them.
    """

    def __init__(self, sample_ids: Tensor, window: int | None = None, step: int = 0):
        self._sample_ids = sample_ids[0]  # of [1, N]
        self._window = window
        self._step = step

    def __call__(self, row: Tensor, position: Tensor) -> Tensor:
        """bool, of any indices that broadcast."""
        seen = (position <= row) & (self._sample_ids[row] == self._sample_ids[position])
        return seen if self._window is None else seen & (position > row + self._step - self._window)

    def bias(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """What is added to the scores of `rows` int64 [R]: [1, 1, R, N]."""
        seen = self(rows[:, None], torch.arange(len(self._sample_ids), device=rows.device))
        return additive(seen, dtype)

    def blocks(self, rows: Tensor) -> BlockMask:
        """The same for FlexAttention."""

        def seen(_batch: Tensor, _head: Tensor, row: Tensor, position: Tensor) -> Tensor:
            return self(rows[row], position)

        return create_block_mask(seen, None, None, len(rows), len(self._sample_ids), device=str(rows.device))


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """What hides from scores what is not `seen` bool [R, N]: [1, 1, R, N], to be added."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)[None, None]


class ChainSteps:
    """Keys and values of the steps so far, layer by layer; given to the attention function as `chain`.

    `rows` int64 [R] are the positions that the current step runs; `go_on` chooses fewer and starts the next step.
    Windows are wider than the steps are many.
    """

    def __init__(self, sample_ids: Tensor):
        self.rows = torch.arange(sample_ids.shape[1], device=sample_ids.device)
        self._sample_ids = sample_ids
        self._step = 0
        self._masks: dict[int | None, Tensor | BlockMask] = {}  # by window
        self._first: dict[int, tuple[Tensor, Tensor]] = {}
        self._later: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def go_on(self, kept: Tensor | None = None) -> None:
        """Start the next step, with the rows `kept` int64 of the current ones; all where None. Only once narrower."""
        self._step += 1
        if kept is not None:
            self.rows = self.rows[kept]
        self._masks = {w: mask for w, mask in self._masks.items() if kept is None and w is None}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None = None
    ) -> Tensor:
        """Attention of a step: `query` [1, A, R, D], `key` [1, G, R, D] and `value` [1, G, R, E] of its rows, in one
        dtype, E ≤ D; [1, A, R, E]. `window`: the layer's."""
        width = value.shape[-1]
        value = nn.functional.pad(value, (0, key.shape[-1] - width))  # flash attention wants them as wide as keys
        if layer not in self._first:
            self._first[layer], self._later[layer] = (key, value), []
        else:
            self._later[layer].append((key, value))
        keys, values = self._first[layer]
        repeats = query.shape[1] // keys.shape[1]
        later = [(repeated(k, repeats), repeated(v, repeats)) for k, v in self._later[layer]]
        own = None if not later else (torch.stack([k for k, _ in later]), torch.stack([v for _, v in later]))
        if query.is_cuda:
            return _flex(query, keys, values, own, self._blocks(window), scaling)[..., :width]
        mask = self._bias(query.dtype, window)
        return _joined(query, repeated(keys, repeats), repeated(values, repeats), own, mask, scaling)[..., :width]

    def _visible(self, window: int | None) -> Visible:
        return Visible(self._sample_ids, window, self._step)

    def _bias(self, dtype: torch.dtype, window: int | None) -> Tensor:
        if window not in self._masks:
            self._masks[window] = self._visible(window).bias(self.rows, dtype)
        mask = self._masks[window]
        assert isinstance(mask, Tensor)
        return mask

    def _blocks(self, window: int | None) -> BlockMask:
        if window not in self._masks:
            self._masks[window] = self._visible(window).blocks(self.rows)
        mask = self._masks[window]
        assert isinstance(mask, BlockMask)
        return mask


def in_one_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All in the dtype of `value`: autocast leaves in float32 what float32 norms or rotations have multiplied."""
    return query.to(value.dtype), key.to(value.dtype), value


def repeated(heads: Tensor, repeats: int) -> Tensor:
    """Keys or values [1, G, R, D] for each of the heads that share them: [1, G · repeats, R, D]."""
    return heads if repeats == 1 else heads.repeat_interleave(repeats, dim=1)


def chain_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, own: tuple[Tensor, Tensor] | None, bias: Tensor, scaling: float
) -> Tensor:
    """Every score written out. `query` [1, A, R, D], `key`, `value` [1, A, N, D], `own` two [T, 1, A, R, D]."""
    scores = query @ key.transpose(2, 3) * scaling + bias
    if own is None:
        return scores.softmax(-1) @ value
    columns = torch.stack([(query * k).sum(-1) * scaling for k in own[0]], dim=-1)
    weights = torch.cat((scores, columns), dim=-1).softmax(-1)
    size = key.shape[2]
    seen = weights[..., :size] @ value
    return seen + sum(weights[..., size + t, None] * v for t, v in enumerate(own[1]))


def _joined(
    query: Tensor, key: Tensor, value: Tensor, own: tuple[Tensor, Tensor] | None, bias: Tensor, scaling: float
) -> Tensor:
    """`chain_attention_reference` without the scores, on a CPU."""
    if own is None:
        return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling)
    return _Joined.apply(query, key, value, *own, bias, scaling)


class _Joined(torch.autograd.Function):
    """Flash attention over the first step's keys, joined with the row's own columns.

    The backward pass of flash attention needs of the rest of the softmax only the total log-sum and the total output;
    given those of the joined attention it finds the first step's part of the gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scaling: float
    ) -> Tensor:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        first, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, False, attn_mask=bias, scale=scaling
        )
        scores = (query * keys).sum(-1).float() * scaling  # [T, 1, A, R]
        total = torch.logaddexp(log_sum.float(), scores.logsumexp(0))
        weights = (scores - total).exp().to(value.dtype)[..., None]
        out = first * (log_sum - total).exp().to(value.dtype)[..., None] + (weights * values).sum(0)
        ctx.save_for_backward(query, key, value, keys, values, bias, out, total, weights)
        ctx.scaling = scaling
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, keys, values, bias, out, total, weights = ctx.saved_tensors
        gradient = gradient.contiguous()
        by_query, by_key, by_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, out, total, 0.0, False, attn_mask=bias, scale=ctx.scaling
        )
        mean = (gradient * out).sum(-1, keepdim=True)
        by_scores = weights * ((gradient * values).sum(-1, keepdim=True) - mean) * ctx.scaling
        return (
            by_query + (by_scores * keys).sum(0), by_key, by_value, by_scores * query, weights * gradient, None, None,
        )  # fmt: skip


def _flex(
    query: Tensor, key: Tensor, value: Tensor, own: tuple[Tensor, Tensor] | None, blocks: BlockMask, scaling: float
) -> Tensor:
    """The same on a GPU, where FlexAttention skips what no row sees; its log-sum can be differentiated."""
    first, log_sum = _compiled_flex(query, key, value, blocks, scaling)
    if own is None:
        return first
    scores = (query * own[0]).sum(-1).float() * scaling
    total = torch.logaddexp(log_sum.float(), scores.logsumexp(0))
    weights = (scores - total).exp().to(value.dtype)[..., None]
    return first * (log_sum - total).exp().to(value.dtype)[..., None] + (weights * own[1]).sum(0)


def _flex_attention(
    query: Tensor, key: Tensor, value: Tensor, blocks: BlockMask, scaling: float
) -> tuple[Tensor, Tensor]:
    return flex_attention(query, key, value, block_mask=blocks, scale=scaling, enable_gqa=True, return_lse=True)


_compiled_flex = torch.compile(_flex_attention)


def attend_chain(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    chain: ChainSteps,
    scaling: float,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The attention function for transformers' interface; the layers keep their step's keys and values in `chain`."""
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    out = chain.attend(layer, *in_one_dtype(query, key, value), scaling, sliding_window)
    return out.transpose(1, 2), None


AttentionInterface.register(NAME, attend_chain)
