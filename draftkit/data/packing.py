"""Packing samples into rows of a token budget, as training and the target read them. N tokens of a row."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from draftkit.data.columns import SampleTable
from draftkit.data.samples import Sample
from draftkit.errors import DraftkitError


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Distribute samples, by number, over rows of `budget` tokens: the longest first, each where it fits best.

    Every sample is in exactly one row; the same lengths give the same rows. Raises `DraftkitError` for a sample
    longer than a row.
    """
    placed, begins = packed(np.asarray(lengths, dtype=np.int64), budget)
    return [placed[begin:end].tolist() for begin, end in pairwise(begins.tolist())]


def packed(lengths: NDArray[np.int64], budget: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`pack` for many samples: their numbers row by row, and where each row begins and the last one ends."""
    order = np.argsort(-lengths, kind="stable")
    if len(order) and lengths[order[0]] > budget:
        raise DraftkitError(
            f"sample {order[0]} has {lengths[order[0]]} tokens, a row {budget}",
            hint="prepare the data with a smaller --max-length, or train with more tokens a row",
        )
    row_of = np.fromiter(_rows(lengths[order].data, budget), np.int64, len(order))
    sizes = np.bincount(row_of)
    return order[np.argsort(row_of, kind="stable")], np.concatenate([[0], np.cumsum(sizes)])


def _rows(lengths: Iterable[int], budget: int) -> Iterator[int]:
    """The row of each sample, of descending lengths."""
    room: dict[int, list[int]] = {}  # how much is left → rows
    lefts: list[int] = []  # the same, ascending
    count = 0
    for size in lengths:
        place = bisect_left(lefts, size)
        if place < len(lefts):
            left = lefts[place]
            row = room[left].pop()
            if not room[left]:
                del room[left], lefts[place]
        else:
            left, row, count = budget, count, count + 1
        if left - size not in room:
            room[left - size] = []
            insort(lefts, left - size)
        room[left - size].append(row)
        yield row


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
    """The samples of `numbers`, packed into rows of `size` tokens. `num_tokens`: of all of them; `longest`: of one."""

    def __init__(self, samples: Sequence[Sample], numbers: Sequence[int] | NDArray[np.int64], size: int):
        self.samples = SampleTable.of(samples)
        self.numbers = np.asarray(numbers, dtype=np.int64)
        self.size = size
        lengths = self.samples.lengths[self.numbers]
        self.num_tokens, self.longest = int(lengths.sum()), int(lengths.max(initial=0))
        placed, self._begins = packed(lengths, size)
        self._placed = self.numbers[placed]

    def __len__(self) -> int:
        return len(self._begins) - 1

    def __getitem__(self, index: int) -> PackedRow:
        if not 0 <= index < len(self):
            raise IndexError(index)
        numbers = self._placed[self._begins[index] : self._begins[index + 1]].tolist()
        tensors = row_tensors([self.samples[number] for number in numbers], self.size)
        return PackedRow(**{name: tensor[None] for name, tensor in tensors.items()}, numbers=numbers)  # type: ignore[typeddict-item]

    def longest_row(self) -> PackedRows:
        """The row with the most tokens, alone."""
        sizes = np.add.reduceat(self.samples.lengths[self._placed], self._begins[:-1])
        at = int(sizes.argmax())
        return PackedRows(self.samples, self._placed[self._begins[at] : self._begins[at + 1]], self.size)


def only_row(rows: Sequence[PackedRow]) -> PackedRow:
    """The collator: a device computes on one row at a time."""
    (row,) = rows
    return row
