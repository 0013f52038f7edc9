"""Prompts on their way into the cache: several in one forward, one after the other as a single row of tokens.

Nothing is padded: products run over all tokens at once, and attention over each prompt by itself. A prompt that is
longer than a forward may be goes in piece by piece, and the sequences that are decoded meanwhile have a round after
each. T tokens of all prompts in a forward, N query heads, G key/value heads, D and E widths of keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

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
from draftkit.targets.media import Media
from draftkit.targets.target import Target, TargetOutput

if TYPE_CHECKING:
    from draftkit.runtime.compiled.prompts import CompiledPrompts

PREFILL_CHUNK = 2048  # rows of one forward, which bounds its activations


class Piece(NamedTuple):
    """Tokens `begin` to `end` of the sequence in `slot`."""

    slot: int
    begin: int
    end: int


@dataclass
class _Waiting:
    """A prompt of which `done` tokens are in the cache; `before`: the features of the last ones of these."""

    generation: Generation
    slot: int
    done: int = 0
    before: Tensor | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.generation.request.prompt

    @property
    def media(self) -> Media | None:
        return self.generation.request.media


class Prefilled(NamedTuple):
    """A piece of a prompt that is in the cache: the `logits` [V] after it, and the `features` [n, F] of its positions
    and of those before that the drafter needs again. `shift` as of `TargetOutput`."""

    generation: Generation
    piece: Piece
    logits: Tensor
    features: Tensor | None
    shift: Tensor | None = None

    @property
    def slot(self) -> int:
        return self.piece.slot

    @property
    def complete(self) -> bool:
        """Whether the prompt ends with it."""
        return self.piece.end == len(self.generation.request.prompt)

    def sequence(self, device: torch.device) -> NewSequence | None:
        """What a drafter is given of it; None before the end of a prompt of which it reads no features."""
        prompt = self.generation.request.prompt
        if self.features is None:
            return NewSequence(self.slot, torch.tensor(prompt, device=device), None) if self.complete else None
        begin = self.piece.end - len(self.features)
        tokens = torch.tensor(prompt[begin : self.piece.end], device=device)
        return NewSequence(self.slot, tokens, self.features, begin, len(prompt))


class Prefill:
    """Takes prompts into a target's `cache`, at most `chunk` tokens in a forward, first come, first served. `overlap`
    is the drafter's; `compiled`: what runs the forwards that it can."""

    def __init__(
        self, target: Target, cache: SlotCache, chunk: int, overlap: int = 0, compiled: CompiledPrompts | None = None
    ):
        self._target = target
        self._compiled = compiled
        self._cache = cache
        self._chunk = chunk
        self._overlap = overlap
        self._waiting: list[_Waiting] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, generation: Generation, slot: int) -> None:
        self._waiting.append(_Waiting(generation, slot))

    def step(self) -> list[Prefilled]:
        """One forward; the pieces of prompts that it has taken in."""
        taken = self._take()
        pieces = [piece for _, piece in taken]
        output = self._forward(taken)
        features: Sequence[Tensor | None] = [None] * len(taken)
        if output.features is not None:
            features = output.features[0].split([piece.end - piece.begin for piece in pieces])
        done = []
        for (waiting, piece), logits, own in zip(taken, output.logits[0], features, strict=True):
            if waiting.before is not None and own is not None:
                own = torch.cat((waiting.before, own))
            done.append(Prefilled(waiting.generation, piece, logits, own, output.shift))
            waiting.done = piece.end
            if own is not None:
                waiting.before = own[len(own) - min(self._overlap, len(own)) :].clone()  # without the memory of all
        self._waiting = [waiting for waiting in self._waiting if waiting.done < len(waiting.tokens)]
        return done

    def _take(self) -> list[tuple[_Waiting, Piece]]:
        """The pieces of the next forward. A prompt with images has one of its own, and is not cut."""
        taken: list[tuple[_Waiting, Piece]] = []
        room = self._chunk
        for waiting in self._waiting if self._target.joins_prompts else self._waiting[:1]:
            end = len(waiting.tokens)
            if room <= 0 or (taken and waiting.media is not None):
                break
            if self._target.resumes and waiting.media is None:
                end = min(end, waiting.done + room)
            taken.append((waiting, Piece(waiting.slot, waiting.done, end)))
            room = 0 if waiting.media is not None else room - (end - waiting.done)
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
        last = torch.tensor(last_rows).to(device)
        media = taken[0][0].media
        if self._compiled is not None and media is None:
            found = self._compiled.forward(tokens, positions, lengths, slots[0], last)
            if found is not None:
                return found
        if self._target.joins_prompts:
            kv: CacheRows = PromptRows(self._cache, [piece for _, piece in taken], slots[0], positions[0])
        else:
            kv = self._cache.rows(slots[0, :1], positions, taken[0][1].end, prompt=True)
        return self._target.forward(tokens, positions, kv, last_only=True, last_rows=last, lengths=lengths, media=media)


class PrefillForward(NamedTuple):
    """A forward of new sequences: which of all their rows it takes, one sequence after the other, at `positions` int64
    [1, T]; and where they are stored."""

    taken: slice
    positions: Tensor
    rows: CacheRows


def prefill_forwards(
    cache: SlotCache, sequences: Sequence[Piece], device: torch.device, *, joins: bool = True
) -> Iterator[PrefillForward]:
    """The forwards that take in rows of new sequences.

    They have at most `PREFILL_CHUNK` rows. Where the model does not join sequences, each has one of its own, however
    long.
    """
    taken = 0
    for pieces in _chunks(sequences) if joins else [[piece] for piece in sequences]:
        slots = [piece.slot for piece in pieces for _ in range(piece.begin, piece.end)]
        positions = [position for piece in pieces for position in range(piece.begin, piece.end)]
        told, at = torch.tensor([slots, positions]).to(device)
        if joins:
            rows: CacheRows = PromptRows(cache, pieces, told, at)
        else:
            rows = cache.rows(told[:1], at[None], pieces[0].end, prompt=True)
        yield PrefillForward(slice(taken, taken + len(positions)), at[None], rows)
        taken += len(positions)


def _chunks(sequences: Sequence[Piece]) -> Iterator[list[Piece]]:
    """The rows of all sequences, cut where a forward is full."""
    pieces: list[Piece] = []
    room = PREFILL_CHUNK
    for slot, begin, last in sequences:
        while begin < last:
            end = min(last, begin + room)
            pieces.append(Piece(slot, begin, end))
            room -= end - begin
            begin = end
            if not room:
                yield pieces
                pieces, room = [], PREFILL_CHUNK
    if pieces:
        yield pieces


def pieces_before_last(prompts: Sequence[NewSequence]) -> list[Piece]:
    """The positions of prompts but each one's last."""
    return [Piece(prompt.slot, prompt.begin, prompt.begin + len(prompt.tokens) - 1) for prompt in prompts]


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
        self._placed = slots, positions
        sizes = [piece.end - piece.begin for piece in pieces]
        self._own = [
            SlotRows(own[:1], at[None], prompt=True)
            for own, at in zip(slots.split(sizes), positions.split(sizes), strict=True)
        ]

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
        """Attend as `CacheRows` does, from `query` [1, N, T, D]: each piece over its own sequence, [1, N, T, E]. All in
        one call where FlashAttention can."""
        same_width = keys.shape[3] == values.shape[3]
        if len(self._pieces) > 1 and same_width and _is_causal(scoring, self._length) and _has_flash(query):
            return self._attend_at_once(query, keys, values, scoring.scaling)
        parts = query.split([piece.end - piece.begin for piece in self._pieces], dim=2)
        out = []
        for part, piece, rows in zip(parts, self._pieces, self._own, strict=True):
            own_keys, own_values = (pool[:, :, : piece.end] for pool in (keys, values))
            causal = _is_causal(scoring, piece.end) and same_width
            if causal and (_has_flash(query) or (piece.begin == 0 and not query.is_cuda)):
                out.append(_causal(part, own_keys[piece.slot, None], own_values[piece.slot, None], scoring.scaling))
            else:
                out.append(attend(part, own_keys, own_values, rows.on(query.device), scoring))
        return torch.cat(out, dim=2) if len(out) > 1 else out[0]

    def _attend_at_once(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """All pieces in one call of FlashAttention, over a copy of their sequences' entries, one after the other."""
        slots, entries, ends, lengths, longest = self._sequences
        stored, kept = (pool.transpose(1, 2)[slots, entries] for pool in (keys, values))
        return _causal_of_all(query[0].transpose(0, 1), stored, kept, ends, lengths, longest, scaling).transpose(0, 1)[
            None
        ]

    @cached_property
    def _sequences(self) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[int, int]]:
        """Slot and entry, int64, of all that the pieces see; int32 [pieces + 1], where each one's rows and entries end,
        after a zero; and the most rows and entries that one has."""
        device = self._placed[0].device
        rows = [piece.end - piece.begin for piece in self._pieces]
        ends = [piece.end for piece in self._pieces]
        sums = torch.tensor([[0, *accumulate(rows)], [0, *accumulate(ends)]], dtype=torch.int32).to(device)
        at, entries = self._placed
        if rows != ends:  # one begins in the middle of its prompt
            slots = torch.cat([torch.full((piece.end,), piece.slot) for piece in self._pieces])
            at, entries = torch.stack((slots, torch.cat([torch.arange(end) for end in ends]))).to(device)
        return at, entries, sums[0], sums[1], (max(rows), max(ends))

    def _write(self, keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> None:
        write(keys, values, key.transpose(0, 2), value.transpose(0, 2), self.rows.on(key.device))


def _is_causal(scoring: Scoring, length: int) -> bool:
    """Whether rows at 0 … `length` − 1 see themselves and all before them, and nothing else changes their scores."""
    bounds = (bound for bound in (scoring.window, scoring.chunk) if bound is not None)
    plain = scoring.softcap is None and scoring.sinks is None and scoring.chosen is None
    return plain and not scoring.bidirectional and scoring.seen is None and all(bound >= length for bound in bounds)


def _has_flash(query: Tensor) -> bool:
    """Whether torch has FlashAttention for it, which alone takes rows that begin in the middle without a mask, and
    several sequences in one call."""
    width = query.shape[3]
    return query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and width <= 256 and width % 8 == 0


def _causal(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Attend from the last rows of a sequence, without a mask in memory or a copy of the keys for each query head."""
    if _has_flash(query):  # which aligns rows of which there are fewer than keys with the last keys
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
            query, keys, values, dropout_p=0.0, is_causal=True, scale=scaling
        )[0]
        return out
    shared = query.shape[1] != keys.shape[1]
    return scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scaling, enable_gqa=shared)


def _causal_of_all(
    query: Tensor, keys: Tensor, values: Tensor, rows: Tensor, lengths: Tensor, longest: tuple[int, int], scaling: float
) -> Tensor:
    """Attend from `query` [T, N, D], the last rows of several sequences, over all their `keys` [L, G, D] and `values`
    [L, G, D], one sequence after the other: [T, N, D]. `rows` and `lengths` int32 say where each one's rows and entries
    end, after a zero; `longest` are the most that one has."""
    out: Tensor = torch.ops.aten._flash_attention_forward(
        query, keys, values, rows, lengths, *longest, 0.0, True, False, scale=scaling
    )[0]
    return out
