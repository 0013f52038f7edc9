"""Cells that belong together: those of one draft at one setting, whatever the number of draft tokens and the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from draftkit.results.cell import Cell
from draftkit.results.record import Result, SpeedModel
from draftkit.results.verdict import well_known


@dataclass(frozen=True)
class Series:
    """What one color of the figures stands for: its name says what tells it from the others."""

    name: str
    number: int
    cells: tuple[Cell, ...]
    model: SpeedModel | None = None

    @property
    def main(self) -> Cell:
        """The cell of figures that show one setting: the smallest batch, and of its cells the most draft tokens."""
        return min(self.cells, key=lambda cell: (cell.concurrency, -cell.num_speculative_tokens))

    @property
    def fastest(self) -> Cell | None:
        """The cell with the highest speed against plain decoding that its run has no doubt of."""
        timed = [cell for cell in self.cells if cell.times_faster and well_known(cell)]
        return max(timed, key=lambda cell: cell.times_faster or 0, default=None)


def join(results: Sequence[Result]) -> list[Series]:
    """The series of all results, in the order of their first cells.

    Cells of several files are one series where everything but K and the batch is the same, unless two of them were
    measured at the same K and batch; then the file is part of what tells series apart.
    """
    places = [(result, cell) for result in results for cell in result.cells]
    repeated = Counter((tuple(_facts(*place)), _setting(place[1])) for place in places).most_common(1)[0][1] > 1
    groups: dict[tuple[str, ...], list[tuple[Result, Cell]]] = {}
    for result, cell in places:
        file = (result.path,) if repeated and len(results) > 1 else ()
        groups.setdefault((*_facts(result, cell), *file), []).append((result, cell))
    names = _names(list(groups))
    modelled: set[int] = set()
    series = []
    for number, (facts, members) in enumerate(groups.items()):
        model = _model(members, modelled)
        series.append(Series(names[facts], number, tuple(cell for _, cell in members), model))
    return series


def _setting(cell: Cell) -> tuple[int, int]:
    return cell.num_speculative_tokens, cell.concurrency


def _facts(result: Result, cell: Cell) -> list[str]:
    """What tells measurements apart, beside K and the batch; the draft first."""
    hardware = result.provenance.get("hardware") or result.provenance.get("device") or ""
    tokens = "" if cell.max_new_tokens is None else f"{cell.max_new_tokens} tokens"
    return [
        cell.draft,
        cell.target,
        cell.other_engine or "",
        cell.dataset or "",
        f"T={cell.temperature:g}",
        "" if cell.context is None else f"context {cell.context}",
        cell.tree_name or "",
        f"drafts {cell.draft_sampling}" if cell.draft_sampling else "",
        "" if cell.min_confidence is None else f"draft_confidence {cell.min_confidence:g}",
        cell.verification or "",
        tokens,
        str(hardware),
        str(result.provenance.get("dtype") or ""),
    ]


def _names(groups: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    """The draft of each group, and those facts that tell it from others which have all the facts before in common."""
    kept = [0]
    for i in range(1, len(groups[0])):
        if _distinct(groups, [*kept, i]) > _distinct(groups, kept):
            kept.append(i)
    return {group: ", ".join(group[i] for i in kept if group[i]) for group in groups}


def _distinct(groups: Sequence[tuple[str, ...]], facts: Sequence[int]) -> int:
    return len({tuple(group[i] for i in facts) for group in groups})


def _model(members: Iterable[tuple[Result, Cell]], taken: set[int]) -> SpeedModel | None:
    """The speed model of a series' draft at its temperature. Each model goes to the first series that it fits."""
    for result, cell in members:
        for model in result.speed_models:
            fits = model.draft == cell.draft and model.temperature in (None, cell.temperature)
            fits = fits and model.context == cell.context
            if fits and id(model) not in taken:
                taken.add(id(model))
                return model
    return None
