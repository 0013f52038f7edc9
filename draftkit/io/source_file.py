"""Opening the weight files of a checkpoint, with the failures a user can act on told apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from draftkit.errors import FormatError, SourceError

GIT_LFS_POINTER = b"version https://git-lfs"


@contextmanager
def open_source(path: Path) -> Iterator[BinaryIO]:
    """Open a weight file for reading, at its start.

    Raises `SourceError` when it cannot be opened or read, `FormatError` when a clone without Git LFS left a pointer.
    """
    try:
        with path.open("rb") as file:
            if file.read(len(GIT_LFS_POINTER)) == GIT_LFS_POINTER:
                raise FormatError(
                    f"{path.name} is a Git LFS pointer, not the weights", where=path, hint="run `git lfs pull` there"
                )
            file.seek(0)
            yield file
    except OSError as error:
        raise SourceError(f"{path.name} cannot be read: {error.strerror or error}", where=path) from error


def damaged(path: Path, found: int, expected: str, reason: str | None = None) -> FormatError:
    """The error for a file of `found` bytes that is cut off or damaged."""
    detail = f": {reason}" if reason else ""
    return FormatError(
        f"{path.name} is truncated or damaged ({found:,} bytes found){detail}",
        where=path,
        expected=expected,
        hint="download or copy the file again",
    )
