"""What is found out once and kept for the next process: where it lies in the user's cache folder, and what it is of."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path


def kept_folder(name: str) -> Path:
    """The folder in which answers of one kind are kept; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "draftkit" / name


@cache
def code_digest(*rooms: str) -> str:
    """A digest of draftkit's own code in some of its rooms."""
    package = Path(__file__).parents[1]
    files = sorted(path for room in rooms for kind in ("py", "cpp") for path in (package / room).rglob(f"*.{kind}"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
