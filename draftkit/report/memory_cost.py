"""What a draft costs: its weights and its cache take memory from the sequences that could be decoded together.

All sizes are bytes. KV: the keys and values that are cached for each position of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftkit.results.cell import Cell
from draftkit.runtime.memory_plan import MemoryPlan


@dataclass(frozen=True)
class MemoryCost:
    """The memory that one draft takes beside its target on one device with `available` bytes.

    `target_kv` and `draft_kv`: for a sequence of `capacity` positions. `plain_states`: of recurrent modules, for each
    sequence without the draft.
    `plain_slot` and `slot`: all that a sequence takes without the draft, and with it.
    """

    target_weights: int
    draft_weights: int
    target_kv: int
    draft_kv: int
    plain_slot: int
    slot: int
    available: int
    capacity: int
    plain_states: int = 0

    @property
    def plain_batch(self) -> int:
        """Sequences that fit without the draft."""
        return _fitting(self.available - self.target_weights, self.plain_slot)

    @property
    def batch(self) -> int:
        """Sequences that fit with it."""
        return _fitting(self.available - self.target_weights - self.draft_weights, self.slot)

    @property
    def lost_share(self) -> float | None:
        """The share of the sequences that no longer fit beside the draft; None where none fits without it."""
        return 1 - self.batch / self.plain_batch if self.plain_batch else None


def memory_cost(cell: Cell) -> MemoryCost | None:
    """The costs by a cell's memory plan; None where it has none, or one that does not name the target's parts."""
    plan = cell.memory
    if plan is None or "target weights" not in plan.fixed or "target cache" not in plan.per_slot:
        return None
    return cost_of(plan, cell.draft, cell.num_speculative_tokens)


def cost_of(plan: MemoryPlan, draft: str, k: int) -> MemoryCost:
    """What `draft` costs by a plan for rounds of `k` draft tokens.

    Without a draft, a sequence takes the target's KV, and states and logits of one position instead of K + 1.
    """
    target_kv = plan.per_slot["target cache"]
    plain_states = plan.per_slot.get("target states", 0) // (k + 1)
    return MemoryCost(
        target_weights=plan.fixed["target weights"],
        draft_weights=plan.fixed.get(f"weights of {draft}", 0),
        target_kv=target_kv,
        draft_kv=plan.per_slot.get("draft cache", 0),
        plain_slot=target_kv + plain_states + plan.per_slot.get("logits", 0) // (k + 1),
        slot=sum(plan.per_slot.values()),
        available=plan.available,
        capacity=plan.capacity,
        plain_states=plain_states,
    )


def _fitting(free: int, each: int) -> int:
    return max(free // each, 0) if each > 0 else 0
