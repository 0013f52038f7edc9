"""The digest of a file."""

from __future__ import annotations

import hashlib
from pathlib import Path

from draftkit.errors import SourceError


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file. Raises `SourceError` when it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise SourceError(f"{path.name} cannot be read: {error.strerror}", where=path) from error
