"""Training plans as terminal tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from draftkit.data.vocabulary import Ceiling


def vocabulary_table(ceilings: Sequence[Ceiling], k: int) -> Table:
    """What draft vocabularies of several sizes allow."""
    table = Table("draft vocabulary", "of the tokens in the loss mask", f"acceptance length at most, K={k}")
    for column in table.columns:
        column.justify = "right"
    for ceiling in ceilings:
        table.add_row(f"{ceiling.size:,}", f"{100 * ceiling.coverage:.2f} %", f"{ceiling.acceptance_length:.2f}")
    return table
