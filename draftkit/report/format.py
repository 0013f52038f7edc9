"""Texts in tables and on pages for figures that are no metric of a cell."""

from __future__ import annotations

from draftkit.results.cell import Cell
from draftkit.results.metrics import number
from draftkit.results.verdict import well_known

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def speed(cell: Cell) -> str:
    """Output tokens a second, and how many times faster than plain decoding that is, unless its own run doubts it."""
    faster = "" if cell.times_faster is None or not well_known(cell) else f" ({cell.times_faster:.2f}×)"
    return number(cell.tokens_per_second, ".1f") + faster


def size(count: float | None) -> str:
    """Bytes in the largest binary unit of which there is at least one."""
    if count is None:
        return "–"
    power = 0
    while abs(count) >= 1024 and power < len(UNITS) - 1:
        count, power = count / 1024, power + 1
    return f"{count:.4g} {UNITS[power]}" if count < 1000 else f"{count:.0f} {UNITS[power]}"
