"""The comment by which draftkit knows its own pages."""

from __future__ import annotations

import hashlib
import re
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
