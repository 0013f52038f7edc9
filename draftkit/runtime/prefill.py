"""Prompts on their way into the cache: several in one forward, one after the other as a single row of tokens.

Nothing is padded: products run over all tokens at once, and attention over each prompt by itself. A prompt that is
longer than a forward may be goes in piece by piece, and the sequences that are decoded meanwhile have a round after
each. T tokens of all prompts in a forward, N query heads, G key/value heads, D and E widths of keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from draftkit.runtime.cache import CacheRows, SlotCache
from draftkit.runtime.drafters.protocol import NewSequence
from draftkit.runtime.ops.backend import uses_triton
from draftkit.runtime.ops.slot_attention import Scoring, attend
from draftkit.runtime.ops.slot_write import write
from draftkit.runtime.records import Generation
from draftkit.runtime.slot_rows import SlotRows
from draftkit.targets.target import Target, TargetOutput

PREFILL_CHUNK = 2048  # rows of one forward, which bounds its activations


@dataclass
class _Waiting:
    """A prompt of which `done` tokens are in the cache, and their `features`, piece by piece."""

    generation: Generation
    slot: int
    done: int = 0
    features: list[Tensor] = field(default_factory=list)

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.generation.request.prompt


class Prefilled(NamedTuple):
    """A prompt that is in the cache: the `logits` [V] after it, and the `features` [length, F] of its positions."""

    generation: Generation
    slot: int
    logits: Tensor
    features: Tensor | None


class Piece(NamedTuple):
    """Tokens `begin` to `end` of the sequence in `slot`."""

    slot: int
    begin: int
    end: int


class Prefill:
    """Takes prompts into a target's `cache`, at most `chunk` tokens in a forward, first come, first served."""

    def __init__(self, target: Target, cache: SlotCache, chunk: int):
        self._target = target
        self._cache = cache
        self._chunk = chunk
        self._waiting: list[_Waiting] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, generation: Generation, slot: int) -> None:
        self._waiting.append(_Waiting(generation, slot))

    def step(self) -> list[Prefilled]:
        """One forward; the prompts that it has completed."""
        taken = self._take()
        pieces = [piece for _, piece in taken]
        output = self._forward(taken)
        features: Sequence[Tensor | None] = [None] * len(taken)
        if output.features is not None:
            features = output.features[0].split([piece.end - piece.begin for piece in pieces])
        done = []
        for (waiting, piece), logits, part in zip(taken, output.logits[0], features, strict=True):
            waiting.done = piece.end
            if part is not None:
                waiting.features.append(part)
            if waiting.done == len(waiting.tokens):
                known = torch.cat(waiting.features) if waiting.features else None
                done.append(Prefilled(waiting.generation, waiting.slot, logits, known))
        self._waiting = [waiting for waiting in self._waiting if waiting.done < len(waiting.tokens)]
        return done

    def _take(self) -> list[tuple[_Waiting, Piece]]:
        """The pieces of the next forward."""
        taken: list[tuple[_Waiting, Piece]] = []
        room = self._chunk
        for waiting in self._waiting if self._target.joins_prompts else self._waiting[:1]:
            end = len(waiting.tokens)
            if self._target.resumes:
                end = min(end, waiting.done + room)
            if room <= 0:
                break
            taken.append((waiting, Piece(waiting.slot, waiting.done, end)))
            room -= end - waiting.done
        return taken

    def _forward(self, taken: Sequence[tuple[_Waiting, Piece]]) -> TargetOutput:
        """The logits [1, pieces, V] after each piece, and the features [1, T, F]."""
        device = self._target.device
        columns: list[list[int]] = [[], [], [], []]
        last_rows = []
        for waiting, (slot, begin, end) in taken:
            rows = end - begin
            new = waiting.tokens[begin:end], range(begin, end), [slot] * rows, [len(waiting.tokens)] * rows
            for column, values in zip(columns, new, strict=True):
                column.extend(values)
            last_rows.append(len(columns[0]) - 1)
        tokens, positions, slots, lengths = torch.tensor(columns).to(device).split(1)  # one transfer
        if self._target.joins_prompts:
            kv: CacheRows = PromptRows(self._cache, [piece for _, piece in taken], slots[0], positions[0])
        else:
            kv = self._cache.rows(slots[0, :1], positions, taken[0][1].end, prompt=True)
        last = torch.tensor(last_rows).to(device)
        return self._target.forward(tokens, positions, kv, last_only=True, last_rows=last, lengths=lengths)


class PrefillForward(NamedTuple):
    """A forward of new sequences: which of all their rows it takes, one sequence after the other, at `positions` int64
    [1, T]; and where they are stored."""

    taken: slice
    positions: Tensor
    rows: CacheRows


def prefill_forwards(
    cache: SlotCache, sizes: Sequence[tuple[int, int]], device: torch.device, *, joins: bool = True
) -> Iterator[PrefillForward]:
    """The forwards that take in new sequences, of each of which `sizes` has the slot and the number of its rows.

    They have at most `PREFILL_CHUNK` rows. Where the model does not join sequences, each has one of its own, however
    long.
    """
    taken = 0
    for pieces in _chunks(sizes) if joins else [[Piece(slot, 0, rows)] for slot, rows in sizes]:
        slots = [piece.slot for piece in pieces for _ in range(piece.begin, piece.end)]
        positions = [position for piece in pieces for position in range(piece.begin, piece.end)]
        told, at = torch.tensor([slots, positions]).to(device)
        if joins:
            rows: CacheRows = PromptRows(cache, pieces, told, at)
        else:
            rows = cache.rows(told[:1], at[None], len(positions), prompt=True)
        yield PrefillForward(slice(taken, taken + len(positions)), at[None], rows)
        taken += len(positions)


def _chunks(sizes: Sequence[tuple[int, int]]) -> Iterator[list[Piece]]:
    """The rows of all sequences, cut where a forward is full."""
    pieces: list[Piece] = []
    room = PREFILL_CHUNK
    for slot, rows in sizes:
        begin = 0
        while begin < rows:
            end = min(rows, begin + room)
            pieces.append(Piece(slot, begin, end))
            room -= end - begin
            begin = end
            if not room:
                yield pieces
                pieces, room = [], PREFILL_CHUNK
    if pieces:
        yield pieces


def features_before_last(prompts: Sequence[NewSequence]) -> Tensor:
    """[1, T, F] of all positions of prompts but each one's last, one prompt after the other."""
    return torch.cat([prompt.features[:-1] for prompt in prompts if prompt.features is not None])[None]


class PromptRows(CacheRows):
    """`CacheRows` of several sequences' pieces, one after the other in a forward of one row of T tokens; `slots` and
    `positions` int64 [T]."""

    def __init__(self, cache: SlotCache, pieces: Sequence[Piece], slots: Tensor, positions: Tensor):
        rows = SlotRows(slots, positions[:, None], prompt=True)  # each token a sequence of its own
        left_over = []
        if not uses_triton(slots):
            left_over = cache.left_over([piece.slot for piece in pieces], [[piece.end - 1] for piece in pieces])
        super().__init__(cache, rows, max(piece.end for piece in pieces), left_over)
        self._pieces = pieces
        sizes = [piece.end - piece.begin for piece in pieces]
        self._own = [
            SlotRows(own[:1], at[None], prompt=True)
            for own, at in zip(slots.split(sizes), positions.split(sizes), strict=True)
        ]

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
        """Attend as `CacheRows` does, from `query` [1, N, T, D]: each piece over its own sequence, [1, N, T, E]."""
        parts = query.split([piece.end - piece.begin for piece in self._pieces], dim=2)
        out = []
        for part, piece, rows in zip(parts, self._pieces, self._own, strict=True):
            own_keys, own_values = (pool[:, :, : piece.end] for pool in (keys, values))
            causal = _is_causal(scoring, piece.end) and keys.shape[3] == values.shape[3]
            if causal and (piece.begin == 0 or _has_flash(query)):
                out.append(_causal(part, own_keys[piece.slot, None], own_values[piece.slot, None], scoring.scaling))
            else:
                out.append(attend(part, own_keys, own_values, rows.on(query.device), scoring))
        return torch.cat(out, dim=2) if len(out) > 1 else out[0]

    def _write(self, keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> None:
        write(keys, values, key.transpose(0, 2), value.transpose(0, 2), self.rows.on(key.device))


def _is_causal(scoring: Scoring, length: int) -> bool:
    """Whether rows at 0 … `length` − 1 see themselves and all before them, and nothing else changes their scores."""
    bounds = (bound for bound in (scoring.window, scoring.chunk) if bound is not None)
    plain = scoring.softcap is None and scoring.sinks is None and scoring.chosen is None
    return plain and not scoring.bidirectional and all(bound >= length for bound in bounds)


def _has_flash(query: Tensor) -> bool:
    """Whether torch has FlashAttention for it, which alone takes rows that begin in the middle without a mask."""
    width = query.shape[3]
    return query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and width <= 256 and width % 8 == 0


def _causal(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Attend from the last rows of a sequence, without a mask in memory or a copy of the keys for each query head."""
    if query.shape[2] < keys.shape[2]:  # the function below would align them with the first keys
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
            query, keys, values, dropout_p=0.0, is_causal=True, scale=scaling
        )[0]
        return out
    shared = query.shape[1] != keys.shape[1]
    return scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scaling, enable_gqa=shared)
