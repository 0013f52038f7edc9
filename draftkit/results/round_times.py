"""What rounds take, by batch and number of drafts, as `eval --advise` times them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from draftkit.results.record import RoundTime, SpeedModel


@dataclass(frozen=True)
class RoundTimes:
    """Milliseconds of a round by (batch, K); K = 0 is plain decoding. Between the K that were measured, a line.

    `verified`: by (batch, drafts that the target is given) of rounds that draft `drafted`; empty where a draft does not
    estimate its chances, by which drafts are left out.
    """

    ms: Mapping[tuple[int, int], float]
    verified: Mapping[tuple[int, int], float] = field(default_factory=dict)
    drafted: int | None = None

    @classmethod
    def of_model(cls, model: SpeedModel) -> RoundTimes:
        """Those of a result."""
        whole = {(t.concurrency, t.num_speculative_tokens): t.ms for t in model.rounds_ms}
        cut = {(t.concurrency, t.num_verified): t.ms for t in model.verified_ms or () if t.num_verified is not None}
        drafted = {t.num_speculative_tokens for t in model.verified_ms or ()}
        return cls(whole, cut, max(drafted, default=None))

    def to_records(self) -> tuple[tuple[RoundTime, ...], tuple[RoundTime, ...] | None]:
        """`ms`, and `verified`, as a result has them."""
        whole = tuple(RoundTime(batch, k, ms) for (batch, k), ms in sorted(self.ms.items()))
        if self.drafted is None:
            return whole, None
        cut = sorted(self.verified.items())
        return whole, tuple(RoundTime(batch, self.drafted, ms, verified) for (batch, verified), ms in cut)

    @property
    def batches(self) -> list[int]:
        return sorted({batch for batch, _ in self.ms})

    @property
    def largest_k(self) -> int:
        return max(k for _, k in self.ms)

    def of(self, batch: int, k: float) -> float:
        """A round that drafts K, and verifies them."""
        return _between({other: ms for (at, other), ms in self.ms.items() if at == batch}, k)

    def of_verified(self, batch: int, drafted: int, verified: float) -> float:
        """A round that drafts K of which the target is given so many, in the mean of the batch; where that was not
        timed, as one that drafts no more."""
        known = {other: ms for (at, other), ms in self.verified.items() if at == batch}
        if self.drafted != drafted or not known:
            return self.of(batch, verified)
        return _between(known, verified)


def _between(known: Mapping[int, float], k: float) -> float:
    """At K, on the line between its neighbors; beyond the last, that of the last."""
    ks = sorted(known)
    right = min(bisect_left(ks, k), len(ks) - 1)
    if ks[right] <= k or right == 0:
        return known[ks[right]]
    low, high = ks[right - 1], ks[right]
    share = (k - low) / (high - low)
    return (1 - share) * known[low] + share * known[high]
