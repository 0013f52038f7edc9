"""Packed rows of documents as the trainer reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor
from torch.utils.data import Dataset

from draftkit.errors import DraftkitError
from draftkit.train.data.documents import Document, read_documents
from draftkit.train.packing import pack, row_tensors

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


def read_training_documents(path: Path) -> list[Document]:
    """All documents of a prepared file. Raises `DraftkitError` when none has a supervised token."""
    documents = list(read_documents(path))
    if not any(document.num_supervised for document in documents):
        raise DraftkitError(
            "no document has a supervised token", where=path, hint="draftkit data prepare … reports why"
        )
    return documents


def held_out(documents: Sequence[Document], share: float) -> tuple[list[int], list[int]]:
    """The numbers of documents to train on and of a share that is held out, by their ids alone: more data leave the
    old documents on their side."""
    limit = int(share * 2**32)
    aside = [int.from_bytes(hashlib.sha256(d.id.encode()).digest()[:4], "big") < limit for d in documents]
    kept = [number for number, out in enumerate(aside) if not out]
    return kept, [number for number, out in enumerate(aside) if out]


def token_counts(documents: Sequence[Document], numbers: Numbers, vocab_size: int) -> Tensor:
    """How often each token is supervised: int64 [V]."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for number in numbers:
        document = documents[number]
        tokens = torch.from_numpy(document.tokens[document.supervised]).long()
        counts += torch.bincount(tokens, minlength=vocab_size)
    return counts
