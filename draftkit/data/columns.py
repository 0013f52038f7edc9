"""Many samples: each by its number, made when it is asked for, and what passes over all of them need, as columns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from draftkit.data.samples import Sample

AT_ONCE = 1000  # samples of a pass, where they do not lie in columns already


class Columns(NamedTuple):
    """Samples that follow one another, N tokens together: `lengths` int64 of each, `tokens` int32 [N], `loss_mask`
    bool [N]."""

    lengths: NDArray[np.int64]
    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]


class SampleTable(Sequence[Sample], ABC):
    """Samples by their numbers. `lengths` int64: the tokens of each."""

    lengths: NDArray[np.int64]

    @staticmethod
    def of(samples: Sequence[Sample]) -> SampleTable:
        """These samples as what they are, or a list of them as that."""
        return samples if isinstance(samples, SampleTable) else ListedSamples(samples)

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, number: int) -> Sample: ...
    @overload
    def __getitem__(self, number: slice) -> list[Sample]: ...
    def __getitem__(self, number: int | slice) -> Sample | list[Sample]:
        if isinstance(number, slice):
            return [self.sample(each) for each in range(*number.indices(len(self)))]
        if not -len(self) <= number < len(self):
            raise IndexError(number)
        return self.sample(int(number) % len(self))

    @abstractmethod
    def sample(self, number: int) -> Sample:
        """The sample of a number from 0 on."""

    @abstractmethod
    def ids(self) -> Iterator[str]:
        """The ids of all samples."""

    @abstractmethod
    def columns(self) -> Iterator[Columns]:
        """All samples in order, a part of them at once."""

    def has_loss(self) -> bool:
        """Whether any loss mask has a token."""
        return any(bool(part.loss_mask.any()) for part in self.columns())

    def has_images(self) -> bool:
        """Whether any has tokens that stand for an image."""
        return any(sample.images for sample in self)

    def __add__(self, other: SampleTable) -> SampleTable:
        """These samples, then the other ones."""
        return JoinedSamples([self, other])


class ListedSamples(SampleTable):
    """Samples that are in memory."""

    def __init__(self, samples: Sequence[Sample]):
        self._samples = samples
        self.lengths = np.fromiter(map(len, samples), np.int64, len(samples))

    def sample(self, number: int) -> Sample:
        return self._samples[number]

    def ids(self) -> Iterator[str]:
        return (sample.id for sample in self._samples)

    def columns(self) -> Iterator[Columns]:
        for begin in range(0, len(self), AT_ONCE):
            some = self._samples[begin : begin + AT_ONCE]
            tokens, masks = ([getattr(sample, name) for sample in some] for name in ("tokens", "loss_mask"))
            yield Columns(self.lengths[begin : begin + AT_ONCE], np.concatenate(tokens), np.concatenate(masks))


class JoinedSamples(SampleTable):
    """Samples of several files, in turn."""

    def __init__(self, parts: Sequence[SampleTable]):
        self._parts = parts
        self._firsts = [0, *accumulate(map(len, parts))]
        self.lengths = np.concatenate([part.lengths for part in parts])

    def sample(self, number: int) -> Sample:
        part = bisect_right(self._firsts, number) - 1
        return self._parts[part].sample(number - self._firsts[part])

    def ids(self) -> Iterator[str]:
        return (name for part in self._parts for name in part.ids())

    def columns(self) -> Iterator[Columns]:
        return (columns for part in self._parts for columns in part.columns())

    def has_images(self) -> bool:
        return any(part.has_images() for part in self._parts)
