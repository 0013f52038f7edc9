"""An adaptation as a terminal table."""

from __future__ import annotations

from rich.table import Table

from draftkit.results.metrics import length
from draftkit.train.adapt import Adaptation


def adaptation_table(adapted: Adaptation, k: int) -> Table:
    """One row for each slice of the answers held out."""
    table = Table(
        "slice", "answers", "before", "against general", "after", "gained",
        title=f"acceptance length at K={k} on held-out answers, trained on {adapted.answers:,}",
        caption="lost: before, less was accepted than of general text, beyond chance",
    )  # fmt: skip
    for found in adapted.slices:
        behind = "" if found.behind is None else length(found.behind, signed=True) + (" lost" if found.lost else "")
        table.add_row(
            found.name,
            f"{found.samples:,}",
            length(found.before),
            behind,
            length(found.after),
            length(found.gained, signed=True),
        )
    return table
