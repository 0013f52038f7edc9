"""The draft vocabulary: which of the target's tokens a draft can propose, and what leaving out the others costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from draftkit.errors import DraftkitError
from draftkit.train.data.documents import Document

SIZES = (4096, 8192, 16384, 32768, 65536)


def choose_vocabulary(counts: Tensor, size: int) -> Tensor:
    """The `size` most frequent tokens, of equals the lower ids, ascending: int64 [size] of counts int64 [V].

    Unused tokens fill up from the lowest. Raises `DraftkitError` for more tokens than there are.
    """
    if not 0 < size <= len(counts):
        raise DraftkitError(f"a draft vocabulary of {size} tokens", expected=f"1 to {len(counts)}")
    order = sorted(range(len(counts)), key=lambda token: (-int(counts[token]), token))
    return torch.tensor(sorted(order[:size]))


@dataclass(frozen=True)
class Ceiling:
    """What a draft vocabulary of a size allows.

    `coverage`: the share of supervised tokens that are in it. `acceptance_length`: of a draft that always proposes the
    right token where it has it, with K drafts a round.
    """

    size: int
    coverage: float
    acceptance_length: float

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def plan_vocabulary(
    documents: Sequence[Document], counts: Tensor, k: int, sizes: Sequence[int] = SIZES
) -> list[Ceiling]:
    """The ceilings of the `sizes` that are smaller than the target's vocabulary, and of all of it."""
    smaller = [size for size in sizes if size < len(counts)]
    return [_ceiling(documents, counts, size, k) for size in (*smaller, len(counts))]


def _ceiling(documents: Sequence[Document], counts: Tensor, size: int, k: int) -> Ceiling:
    known = torch.zeros(len(counts), dtype=torch.bool)
    known[choose_vocabulary(counts, size)] = True
    accepted = rounds = 0
    for document in documents:
        has = known[torch.from_numpy(document.tokens).long()].tolist()
        for begin, end in document.spans:
            anchor = begin if begin else 1  # the round's first token is the target's own
            while anchor < end - 1:
                stand = 0
                while stand < k and anchor + 1 + stand < end and has[anchor + 1 + stand]:
                    stand += 1
                accepted, rounds = accepted + stand, rounds + 1
                anchor += stand + 1
    coverage = float(counts[known].sum() / counts.sum().clamp(min=1))
    return Ceiling(size, coverage, 1 + accepted / max(rounds, 1))
