"""Measurements as terminal tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table


def evaluation_table(result: Mapping[str, Any]) -> Table:
    """One row per cell of an `eval` result."""
    cells = result["cells"]
    first = cells[0]
    table = Table(
        title=f"{first['target']} · T={first['temperature']:g} · up to {first['max_new_tokens']} tokens · "
        f"concurrency {first['concurrency']} · {result['provenance']['dtype']} on {result['provenance']['device']}",
        caption="acceptance length = 1 + accepted draft tokens / rounds, [95 % interval over prompts]; "
        "at each position: accepted / rounds",
    )
    for name in ("draft", "K", "prompts", "acceptance length", "accepted at 1…K", "tokens/s", "plain", "output"):
        table.add_column(name, justify="left" if name in ("draft", "accepted at 1…K", "output") else "right")
    for cell in cells:
        table.add_row(
            f"{cell['draft']} ({cell['method']})",
            str(cell["num_speculative_tokens"]),
            str(cell["num_prompts"]),
            "{mean:.2f} [{low:.2f}, {high:.2f}]".format(**cell["acceptance_length"]),
            " ".join(f"{n / max(cell['num_drafts'], 1):.2f}" for n in cell["num_accepted_tokens_per_pos"]),
            f"{cell['tokens_per_second']:.1f} ({cell['tokens_per_second'] / cell['baseline_tokens_per_second']:.2f}×)",
            f"{cell['baseline_tokens_per_second']:.1f}",
            _equality(cell),
        )
    return table


def _equality(cell: Mapping[str, Any]) -> str:
    if cell["matches_greedy"]:
        return "= greedy"
    return f"{cell['num_matching_prompts']} of {cell['num_prompts']} = greedy"
