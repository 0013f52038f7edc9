"""Cells of a result as comma-separated values: one row for each, the same columns whatever was measured."""

from __future__ import annotations

import csv
import io
import math

from draftkit.hub.local_paths import names_of_paths
from draftkit.results.cell import Interval, Times
from draftkit.results.metrics import kind_at, metrics_of, value_at
from draftkit.results.record import Result

# The columns of a metric that is a record: what comes after its name, and where in the record the value lies.
PARTS: dict[type, dict[str, str]] = {
    Interval: {"": ".mean", "_low": ".low", "_high": ".high"},
    Times: {"_mean": ".mean", "_p50": ".p50", "_p99": ".p99"},
}
PROVENANCE = ("date", "hardware", "device", "dtype", "draftkit", "torch", "transformers")
# Text that begins so is a formula to spreadsheets; after an apostrophe it is text.
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def cells_csv(result: Result) -> str:
    """A header and one row for each cell of a result.

    A value that the cell lacks, or that is NaN or infinite, is empty. Text that a spreadsheet would run begins with an
    apostrophe. Numbers for each position stand in one column, separated by spaces. Target, draft and prompts have names
    instead of paths.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    places = columns()
    writer.writerow([*places, *PROVENANCE])
    provenance = [_plain(result.provenance.get(name)) for name in PROVENANCE]
    names = names_of_paths([[cell.target, cell.draft, cell.dataset] for cell in result.cells])
    for cell in result.cells:
        found = [_plain(value_at(cell, path)) for path in places.values()]
        writer.writerow([names.get(str(value), value) for value in found] + provenance)
    return text.getvalue()


def columns() -> dict[str, str]:
    """Column by column of a cell, where its value lies."""
    return {
        metric.name + ending: metric.path + part
        for metric in metrics_of("csv", ())
        for ending, part in PARTS.get(kind_at(metric.path), {"": ""}).items()
    }


def _plain(value: object) -> object:
    """What the writer turns into text: nothing for what is no number, a list as its items with spaces between, truth
    values as in JSON, and no text that a spreadsheet would run."""
    match value:
        case list() | tuple():
            return " ".join("" if item is None else str(item) for item in map(_plain, value))
        case bool():
            return str(value).lower()
        case float() if not math.isfinite(value):
            return None
        case str() if value.startswith(FORMULA):
            return f"'{value}"
        case _:
            return value
