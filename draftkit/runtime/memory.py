"""What a run takes of memory, known before any of it is allocated. S slots, C positions each, K draft tokens."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import psutil
import torch

from draftkit.errors import DraftkitError
from draftkit.models.target import Target
from draftkit.runtime.drafters.protocol import Drafter

GIB = 1 << 30
FLOAT32 = 4


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by what they are for: `fixed` whatever the number of slots, `per_slot` for each of `num_slots`.

    A slot has `capacity` positions. `available` bytes are free on the device. Activations and the kernels' workspaces
    are not in it.
    """

    fixed: dict[str, int]
    per_slot: dict[str, int]
    num_slots: int
    capacity: int
    available: int

    @property
    def total(self) -> int:
        return sum(self.fixed.values()) + self.num_slots * sum(self.per_slot.values())

    @property
    def largest_batch(self) -> int:
        """The most slots that fit."""
        return max((self.available - sum(self.fixed.values())) // max(sum(self.per_slot.values()), 1), 0)

    def to_dict(self) -> dict[str, object]:
        """As `eval --plan-memory --json` prints it."""
        totals = {"total": self.total, "largest_batch": self.largest_batch}
        return asdict(self) | totals

    def require(self) -> None:
        """Raise `DraftkitError` where the plan does not fit, with the largest number of slots that would."""
        if self.total > self.available:
            most = self.largest_batch
            raise DraftkitError(
                f"{self.num_slots} sequences need {self.total / GIB:.2f} GiB of memory, "
                f"{self.available / GIB:.2f} GiB are free",
                hint=f"decode at most {most} together (--concurrency {most})" if most else "use shorter sequences",
            )


def slot_bytes(
    *,
    target_position: int,
    draft_position: int,
    feature_size: int,
    vocab_size: int,
    itemsize: int,
    capacity: int,
    k: int,
) -> dict[str, int]:
    """The bytes of one slot by what they are for.

    `target_position`, `draft_position`: what a cached position takes. `itemsize`: of the target's dtype. Logits are
    kept as the target gives them and once in float32, beside the draft's probabilities.
    """
    rows = k + 1
    return {
        "target cache": capacity * target_position,
        "draft cache": capacity * draft_position,
        "hidden states": rows * feature_size * itemsize,
        "logits": rows * vocab_size * (itemsize + FLOAT32),
        "draft probabilities": k * vocab_size * FLOAT32,
    }


def require_memory(target: Target, drafter: Drafter | None, *, num_slots: int, capacity: int, k: int) -> None:
    """Raise `DraftkitError` where the state of so many slots does not fit beside the weights, which are loaded."""
    per_slot = slot_bytes(
        target_position=target.position_bytes,
        draft_position=0 if drafter is None else drafter.position_bytes,
        feature_size=target.feature_size,
        vocab_size=target.vocab_size,
        itemsize=target.dtype.itemsize,
        capacity=capacity,
        k=k,
    )
    MemoryPlan({}, per_slot, num_slots, capacity, available_memory(target.device)).require()


def available_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return psutil.virtual_memory().available
