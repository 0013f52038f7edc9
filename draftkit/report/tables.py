"""Measurements as terminal tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from draftkit.runtime.memory import MemoryPlan

GIB = 1 << 30

COLUMNS = (
    "draft", "K", "prompts", "acceptance length", "expected", "accepted at 1…K", "tokens/s", "plain",
    "TTFT / TPOT / ITL ms", "output",
)  # fmt: skip


def evaluation_table(result: Mapping[str, Any]) -> Table:
    """One row per cell of an `eval` result."""
    cells = result["cells"]
    first = cells[0]
    table = Table(
        title=f"{first['target']} · T={first['temperature']:g} · up to {first['max_new_tokens']} tokens · "
        f"concurrency {first['concurrency']} · {result['provenance']['dtype']} on {result['provenance']['device']}",
        caption="acceptance length = 1 + accepted draft tokens / rounds, [95 % interval over prompts]; expected: from "
        "the probabilities of the same forwards; at each position: accepted / rounds; times are medians",
    )
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("draft", "accepted at 1…K", "output") else "right")
    for cell in cells:
        table.add_row(
            f"{cell['draft']} ({cell['method']})",
            str(cell["num_speculative_tokens"]),
            str(cell["num_prompts"]),
            "{mean:.2f} [{low:.2f}, {high:.2f}]".format(**cell["acceptance_length"]),
            "{mean:.2f}".format(**cell["expected_acceptance_length"]),
            " ".join(f"{n / max(cell['num_drafts'], 1):.2f}" for n in cell["num_accepted_tokens_per_pos"]),
            f"{cell['tokens_per_second']:.1f} ({cell['tokens_per_second'] / cell['baseline_tokens_per_second']:.2f}×)",
            f"{cell['baseline_tokens_per_second']:.1f}",
            " / ".join(_milliseconds(cell[name]) for name in ("ttft_ms", "tpot_ms", "itl_ms")),
            _equality(cell),
        )
    return table


def _milliseconds(times: Mapping[str, float] | None) -> str:
    return "–" if times is None else f"{times['p50']:.1f}"


def _equality(cell: Mapping[str, Any]) -> str:
    if cell["num_matching_prompts"] is None:
        return f"{cell['verification']}, drafts {cell['draft_sampling']}"
    plain = "greedy" if cell["matches_greedy"] is not None else "plain"
    if cell["num_matching_prompts"] == cell["num_prompts"]:
        return f"= {plain}"
    return f"{cell['num_matching_prompts']} of {cell['num_prompts']} = {plain}"


def memory_table(draft: str, plan: MemoryPlan) -> Table:
    """What a run takes of memory, part by part."""
    table = Table("memory", "GiB", title=f"{draft}: {plan.num_slots} sequences together", title_justify="left")
    table.columns[1].justify = "right"
    for name, size in plan.fixed.items():
        table.add_row(name, f"{size / GIB:.3f}")
    for name, size in plan.per_slot.items():
        table.add_row(name, f"{size * plan.num_slots / GIB:.3f}")
    table.add_section()
    table.add_row("all", f"{plan.total / GIB:.3f}")
    table.add_row("free", f"{plan.available / GIB:.3f}")
    table.add_row("largest batch that fits", str(plan.largest_batch))
    return table
