"""What a draft costs: its weights and its cache take memory from the sequences that could be decoded together.

All sizes are bytes. KV: the keys and values that are cached for each position of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftkit.results.cell import Cell
from draftkit.runtime.memory_plan import MemoryPlan

RANKS = (2, 4, 8)


@dataclass(frozen=True)
class MemoryCost:
    """The memory that one draft takes beside its target on one device with `available` bytes.

    `target_kv` and `draft_kv`: for a sequence of `capacity` positions. `target_states`, `draft_states`: of recurrent
    modules, for each sequence; `plain_states`: the target's without the draft.
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
    target_states: int = 0
    draft_states: int = 0
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


@dataclass(frozen=True)
class RankCost:
    """Sequences that fit on `ranks` devices: without a draft, with it split over all ranks, with all of it on one.

    `lost_kv`: the target's KV that each of the other ranks loses in the last case.
    """

    ranks: int
    plain: int
    split: int
    on_one: int
    lost_kv: int


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
    target_states = plan.per_slot.get("target states", 0)
    plain_states = target_states // (k + 1)
    return MemoryCost(
        target_weights=plan.fixed["target weights"],
        draft_weights=plan.fixed.get(f"weights of {draft}", 0),
        target_kv=target_kv,
        draft_kv=plan.per_slot.get("draft cache", 0),
        plain_slot=target_kv + plain_states + plan.per_slot.get("logits", 0) // (k + 1),
        slot=sum(plan.per_slot.values()),
        available=plan.available,
        capacity=plan.capacity,
        target_states=target_states,
        draft_states=plan.per_slot.get("draft states", 0),
        plain_states=plain_states,
    )


def tensor_parallel(cost: MemoryCost, ranks: int) -> RankCost:
    """The cost under tensor parallelism, where every rank is a device like the measured one.

    With R ranks of M bytes, weights of W (target) and D (draft) bytes, KV and states of t and d bytes a sequence, each
    split evenly by heads, a rank holds

        no draft          (M − W/R) / (t/R)            sequences
        split draft       (M − W/R − D/R) / (t/R + d/R)
        draft on one rank (M − W/R − D) / (t/R + d)    on that rank.

    An engine gives every rank the same number of KV blocks, the least that any rank can hold. So the other ranks of
    the last case lose the same sequences, although the draft takes none of their memory: what they lose stays unused.
    Logits, activations and workspaces are left out. Heads that do not divide by R are repeated, which costs more.
    """
    free = cost.available - cost.target_weights / ranks
    target, draft = cost.target_kv + cost.target_states, cost.draft_kv + cost.draft_states
    plain = _fitting(free, (cost.target_kv + cost.plain_states) / ranks)
    split = _fitting(free - cost.draft_weights / ranks, (target + draft) / ranks)
    on_one = _fitting(free - cost.draft_weights, target / ranks + draft)
    return RankCost(ranks, plain, split, on_one, lost_kv=(plain - on_one) * cost.target_kv // ranks)


def _fitting(free: float, each: float) -> int:
    return max(int(free // each), 0) if each > 0 else 0
