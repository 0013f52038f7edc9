"""Attention in training: of packed samples, of chains from every position at once, and of blocks at many anchors.

What each row sees is said once, by a function of two indices; `Masks` makes of it what the CPU's flash attention and,
on a GPU, FlexAttention want. A attention heads, G heads of keys and values, D head width.

- Packed samples and parallel drafts: R rows attend to each other (`attend_masked`).
- A training-time test (EAGLE-3, arXiv 2503.01840): at step t a row sees what its position saw at step 0, and of the
  later steps only its own rows. Step 0 is an ordinary causal attention over N positions; the further steps add t
  columns to it, which are joined by their log-sums (`attend_chain`). R rows, T steps after the first.
- Blocks (DFlash, DSpark): a block at anchor a has seen the target's states up to position a, and its T rows stand at
  a + 1, a + 2, …: what serving has at that place (`attend_blocks`). M blocks, N positions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from draftkit.errors import TargetError
from draftkit.targets.attention import Sight, sight_of
from draftkit.train.parallel import ParallelRows

MASKED_ATTENTION, CHAIN_ATTENTION, BLOCK_ATTENTION = "draftkit_masked", "draftkit_chain", "draftkit_blocks"
SCORES_AT_ONCE = 1 << 22  # of rows and columns, whose bias a CPU holds: 16 MiB in float32
NARROWEST = 16  # head that FlexAttention takes
BLOCKS_AT_ONCE = 8  # how many a CPU computes together, as each also multiplies with the rows of the others, in vain

_compiled_flex: Callable[..., Any] = torch.compile(flex_attention)
_compiled_mask = torch.compile(create_block_mask)  # the mask itself would not fit for long samples


class Masks:
    """The masks of an attention: which of C columns each of R rows sees, in the form that attention takes.

    A mask is made when it is first asked for, and kept.

    `sees(row, column, layer)`: bool, of any indices that broadcast. `layer`: what the masks of a model's layers differ
    in, as their `Sight`.
    """

    def __init__(self, sees: Callable[[Tensor, Tensor, Any], Tensor], rows: int, columns: int, device: torch.device):
        self.sees, self._rows, self._columns, self._device = sees, rows, columns, device
        self._biases: dict[Hashable, Tensor] = {}
        self._blocks: dict[Hashable, BlockMask] = {}

    def bias(
        self, layer: Hashable, dtype: torch.dtype, rows: range | None = None, columns: tuple[range, ...] | None = None
    ) -> Tensor:
        """The bias that is added to scores, 0 or −∞: [1, 1, R, C], of all rows and columns or of some."""
        rows = range(self._rows) if rows is None else rows
        columns = (range(self._columns),) if columns is None else columns
        key = layer, dtype, rows, columns
        if key not in self._biases:
            self._biases[key] = self._bias(layer, dtype, rows, columns)
        return self._biases[key]

    def _bias(self, layer: Hashable, dtype: torch.dtype, rows: range, columns: tuple[range, ...]) -> Tensor:
        row, *column = (torch.arange(part.start, part.stop, device=self._device) for part in (rows, *columns))
        seen = self.sees(row[:, None], torch.cat(column), layer)
        return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)[None, None]

    def attend(self, layer: Hashable, dtype: torch.dtype, attended: Callable[[slice, Tensor], Tensor]) -> Tensor:
        """What is `attended` [1, A, R, D] by all rows with their bias. Where that is larger than `SCORES_AT_ONCE`, by
        some rows at a time, whose bias is not kept but made again in the backward pass: memory grows with the rows."""
        if self._rows * self._columns <= SCORES_AT_ONCE:
            return attended(slice(None), self.bias(layer, dtype))
        size = max(SCORES_AT_ONCE // self._columns, 1)

        def some(begin: int, end: int) -> Tensor:
            return attended(slice(begin, end), self._bias(layer, dtype, range(begin, end), (range(self._columns),)))

        ends = [min(begin + size, self._rows) for begin in range(0, self._rows, size)]
        parts = [checkpoint(some, begin, end, use_reentrant=False) for begin, end in pairwise([0, *ends])]
        return torch.cat(parts, dim=2)

    def blocks(self, layer: Hashable) -> BlockMask:
        """The mask of all rows and columns for FlexAttention."""

        def seen(_batch: Tensor, _head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return self.sees(row, column, layer)

        if layer not in self._blocks:
            device = str(self._device)
            self._blocks[layer] = _compiled_mask(seen, None, None, self._rows, self._columns, device=device)
        return self._blocks[layer]


def in_one_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All in the dtype of `value`: autocast leaves in float32 what float32 norms or rotations have multiplied."""
    return query.to(value.dtype), key.to(value.dtype), value


def repeated(heads: Tensor, repeats: int) -> Tensor:
    """Keys or values [1, G, R, D] for each of the heads that share them: [1, G · repeats, R, D]."""
    return heads if repeats == 1 else heads.repeat_interleave(repeats, dim=1)


def _dense(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scaling: float | None) -> Tensor:
    """Attention on a CPU, whose flash attention has no groups of heads."""
    repeats = query.shape[1] // key.shape[1]
    key, value = repeated(key, repeats), repeated(value, repeats)
    return scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling)


def _flex(query: Tensor, key: Tensor, value: Tensor, blocks: BlockMask, scaling: float | None) -> tuple[Tensor, Tensor]:
    """Attention on a GPU, where FlexAttention skips what no row sees; and the log-sums of its scores [1, A, R].

    Its kernel for decoding, which it would choose for fewer than 128 rows, takes no more than 128 of all heads that
    share keys (torch 2.11 to 2.13).
    """
    width = query.shape[-1]
    scaling = width**-0.5 if scaling is None else scaling
    if width < NARROWEST:
        query, key, value = (nn.functional.pad(heads, (0, NARROWEST - width)) for heads in (query, key, value))
    attended, beside = _compiled_flex(
        query, key, value, block_mask=blocks, scale=scaling, enable_gqa=True, kernel_options={"BACKEND": "TRITON"},
        return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    return attended[..., :width], beside.lse


# --- Packed samples, and all chains of parallel drafts at once


ALL = Sight()


def in_sample(sample_ids: Tensor, row: Tensor, position: Tensor, sight: Sight = ALL, step: int = 0) -> Tensor:
    """Whether a position of packed samples is in the sample of a row, not after it, and in sight: bool.

    `sample_ids` int64 [N]; `row` and `position` are indices that broadcast. `step`: so many positions after its own the
    row stands, where the window moves on with it.
    """
    seen = (position <= row) & (sample_ids[row] == sample_ids[position])
    if sight.window is None:
        return seen
    near = position > row + step - sight.window
    return seen & (near | _among_first(sample_ids, position, sight.sink_tokens))


def _among_first(sample_ids: Tensor, position: Tensor, count: int | Tensor) -> Tensor:
    """Whether a position is one of the first `count` of its sample: bool; both may be indices that broadcast."""
    return (position < count) | (sample_ids[(position - count).clamp(min=0)] != sample_ids[position])


def masks_of_samples(sample_ids: Tensor) -> Masks:
    """The masks, by sight, of rows of packed samples, which see those before them in their own: `sample_ids` int64
    [1, R]."""

    def sees(row: Tensor, other: Tensor, sight: Sight) -> Tensor:
        return in_sample(sample_ids[0], row, other, sight)

    size = sample_ids.shape[1]
    return Masks(sees, size, size, sample_ids.device)


def masks_of_parallel_rows(rows: ParallelRows) -> Masks:
    """The masks, by sight, of what a mask token's row sees in serving, for every chain of a batch: the true rows up to
    its anchor, and its own chain up to itself."""

    def sees(row: Tensor, other: Tensor, sight: Sight) -> Tensor:
        anchor, before = rows.anchors[row], rows.anchors[other]
        depth, its_depth = rows.depths[row], rows.depths[other]
        true = (its_depth == 0) & (before <= anchor) & (rows.sample_ids[row] == rows.sample_ids[other])
        seen = true | ((before == anchor) & (its_depth <= depth))
        if sight.window is None:
            return seen
        near = before + its_depth > anchor + depth - sight.window
        return seen & (near | (rows.positions[0, other] < sight.sink_tokens))

    return Masks(sees, len(rows.anchors), len(rows.anchors), rows.anchors.device)


def attend_masked(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    masks: Masks | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    sink_tokens: int = 0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The attention function for transformers' interface: `query` [1, A, R, D], `key`, `value` [1, G, R, D].

    Raises `TargetError` for a model that does not hand `masks` down, or whose scores are more than products.
    """
    if masks is None or softcap is not None or s_aux is not None:
        problem = "drops the model call's keyword arguments" if masks is None else "caps its scores or has sinks"
        raise TargetError(
            f"{type(module).__name__} {problem}", expected="attention as in transformers' Llama, to be trained"
        )
    query, key, value = in_one_dtype(query, key, value)
    sight = sight_of(module, Sight(sliding_window, sink_tokens))
    if query.is_cuda:
        attended = _flex(query, key, value, masks.blocks(sight), scaling)[0]
    else:
        attended = masks.attend(
            sight, query.dtype, lambda rows, bias: _dense(query[:, :, rows], key, value, bias, scaling)
        )
    return attended.transpose(1, 2), None


# --- Chains of a training-time test


class ChainSteps:
    """Keys and values of the steps so far, layer by layer; given to the attention function as `chain`.

    `rows` int64 [R] are the positions that the current step runs; `go_on` chooses fewer and starts the next step.
    `masks`: of these rows over the positions of the first step, by sight and step. Windows are wider than the steps are
    many.
    """

    def __init__(self, sample_ids: Tensor):
        self.rows = torch.arange(sample_ids.shape[1], device=sample_ids.device)
        self._sample_ids = sample_ids[0]  # of [1, N]
        self._step = 0
        self._first: dict[int, tuple[Tensor, Tensor]] = {}
        self._later: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.masks = self._masks()

    def go_on(self, kept: Tensor | None = None) -> None:
        """Start the next step, with the rows `kept` int64 of the current ones; all where None. Only once narrower."""
        self._step += 1
        if kept is not None:
            self.rows = self.rows[kept]
            self.masks = self._masks()

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, sight: Sight = ALL
    ) -> Tensor:
        """Attention of a step: `query` [1, A, R, D], `key` [1, G, R, D] and `value` [1, G, R, E] of its rows, in one
        dtype, E ≤ D; [1, A, R, E]. `sight`: the layer's."""
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
        seen = sight, 0 if sight.window is None else self._step
        if query.is_cuda:
            return _joined_flex(query, keys, values, own, self.masks.blocks(seen), scaling)[..., :width]
        keys, values = repeated(keys, repeats), repeated(values, repeats)

        def attended(rows: slice, bias: Tensor) -> Tensor:
            beside = None if own is None else (own[0][..., rows, :], own[1][..., rows, :])
            return _joined(query[:, :, rows], keys, values, beside, bias, scaling)

        return self.masks.attend(seen, query.dtype, attended)[..., :width]

    def _masks(self) -> Masks:
        rows, sample_ids = self.rows, self._sample_ids

        def sees(row: Tensor, position: Tensor, seen: tuple[Sight, int]) -> Tensor:
            return in_sample(sample_ids, rows[row], position, *seen)

        return Masks(sees, len(rows), len(sample_ids), rows.device)


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
        return _dense(query, key, value, bias, scaling)
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


def _joined_flex(
    query: Tensor, key: Tensor, value: Tensor, own: tuple[Tensor, Tensor] | None, blocks: BlockMask, scaling: float
) -> Tensor:
    """The attention of `_joined` on a GPU, where the log-sum that FlexAttention returns can be differentiated."""
    first, log_sum = _flex(query, key, value, blocks, scaling)
    if own is None:
        return first
    scores = (query * own[0]).sum(-1).float() * scaling
    total = torch.logaddexp(log_sum.float(), scores.logsumexp(0))
    weights = (scores - total).exp().to(value.dtype)[..., None]
    return first * (log_sum - total).exp().to(value.dtype)[..., None] + (weights * own[1]).sum(0)


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
    sink_tokens: int = 0,
    **_: object,
) -> tuple[Tensor, None]:
    """The attention function for transformers' interface; the layers keep their step's keys and values in `chain`."""
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    sight = sight_of(module, Sight(sliding_window, sink_tokens))
    out = chain.attend(layer, *in_one_dtype(query, key, value), scaling, sight)
    return out.transpose(1, 2), None


# --- Blocks at many anchors


class BlockVisibility(NamedTuple):
    """What the rows of a block see in a layer, as in serving.

    `window` in tokens, None for all; `bidirectional`: also the later rows of their block; `anchored`: the window is
    that of the first row for all of them; `sink_tokens`: the first ones of the text that are seen besides it.
    """

    window: int | None
    bidirectional: bool
    anchored: bool
    sink_tokens: int = 0


class ContextOfLayers(Protocol):
    """What the blocks see of the target's states."""

    def __getitem__(self, layer: int, /) -> tuple[Tensor, Tensor]:
        """The keys and values [1, G, N, D] of a layer."""


class Blocks:
    """What the blocks of a pass attend to; given to the attention function as `blocks`.

    `anchors` int64 [M] in the packed row, ascending, `rows` T of each block, `context`: a layer's keys and values
    [1, G, N, D] of the target's states. The columns of a mask are the N positions, then the rows of all blocks in turn.
    """

    def __init__(self, anchors: Tensor, rows: int, sample_ids: Tensor, context: ContextOfLayers) -> None:
        self.context = context
        self._anchors = anchors
        self._rows = rows
        self._sample_ids = sample_ids[0]  # of [1, N]
        count = len(anchors) * rows
        self._masks = Masks(self._sees, count, len(self._sample_ids) + count, anchors.device)

    def _sees(self, row: Tensor, column: Tensor, visibility: BlockVisibility) -> Tensor:
        window, bidirectional, anchored, sink_tokens = visibility
        size = len(self._sample_ids)
        anchor, step = self._anchors[row // self._rows], row % self._rows
        other = (column - size).clamp(min=0)
        position = column.clamp(max=size - 1)
        before = (position <= anchor) & (self._sample_ids[position] == self._sample_ids[anchor])
        if window is not None:
            near = position > anchor + 1 - window + (0 if anchored else step)
            before &= near | _among_first(self._sample_ids, position, sink_tokens)
        own = other // self._rows == row // self._rows
        later = other % self._rows - step
        if not bidirectional:
            own &= later <= 0
        if window is not None and not anchored:
            first = _among_first(self._sample_ids, anchor, (sink_tokens - 1 - other % self._rows).clamp(min=0))
            own &= (later.abs() < window) | ((later <= 0) & first)
        return torch.where(column < size, before, own)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, visibility: BlockVisibility
    ) -> Tensor:
        """`query` [M, A, T, D], `key` and `value` [M, G, T, D] of the rows, in one dtype: [M, A, T, D]."""
        keys, values = (part.to(value.dtype) for part in self.context[layer])
        if query.is_cuda:
            parts = (_in_a_row(query), torch.cat((keys, _in_a_row(key)), 2), torch.cat((values, _in_a_row(value)), 2))
            return _apart(_flex(*parts, self._masks.blocks(visibility), scaling)[0], self._rows)
        size, out = len(self._sample_ids), []
        for begin in range(0, max(len(query), 1), BLOCKS_AT_ONCE):  # no blocks are one part of none
            some, seen = slice(begin, begin + BLOCKS_AT_ONCE), self._context_of(begin)
            q, k, v = (_in_a_row(part[some]) for part in (query, key, value))
            rows = range(begin * self._rows, begin * self._rows + q.shape[2])
            own = range(size + rows.start, size + rows.stop)
            bias = self._masks.bias(visibility, query.dtype, rows, (seen, own))
            before = slice(seen.start, seen.stop)
            k, v = torch.cat((keys[:, :, before], k), dim=2), torch.cat((values[:, :, before], v), dim=2)
            out.append(_apart(_dense(q, k, v, bias, scaling), self._rows))
        return torch.cat(out)

    def _context_of(self, begin: int) -> range:
        """The n positions that the blocks from `begin` on may see: from the first one's sample to the last anchor."""
        anchors = self._anchors[begin : begin + BLOCKS_AT_ONCE].tolist() or [0]
        first = int((self._sample_ids == self._sample_ids[anchors[0]]).int().argmax())
        return range(first, anchors[-1] + 1)


def _in_a_row(heads: Tensor) -> Tensor:
    """Put the heads of all blocks in one row: [M, A, T, D] → [1, A, M·T, D]."""
    return heads.transpose(0, 1).flatten(1, 2)[None]


def _apart(heads: Tensor, rows: int) -> Tensor:
    """Take the heads of blocks apart again: [1, A, M·T, D] → [M, A, T, D]."""
    return heads[0].unflatten(1, (-1, rows)).transpose(0, 1)


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
    sink_tokens: int = 0,
    **_: object,
) -> tuple[Tensor, None]:
    """The attention function of blocks for transformers' interface."""
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    visibility = BlockVisibility(sliding_window, bidirectional, anchored, sink_tokens)
    return blocks.attend(layer, *in_one_dtype(query, key, value), scaling, visibility).transpose(1, 2), None


AttentionInterface.register(MASKED_ATTENTION, attend_masked)
AttentionInterface.register(CHAIN_ATTENTION, attend_chain)
AttentionInterface.register(BLOCK_ATTENTION, attend_blocks)
