"""The same draft in draftkit's engine and in another, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from draftkit.report.format import speed
from draftkit.results.cell import OWN_ENGINE, Cell
from draftkit.results.metrics import length


def engines_table(cells: Sequence[Cell]) -> Table:
    """Draftkit's figures beside another engine's for each draft and setting; – where an engine was not run."""
    others = ", ".join(dict.fromkeys(cell.engine for cell in cells if cell.other_engine))
    table = Table(
        "draft", "", OWN_ENGINE, others, "greedy counts",
        title=f"{OWN_ENGINE} and {others}", caption="counts: equal when drafts, draft tokens and accepted tokens at "
        "each position are; above temperature 0 the engines draw other random numbers",
    )  # fmt: skip
    for ours, theirs in engine_pairs(cells):
        either = ours or theirs
        assert either is not None
        name = f"{either.draft} · K={either.num_speculative_tokens} · T={either.temperature:g}"
        name += f" · concurrency {either.concurrency}"
        for label, show in _FIGURES.items():
            figures = ("–" if cell is None else show(cell) for cell in (ours, theirs))
            table.add_row(name, label, *figures, _agreement(ours, theirs) if name else "")
            name = ""
        table.add_section()
    return table


def engine_pairs(cells: Sequence[Cell]) -> Iterator[tuple[Cell | None, Cell | None]]:
    """Draftkit's cell of each setting and that of each other engine, in the order of the cells."""
    by_setting: dict[tuple[object, ...], dict[str | None, Cell]] = {}
    for cell in cells:
        by_setting.setdefault(cell.pair, {})[cell.other_engine] = cell
    for engines in by_setting.values():
        ours = engines.pop(None, None)
        yield from ((ours, theirs) for theirs in engines.values() or (None,))


def counts_agree(ours: Cell, theirs: Cell) -> bool | None:
    """Whether both engines drafted and accepted the same; None above temperature 0, where they need not."""
    return None if ours.temperature else _counts(ours) == _counts(theirs)


def _agreement(ours: Cell | None, theirs: Cell | None) -> str:
    agree = None if ours is None or theirs is None else counts_agree(ours, theirs)
    return {True: "equal", False: "differ", None: "–"}[agree]


def _counts(cell: Cell) -> tuple[object, ...]:
    return cell.num_drafts, cell.num_draft_tokens, cell.num_accepted_tokens_per_pos


def _length(cell: Cell) -> str:
    return length(cell.drafted_acceptance_length or cell.acceptance_length, digits=3)


_FIGURES = {
    "drafts": lambda cell: str(cell.num_drafts),
    "accepted at 1…K": lambda cell: " ".join(map(str, cell.num_accepted_tokens_per_pos or ())),
    "acceptance length of drafts": _length,
    "tokens/s": speed,
}
