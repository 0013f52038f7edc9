"""Cells of a result as comma-separated values: one row for each, the same columns whatever was measured."""

from __future__ import annotations

import csv
import io
import math

from draftkit.hub.local_paths import names_of_paths
from draftkit.results.record import Cell, Result

# Column by column, where its value lies in a cell.
CELL = {
    "target": ("target",),
    "draft": ("draft",),
    "method": ("method",),
    "engine": ("engine",),
    "dataset": ("dataset",),
    "num_prompts": ("num_prompts",),
    "max_new_tokens": ("max_new_tokens",),
    "num_speculative_tokens": ("num_speculative_tokens",),
    "temperature": ("temperature",),
    "draft_sampling": ("draft_sampling",),
    "verification": ("verification",),
    "concurrency": ("concurrency",),
    "context": ("context",),
    "output_tokens": ("output_tokens",),
    "num_drafts": ("num_drafts",),
    "num_draft_tokens": ("num_draft_tokens",),
    "num_accepted_tokens": ("num_accepted_tokens",),
    "acceptance_length": ("acceptance_length", "mean"),
    "acceptance_length_low": ("acceptance_length", "low"),
    "acceptance_length_high": ("acceptance_length", "high"),
    "drafted_acceptance_length": ("drafted_acceptance_length", "mean"),
    "expected_acceptance_length": ("expected_acceptance_length", "mean"),
    "acceptance_per_pos": ("acceptance_per_pos",),
    "conditional_acceptance_per_pos": ("conditional_acceptance_per_pos",),
    "tokens_per_second": ("tokens_per_second",),
    "baseline_tokens_per_second": ("baseline_tokens_per_second",),
    "speedup": ("speedup",),
    "speedup_low": ("speedup_interval", "low"),
    "speedup_high": ("speedup_interval", "high"),
    "runtime_s": ("runtime_s",),
    **{
        f"{name}_ms_{statistic}": (f"{name}_ms", statistic)
        for name in ("ttft", "tpot", "itl")
        for statistic in ("mean", "p50", "p99")
    },
    "matches_greedy": ("matches_greedy",),
    "num_matching_prompts": ("num_matching_prompts",),
}
PROVENANCE = ("date", "hardware", "device", "dtype", "draftkit", "torch", "transformers")
# Text that begins so is a formula to spreadsheets; after an apostrophe it is text.
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
COLUMNS = (*CELL, *PROVENANCE)


def cells_csv(result: Result) -> str:
    """A header and one row for each cell of a result.

    A value that the cell lacks, or that is NaN or infinite, is empty. Text that a spreadsheet would run begins with an
    apostrophe. Numbers for each position stand in one column, separated by spaces. Target, draft and prompts have names
    instead of paths.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    provenance = [_plain(result.provenance.get(name)) for name in PROVENANCE]
    names = names_of_paths([[cell.target, cell.draft, cell.dataset] for cell in result.cells])
    for cell in result.cells:
        found = [_plain(_found(cell, path)) for path in CELL.values()]
        writer.writerow([names.get(str(value), value) for value in found] + provenance)
    return text.getvalue()


def _found(cell: Cell, path: tuple[str, ...]) -> object:
    value: object = cell
    for name in path:
        value = None if value is None else getattr(value, name)
    return value


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
