"""What the screens of all commands have in common: a first line that answers, rows in columns, tables that name things.

Names that a user copies are never cut, and titles and captions begin where the lines around them do.
"""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from draftkit.finding import Severity

SEVERITY_STYLES: dict[Severity, str] = {"error": "bold red", "warning": "yellow", "note": "cyan", "ok": "green"}


def labelled(label: str, text: str, style: str) -> Text:
    """A line that says in color what kind of answer follows."""
    return Text.assemble((label, f"bold {style}"), f": {text}")


def severity(name: Severity) -> Text:
    """The severity of a finding, in its color."""
    return Text(name, style=SEVERITY_STYLES[name])


def columns() -> Table:
    """Rows without a frame, whose last cell takes what width is left."""
    return Table.grid(padding=(0, 2, 0, 0))


def named_table(*headings: str, title: str | None = None, caption: str | None = None) -> Table:
    """A table whose first column holds names, which are not cut or broken; nor are its headings."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), title=title, caption=caption)
    table.title_justify = table.caption_justify = "left"
    for heading in headings:
        table.add_column(heading, min_width=max(map(len, heading.split()), default=0), overflow="fold")
    table.columns[0].no_wrap = True
    table.columns[0].overflow = "ignore"
    return table
