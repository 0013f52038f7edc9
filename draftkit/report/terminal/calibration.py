"""What drafts said of their chances, on a terminal: the answer, then where it comes from."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from draftkit.evaluate.calibrate import Calibration
from draftkit.report.calibration import advice, signed
from draftkit.results.calibration import SaidAgainstStood, SaidAndSurvived

POSITIONS = (
    "the chance that so many drafts stand, of all rounds; error: calibration error, in brackets that of a draft whose "
    "word is true, on as many rounds; where reached: said − survived of the rounds in which those before it stood; "
    "intervals: 95 % over prompts"
)


def show_calibration(console: Console, one: Calibration) -> None:
    """The verdict, what to do about it, and the figures behind."""
    console.print(one.sentence, style="bold")
    for line in advice(one):
        console.print(f"  {line}")
    console.print(_positions(one.whole))
    if one.slices:
        console.print(_slices(one))


def _positions(judged: SaidAgainstStood) -> Table:
    table = _table(f"{judged.rounds:,} rounds of {judged.prompts} prompts", POSITIONS)
    for heading in ("draft", "said", "survived", "said − survived", "error", "where reached"):
        table.add_column(heading, justify="right")
    for number, (all_rounds, reached) in enumerate(zip(judged.cumulative, judged.conditional, strict=True), start=1):
        table.add_row(str(number), *_figures(all_rounds), f"{reached.gap.mean:+.3f} of {reached.rounds:,}")
    return table


def _figures(found: SaidAndSurvived) -> list[str]:
    error = f"{found.error:.3f} ({found.error_if_true:.3f})"
    return [f"{found.said:.3f}", f"{found.survived:.3f}", signed(found.gap, 3), error]


def _table(title: str, caption: str | None) -> Table:
    """One that fits 80 columns."""
    return Table(title=title, caption=caption, box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))


def _slices(one: Calibration) -> Table:
    table = _table("Tokens a round, by slice", None)
    table.add_column("slice")
    for heading in ("prompts", "said", "measured", "said − measured"):
        table.add_column(heading, justify="right")
    for name, judged in one.slices.items():
        lengths = f"{judged.said_length:.2f}", f"{judged.length:.2f}"
        table.add_row(name, str(judged.prompts), *lengths, signed(judged.gap, 2))
    return table
