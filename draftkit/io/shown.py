"""How records show themselves: `print` gives sentences and tables of text, a notebook the same as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Rows:
    """A table of plain text with a row of headings."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def text(self) -> str:
        """In columns, two spaces apart."""
        lines = [list(self.head), *([cell.replace("\n", " ") for cell in row] for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
        return "\n".join(line.rstrip() for line in padded)

    @property
    def html(self) -> str:
        """Without a style sheet."""
        names = "".join(f"<th>{escape(name)}</th>" for name in self.head)
        lines = "".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in self.rows)
        return f"<table><thead><tr>{names}</tr></thead><tbody>{lines}</tbody></table>"


class Shown:
    """A record that shows itself to people, where its `repr` is for programmers."""

    def shown(self) -> Iterator[str | Rows]:
        """Sentences and tables, what is to be read first at the beginning."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(part if isinstance(part, str) else part.text for part in _filled(self.shown()))

    def _repr_html_(self) -> str:
        """As a notebook shows it: the first sentence in bold."""
        return "".join(
            part.html if isinstance(part, Rows) else f"<p>{f'<b>{escape(part)}</b>' if first else escape(part)}</p>"
            for first, part in ((number == 0, part) for number, part in enumerate(_filled(self.shown())))
        )


def _filled(parts: Iterable[str | Rows]) -> Iterator[str | Rows]:
    """Without tables that have no row."""
    return (part for part in parts if isinstance(part, str) or part.rows)
