"""Published figures as a terminal shows them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table

from draftkit.evaluate.published import NOT_STATED, PublishedRow


def published_table(rows: Sequence[PublishedRow]) -> Group:
    """A row for each figure, grouped by source, whose link stands above."""
    tables = []
    for link in dict.fromkeys(row.link for row in rows):
        of_link = [row for row in rows if row.link == link]
        shared = {name: value for name, value in of_link[0].setting.items() if _shared(name, of_link)}
        told = [f"{name} {_text(value)}" for name, value in shared.items() if value is not None]
        unsaid = ", ".join(name for name, value in shared.items() if value is None)
        notes = dict.fromkeys(row.note for row in of_link if row.note)
        caption = " · ".join([*told, *([f"{NOT_STATED}: {unsaid}"] if unsaid else []), *notes])
        own = [name for name in of_link[0].setting if name not in shared]
        table = Table(title=link, title_justify="left", caption=caption, caption_justify="left", box=SIMPLE_HEAD)
        for heading in ("target", "draft", *own, "length", "speed"):
            table.add_column(heading, overflow="fold")
        for row in of_link:
            setting = (NOT_STATED if row.setting[name] is None else _text(row.setting[name]) for name in own)
            length = "–" if row.acceptance_length is None else f"{row.acceptance_length:g}"
            table.add_row(row.target, row.draft, *setting, length, row.speed or "–")
        tables.append(table)
    return Group(*tables)


def _shared(name: str, rows: Sequence[PublishedRow]) -> bool:
    return len({row.setting[name] for row in rows}) == 1


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)
