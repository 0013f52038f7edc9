"""Prompts in one forward attend as each by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftkit.runtime import prefill
from draftkit.runtime.cache import SlotCache
from draftkit.runtime.ops.slot_attention import Scoring
from draftkit.runtime.prefill import Piece, PromptRows

SLOTS, HEADS, GROUPS, WIDTH = 3, 4, 2, 8
SCORING = Scoring(WIDTH**-0.5)


def forward(cache: SlotCache, pieces: list[Piece], seed: int) -> Tensor:
    """Attention of random rows, which are stored first: [1, N, T, D]."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.tensor([piece.slot for piece in pieces for _ in range(piece.begin, piece.end)])
    positions = torch.tensor([at for piece in pieces for at in range(piece.begin, piece.end)])
    rows = PromptRows(cache, pieces, slots, positions)
    key, value = (torch.randn(1, GROUPS, len(slots), WIDTH, generator=generator) for _ in range(2))
    query = torch.randn(1, HEADS, len(slots), WIDTH, generator=generator)
    return rows.attend(query, *rows.update(0, key, value, None), SCORING)


def one_by_one(
    query: Tensor, keys: Tensor, values: Tensor, rows: Tensor, lengths: Tensor, longest: tuple[int, int], scaling: float
) -> Tensor:
    """What the call of all computes, from its description."""
    assert rows.dtype == lengths.dtype == torch.int32
    assert longest == (int(rows.diff().max()), int(lengths.diff().max()))
    out = []
    for own, seen in zip(rows.diff().tolist(), lengths.diff().tolist(), strict=True):
        q, query = query[:own], query[own:]
        k, v = (part[:seen].repeat_interleave(HEADS // GROUPS, 1) for part in (keys, values))
        keys, values = keys[seen:], values[seen:]
        scores = torch.einsum("tnd,lnd->ntl", q, k) * scaling
        hidden = torch.ones(own, seen, dtype=torch.bool).triu(seen - own + 1)
        out.append(torch.einsum("ntl,lnd->tnd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
    return torch.cat(out)


@pytest.mark.parametrize("begin", [0, 3])
def test_pieces_attend_at_once_as_one_by_one(begin: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`begin` 3: the first piece goes on in the middle of its prompt."""
    pieces = [Piece(2, begin, 9), Piece(0, 0, 4), Piece(1, 0, 1)]
    found = []
    for at_once in (False, True):
        cache = SlotCache(SLOTS, 16)
        if begin:
            forward(cache, [Piece(2, 0, begin)], seed=1)
        if at_once:
            monkeypatch.setattr(prefill, "_has_flash", lambda query: True)
            monkeypatch.setattr(prefill, "_causal_of_all", one_by_one)
        found.append(forward(cache, pieces, seed=2))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
