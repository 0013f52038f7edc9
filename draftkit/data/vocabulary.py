"""The draft vocabulary: which of the target's tokens a draft can propose, and what leaving out the others costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftkit.data.columns import SampleTable
from draftkit.data.samples import Sample
from draftkit.errors import DraftkitError

SIZES = (4096, 8192, 16384, 32768, 65536)


def token_counts(samples: Sequence[Sample], numbers: Sequence[int] | NDArray[np.int64], vocab_size: int) -> Tensor:
    """How often each token is in the loss masks of the samples of `numbers`: int64 [V]. Raises `DraftkitError` for a
    token that V has not."""
    samples = SampleTable.of(samples)
    wanted = np.zeros(len(samples), dtype=np.bool_)
    wanted[np.asarray(numbers, dtype=np.int64)] = True
    counts = np.zeros(vocab_size, dtype=np.int64)
    first = 0
    for part in samples.columns():
        last = first + len(part.lengths)
        tokens = part.tokens[part.loss_mask & np.repeat(wanted[first:last], part.lengths)]
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
            raise _unknown(samples, np.flatnonzero(wanted[first:last]) + first, vocab_size)
        counts += np.bincount(tokens, minlength=vocab_size)
        first = last
    return torch.from_numpy(counts)


def _unknown(samples: SampleTable, numbers: Iterable[int], vocab_size: int) -> DraftkitError:
    """What is wrong with the first of these samples that teaches a token which is not in the vocabulary."""
    labels = ((sample, sample.tokens[sample.loss_mask]) for sample in map(samples.sample, map(int, numbers)))
    sample, tokens = next((s, t[(t < 0) | (t >= vocab_size)]) for s, t in labels if ((t < 0) | (t >= vocab_size)).any())
    return DraftkitError(f"sample {sample.id} has the token {int(tokens.max())}", expected=f"ids below {vocab_size}")


def choose_vocabulary(counts: Tensor, size: int, kept: Sequence[int] = ()) -> Tensor:
    """The `size` most frequent tokens, of equals the lower ids, ascending: int64 [size] of counts int64 [V].

    Unused tokens fill up from the lowest; those `kept` are chosen whatever their counts. Raises `DraftkitError` for
    more tokens than there are, and for fewer than are kept.
    """
    if not max(1, len(set(kept))) <= size <= len(counts):
        raise DraftkitError(
            f"a draft vocabulary of {size} tokens", expected=f"{max(1, len(set(kept)))} to {len(counts)}"
        )
    rank = counts.clone()
    rank[list(kept)] = counts.max() + 1
    return rank.sort(descending=True, stable=True).indices[:size].sort().values


@dataclass(frozen=True)
class Ceiling:
    """The most that a draft can accept with a vocabulary of one size.

    `coverage`: the share of the tokens in the loss masks that are in it. `acceptance_length`: of a draft that always
    proposes the right token where it has it, with K drafts a round.
    """

    size: int
    coverage: float
    acceptance_length: float

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def plan_vocabulary(samples: Sequence[Sample], counts: Tensor, k: int, sizes: Sequence[int] = SIZES) -> list[Ceiling]:
    """The ceilings of the `sizes` that are smaller than the target's vocabulary, and of all of it."""
    smaller = [size for size in sizes if size < len(counts)]
    return [ceiling(samples, counts, choose_vocabulary(counts, size), k) for size in (*smaller, len(counts))]


def ceiling(samples: Sequence[Sample], counts: Tensor, ids: Tensor, k: int) -> Ceiling:
    """What a draft vocabulary of the tokens `ids` int64 [Vd] allows in `samples`; its coverage is that of `counts`
    int64 [V]."""
    known = torch.zeros(len(counts), dtype=torch.bool)
    known[ids] = True
    accepted = rounds = 0
    for sample in samples:
        has = known[torch.tensor(sample.tokens.astype(np.int64))].tolist()
        for begin, end in sample.spans:
            anchor = begin if begin else 1  # the round's first token is the target's own
            while anchor < end - 1:
                kept = 0
                while kept < k and anchor + 1 + kept < end and has[anchor + 1 + kept]:
                    kept += 1
                accepted, rounds = accepted + kept, rounds + 1
                anchor += kept + 1
    coverage = float(counts[known].sum() / counts.sum().clamp(min=1))
    return Ceiling(len(ids), coverage, 1 + accepted / max(rounds, 1))
