"""How acceptance falls with the context: the same questions behind more and less text, prompt by prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from draftkit.finding import Finding
from draftkit.results.cell import Cell
from draftkit.results.metrics import length
from draftkit.results.statistics import Sums, gain


def with_shifts(cells: Sequence[Cell]) -> list[Cell]:
    """The cells, those of longer contexts with the shift of their acceptance length against the shortest."""
    found = list(cells)
    for places in _sweeps(cells).values():
        shortest = min(places, key=lambda at: cells[at].context or 0)
        for at in places:
            before, after = _paired(cells[shortest], cells[at])
            if at != shortest and before:
                found[at] = replace(cells[at], over_context=gain(before, after, len(places) - 1))
    return found


def falls(cells: Sequence[Cell]) -> Iterator[Finding]:
    """A finding for each draft whose acceptance falls with the context by more than chance."""
    for places in _sweeps(cells).values():
        falling = [cell for at in places if (cell := cells[at]).over_context is not None and cell.over_context.below(0)]
        if falling:
            worst = max(falling, key=lambda cell: cell.context or 0)
            contexts = ",".join(str(cells[at].context) for at in places if cells[at].context)
            yield Finding(
                "falls-with-context",
                "note",
                f"{worst.draft}, K={worst.num_speculative_tokens}: at context {worst.context:,} the acceptance length "
                f"is {length(worst.over_context, signed=True)} against the shortest; draftkit doctor --context "
                f"{contexts} tries what brings it back without training",
            )


def _sweeps(cells: Sequence[Cell]) -> dict[tuple[object, ...], list[int]]:
    """The places of cells that are alike but for their context, where there are several."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for at, cell in enumerate(cells):
        alike = cell.draft, cell.engine, cell.num_speculative_tokens, cell.tree, cell.temperature, cell.concurrency
        groups.setdefault((*alike, cell.min_confidence), []).append(at)
    return {alike: places for alike, places in groups.items() if len({cells[at].context for at in places}) > 1}


def _paired(one: Cell, other: Cell) -> tuple[Sums, Sums]:
    """The sums of the prompts that both cells counted one by one, in the same order."""
    mine = {record.id: (record.accepted, record.rounds) for record in one.by_prompt or () if record.rounds}
    theirs = {record.id: (record.accepted, record.rounds) for record in other.by_prompt or () if record.rounds}
    both = [id for id in mine if id in theirs]
    return [mine[id] for id in both], [theirs[id] for id in both]
