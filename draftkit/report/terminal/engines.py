"""The same draft in draftkit's engine and in another, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from draftkit.report.format import speed
from draftkit.report.terminal.screen import named_table
from draftkit.results.cell import OWN_ENGINE, Cell
from draftkit.results.metrics import length

if TYPE_CHECKING:
    from draftkit.evaluate.certificate import Certificate, TokenDifference


def engines_table(cells: Sequence[Cell]) -> Table:
    """Draftkit's figures beside another engine's for each draft and setting; – where an engine was not run."""
    others = ", ".join(dict.fromkeys(cell.engine for cell in cells if cell.other_engine))
    table = named_table(
        "draft", "", OWN_ENGINE, others, "greedy counts",
        title=f"{OWN_ENGINE} and {others}", caption="counts: equal when drafts, draft tokens and accepted tokens at "
        "each position are; above temperature 0 the engines draw other random numbers",
    )  # fmt: skip
    for ours, theirs in engine_pairs(cells):
        either = ours or theirs
        assert either is not None
        settings = f"K={either.num_speculative_tokens} · T={either.temperature:g}"
        names = (either.draft, settings, f"concurrency {either.concurrency}", "")
        for name, (label, show) in zip(names, _FIGURES.items(), strict=True):
            figures = ("–" if cell is None else show(cell) for cell in (ours, theirs))
            table.add_row(name, label, *figures, _agreement(ours, theirs) if name == either.draft else "")
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
    "length of drafts": _length,
    "tokens/s": speed,
}


STYLES = {"no difference seen": "bold green", "numerics only": "bold yellow", "bug": "bold red"}


def certificate(result: Certificate) -> Group:
    """A certificate in a few lines: the verdict, each difference, what would have been seen, and how it was asked."""
    style = STYLES.get(result.verdict, "bold yellow")
    head = Text(f"Losslessness of {result.draft} on {result.target} in {result.engine}: ").append(result.verdict, style)
    steps = Table.grid(padding=(0, 2))
    same = result.requests - len(result.divergences)
    steps.add_row("temperature 0", f"{same} of {result.requests} = without the draft ({result.tokens:,} tokens)")
    if result.floor is not None:
        moved = "what rounding can do at most"
        if result.moved is not None:
            moved = f"log-probabilities move by {result.moved:.2g}"
        steps.add_row("near-tie", f"up to {result.floor:.2g} nats; {moved}")
    for divergence in result.divergences:
        steps.add_row(f"request {divergence.request}, position {divergence.position}", _difference(divergence))
    if (beside := result.reference) is not None:
        same = beside.requests - len(beside.divergences)
        steps.add_row("without a draft", f"{same} of {beside.requests} = {beside.name}")
        for divergence in beside.divergences:
            steps.add_row(f"request {divergence.request}, position {divergence.position}", _difference(divergence))
    seen = f"  it would have seen, with 95 %: {result.detectable_rate:.2%} of the tokens wrong; not smaller defects"
    failures = [Text(f"  fails: {failure}", "red") for failure in result.failures]
    how = f"{result.engine} {result.version or ''}".rstrip()
    return Group(head, *failures, Text(seen), steps, Text(f"{how}; concurrency {result.concurrency}"))


def _difference(divergence: TokenDifference) -> str:
    """Two tokens and what they were worth."""
    mine, other = ("the end" if token is None else repr(token) for token in divergence.tokens)
    if divergence.logprobs is None:
        return f"{mine} instead of {other}"
    one, beside = divergence.logprobs
    return f"{mine} ({one:.4f}) instead of {other} ({beside:.4f}): {_number(divergence.margin)} nats apart"


def _number(value: float | None) -> str:
    return "∞" if value is None or value == inf else f"{value:.2g}"
