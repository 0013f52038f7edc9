"""What rounds take, by batch and number of drafts, as `eval --advise` times them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from draftkit.results.record import RoundTime


@dataclass(frozen=True)
class RoundTimes:
    """Milliseconds of a round by (batch, K); K = 0 is plain decoding. Between the K that were measured, a line."""

    ms: Mapping[tuple[int, int], float]

    def to_records(self) -> tuple[RoundTime, ...]:
        """The times as a result has them."""
        return tuple(RoundTime(batch, k, ms) for (batch, k), ms in sorted(self.ms.items()))

    @property
    def batches(self) -> list[int]:
        return sorted({batch for batch, _ in self.ms})

    @property
    def largest_k(self) -> int:
        return max(k for _, k in self.ms)

    def of(self, batch: int, k: float) -> float:
        """A round that drafts K, and verifies them."""
        return _between({other: ms for (at, other), ms in self.ms.items() if at == batch}, k)


def _between(known: Mapping[int, float], k: float) -> float:
    """At K, on the line between its neighbors; beyond the last, that of the last."""
    ks = sorted(known)
    right = min(bisect_left(ks, k), len(ks) - 1)
    if ks[right] <= k or right == 0:
        return known[ks[right]]
    low, high = ks[right - 1], ks[right]
    share = (k - low) / (high - low)
    return (1 - share) * known[low] + share * known[high]
