"""A result as a notebook shows it: the verdict, a row for each cell, and warnings."""

from __future__ import annotations

from html import escape

from draftkit.io.html import said_html, table_html
from draftkit.results.metrics import metrics_of
from draftkit.results.record import Result
from draftkit.results.verdict import verdicts_of


def result_html(result: Result) -> str:
    """HTML that needs no style sheet."""
    shown = metrics_of("notebook", result.cells)
    rows = ((cell.draft_in_engine, *(metric.text(cell) for metric in shown)) for cell in result.cells)
    said = "".join(said_html(verdict.sentence) for verdict in verdicts_of(result))
    warned = "".join(f"<li>{escape(warning.message)}</li>" for warning in result.warnings)
    return f"{said}{table_html(('draft', *(metric.title for metric in shown)), rows)}<ul>{warned}</ul>"
