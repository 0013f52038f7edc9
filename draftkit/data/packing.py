"""Packing samples into rows of a token budget, as training and the target read them. N tokens of a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from draftkit.data.samples import Sample
from draftkit.errors import DraftkitError


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Distribute samples, by number, over rows of `budget` tokens: the longest first, each where it fits best.

    Every sample is in exactly one row; the same lengths give the same rows. Raises `DraftkitError` for a sample
    longer than a row.
    """
    rows: list[list[int]] = []
    room: dict[int, list[int]] = {}  # how much is left → rows
    for sample in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        size = lengths[sample]
        if size > budget:
            raise DraftkitError(
                f"sample {sample} has {size} tokens, a row {budget}",
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
        rows[row].append(sample)
        room.setdefault(left - size, []).append(row)
    return rows


def row_tensors(samples: Sequence[Sample], size: int) -> dict[str, Tensor]:
    """A row of `size` tokens as `Batch` has it, without the target's states: tensors [size]."""
    tokens = np.zeros(size, dtype=np.int64)
    positions = np.zeros(size, dtype=np.int64)
    sample_ids = np.full(size, -1, dtype=np.int64)
    loss_mask = np.zeros(size, dtype=np.bool_)
    begin = 0
    for number, sample in enumerate(samples):
        end = begin + len(sample)
        tokens[begin:end] = sample.tokens
        positions[begin:end] = np.arange(len(sample))
        sample_ids[begin:end] = number
        loss_mask[begin:end] = sample.loss_mask
        begin = end
    arrays = {"tokens": tokens, "positions": positions, "sample_ids": sample_ids, "loss_mask": loss_mask}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


class PackedRow(TypedDict):
    """A row: tensors [1, N] as in `Batch`, and the numbers of its samples in their file."""

    tokens: Tensor
    positions: Tensor
    sample_ids: Tensor
    loss_mask: Tensor
    numbers: list[int]


class PackedRows(Dataset[PackedRow]):
    """The samples of `numbers`, packed into rows of `size` tokens."""

    def __init__(self, samples: Sequence[Sample], numbers: Sequence[int], size: int):
        self.samples = samples
        self.numbers = numbers
        self.size = size
        self.rows = [[numbers[i] for i in row] for row in pack([len(samples[number]) for number in numbers], size)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> PackedRow:
        numbers = self.rows[index]
        tensors = row_tensors([self.samples[number] for number in numbers], self.size)
        return PackedRow(**{name: tensor[None] for name, tensor in tensors.items()}, numbers=numbers)  # type: ignore[typeddict-item]


def only_row(rows: Sequence[PackedRow]) -> PackedRow:
    """The collator: a device computes on one row at a time."""
    (row,) = rows
    return row
