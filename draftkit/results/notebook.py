"""A result as a notebook shows it: the verdict, a row for each cell, and warnings."""

from __future__ import annotations

from html import escape
from math import isfinite

from draftkit.io.html import said_html, table_html
from draftkit.results.record import Cell, Interval, Result
from draftkit.results.verdict import verdicts_of

HEAD = ("draft", "K", "T", "batch", "prompts", "acceptance length", "of drafts", "speed-up")


def result_html(result: Result) -> str:
    """HTML that needs no style sheet."""
    said = "".join(said_html(verdict.sentence) for verdict in verdicts_of(result))
    warned = "".join(f"<li>{escape(warning.message)}</li>" for warning in result.warnings)
    return f"{said}{table_html(HEAD, map(_row, result.cells))}<ul>{warned}</ul>"


def interval_text(interval: Interval | None) -> str:
    """A mean with its interval, as far as there is one."""
    if interval is None or not isfinite(interval.mean):
        return "–"
    bounds = "" if interval.bounds is None else " [{:.2f}, {:.2f}]".format(*interval.bounds)
    return f"{interval.mean:.2f}{bounds}"


def _row(cell: Cell) -> tuple[str, ...]:
    drafted = cell.drafted_acceptance_length or cell.acceptance_length
    speedup = cell.times_faster
    return (
        cell.draft if cell.engine == "draftkit" else f"{cell.draft} in {cell.engine}",
        str(cell.num_speculative_tokens),
        f"{cell.temperature:g}",
        str(cell.concurrency),
        "–" if cell.num_prompts is None else str(cell.num_prompts),
        interval_text(cell.acceptance_length),
        "–" if drafted is None else f"{drafted.mean:.2f}",
        interval_text(cell.speedup_interval or (None if speedup is None else Interval(speedup, None, None))),
    )
