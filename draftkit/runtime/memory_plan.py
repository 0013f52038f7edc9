"""What a run takes of memory, told from sizes. S slots, C positions each, K draft tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from draftkit.errors import DraftkitError

GIB = 1 << 30
FLOAT32 = 4


SlotBytes = Callable[[int, int], int]  # what a model keeps of a slot, by its positions and the draft tokens of a round


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by what they are for: `fixed` whatever the number of slots, `per_slot` for each of `num_slots`.

    A slot has `capacity` positions. `available` bytes are free on the device. `place`: which one it is, of several that
    a target is spread over, the one with room for the fewest slots.
    """

    fixed: dict[str, int]
    per_slot: dict[str, int]
    num_slots: int
    capacity: int
    available: int
    place: str | None = None

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ValueError(f"capacity is {self.capacity}, and is at least 1")

    @property
    def total(self) -> int:
        return self.of(self.num_slots)

    def of(self, slots: int) -> int:
        """The bytes of as many slots."""
        return sum(self.fixed.values()) + slots * sum(self.per_slot.values())

    def holds_twice(self, *parts: str) -> bool:
        """Whether there is room for these parts of all slots once more, as for another engine on the same weights."""
        return self.total + self.num_slots * sum(self.per_slot.get(part, 0) for part in parts) <= self.available

    @property
    def largest_batch(self) -> int:
        """The most slots that fit."""
        return max((self.available - sum(self.fixed.values())) // max(sum(self.per_slot.values()), 1), 0)

    def to_dict(self) -> dict[str, object]:
        """The plan as results and `draftkit eval --dry-run --json` have it."""
        totals = {"total": self.total, "largest_batch": self.largest_batch}
        told = asdict(self) | totals
        return {name: value for name, value in told.items() if value is not None}

    def require(self) -> None:
        """Raise `DraftkitError` where the plan does not fit, with the largest number of slots that would."""
        if self.total > self.available:
            most = self.largest_batch
            raise DraftkitError(
                f"{self.num_slots} sequences need {self.total / GIB:.2f} GiB of memory"
                f"{f' on {self.place}' if self.place else ''}, {self.available / GIB:.2f} GiB are free",
                hint=f"decode at most {most} together (--concurrency {most})" if most else "use shorter sequences",
            )


def slot_bytes(
    *,
    target: SlotBytes,
    draft: SlotBytes,
    feature_size: int,
    vocab_size: int,
    itemsize: int,
    capacity: int,
    k: int,
    row: int = 0,
    state: int = 0,
    partials: int = 0,
) -> dict[str, int]:
    """The bytes of one slot by what they are for; `row`: the activations of a row of a round, `state`: the largest
    state of a recurrent module, which is loaded, changed and kept, `partials`: the partial results of attention.

    `itemsize`: of the target's dtype. Logits are kept as the target gives them and once in float32, beside the draft's
    probabilities. States of recurrent modules are what is kept of a sequence without positions.
    """
    rows = k + 1
    states = {"target states": target(0, k), "draft states": draft(0, k)}
    parts = {
        "target cache": target(capacity, k) - states["target states"],
        "draft cache": draft(capacity, k) - states["draft states"],
        **{name: size for name, size in states.items() if size},
        "hidden states": rows * feature_size * itemsize,
        "logits": rows * vocab_size * (itemsize + FLOAT32),
        "draft probabilities": k * vocab_size * FLOAT32,
    }
    beside = {"activations of a round": rows * row + 3 * state, "attention partials": partials}
    return parts | {name: size for name, size in beside.items() if size}
