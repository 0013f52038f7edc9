"""HTML of records in a notebook, which needs no style sheet; and the comment by which draftkit knows its own pages."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

SIGNATURE = re.compile(r"\n<!-- written by draftkit; SHA-256 of all above: ([0-9a-f]{64}) -->\n\Z")


def signed(text: str) -> str:
    """Markdown, HTML or SVG with a comment at its end that tells whether anybody has changed it since; a comment of
    before is replaced."""
    text = SIGNATURE.sub("", text).rstrip("\n") + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"{text}\n<!-- written by draftkit; SHA-256 of all above: {digest} -->\n"


def is_as_written(path: Path) -> bool:
    """Whether a file is as draftkit has written it, so that nothing of anybody's is lost with it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return SIGNATURE.search(text) is not None and signed(text) == text


def said_html(sentence: str) -> str:
    """A sentence in bold, which is to be read first."""
    return f"<p><b>{escape(sentence)}</b></p>"


def table_html(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """An HTML table with a row of headings, all of it plain text."""
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{names}</tr></thead><tbody>{lines}</tbody></table>"
