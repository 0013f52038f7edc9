"""Packing documents into rows of a token budget. N tokens of a row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draftkit.data.samples import Document
from draftkit.errors import DraftkitError


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Distribute documents, by number, over rows of `budget` tokens: the longest first, each where it fits best.

    Every document is in exactly one row; the same lengths give the same rows. Raises `DraftkitError` for a document
    longer than a row.
    """
    rows: list[list[int]] = []
    room: dict[int, list[int]] = {}  # how much is left → rows
    for document in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        size = lengths[document]
        if size > budget:
            raise DraftkitError(
                f"document {document} has {size} tokens, a row {budget}",
                hint="prepare the data with a smaller --max-length, or train with more tokens a row",
            )
        left = min((left for left in room if left >= size), default=budget)
        if left in room:
            row = room[left].pop()
            if not room[left]:
                del room[left]
        else:
            rows.append([])
            row = len(rows) - 1
        rows[row].append(document)
        room.setdefault(left - size, []).append(row)
    return rows


def row_tensors(documents: Sequence[Document], size: int) -> dict[str, Tensor]:
    """A row of `size` tokens as `Batch` has it, without the target's states: tensors [size]."""
    tokens = np.zeros(size, dtype=np.int64)
    positions = np.zeros(size, dtype=np.int64)
    numbers = np.full(size, -1, dtype=np.int64)
    supervised = np.zeros(size, dtype=np.bool_)
    begin = 0
    for number, document in enumerate(documents):
        end = begin + len(document)
        tokens[begin:end] = document.tokens
        positions[begin:end] = np.arange(len(document))
        numbers[begin:end] = number
        supervised[begin:end] = document.supervised
        begin = end
    arrays = {"tokens": tokens, "positions": positions, "documents": numbers, "supervised": supervised}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
