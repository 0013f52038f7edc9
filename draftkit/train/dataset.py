"""Packed rows of documents as the trainer reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypedDict

from torch import Tensor
from torch.utils.data import Dataset

from draftkit.data.packing import pack, row_tensors
from draftkit.data.samples import Document

Numbers = Sequence[int]


class Row(TypedDict):
    """A row: tensors [1, N] as in `Batch`, and the numbers of its documents in their file."""

    tokens: Tensor
    positions: Tensor
    documents: Tensor
    supervised: Tensor
    numbers: list[int]


class PackedRows(Dataset[Row]):
    """The documents of `numbers`, packed into rows of `size` tokens."""

    def __init__(self, documents: Sequence[Document], numbers: Numbers, size: int):
        self.documents = documents
        self.size = size
        self.rows = [[numbers[i] for i in row] for row in pack([len(documents[number]) for number in numbers], size)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        numbers = self.rows[index]
        tensors = row_tensors([self.documents[number] for number in numbers], self.size)
        return Row(**{name: tensor[None] for name, tensor in tensors.items()}, numbers=numbers)  # type: ignore[typeddict-item]


def only_row(rows: Sequence[Row]) -> Row:
    """The collator: a device computes on one row at a time."""
    (row,) = rows
    return row


def held_out(documents: Sequence[Document], share: float) -> tuple[list[int], list[int]]:
    """The numbers of documents to train on and of a share that is held out, by their ids alone: more data leave the
    old documents on their side."""
    limit = int(share * 2**32)
    aside = [int.from_bytes(hashlib.sha256(d.id.encode()).digest()[:4], "big") < limit for d in documents]
    kept = [number for number, out in enumerate(aside) if not out]
    return kept, [number for number, out in enumerate(aside) if out]
