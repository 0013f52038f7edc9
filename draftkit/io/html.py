"""What records show of themselves in a notebook: HTML that needs no style sheet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def said_html(sentence: str) -> str:
    """What is to be read first."""
    return f"<p><b>{escape(sentence)}</b></p>"


def table_html(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of text."""
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{names}</tr></thead><tbody>{lines}</tbody></table>"
