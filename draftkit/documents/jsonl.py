"""JSONL files: read line by line, with errors that name the line, and written complete or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from draftkit.errors import DraftkitError, FormatError, SourceError
from draftkit.layout.atomic import DISK_FAILURES, settle_leftovers, sibling


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """The objects of a file with their line numbers, from 1; empty lines are passed over.

    Raises `SourceError` when the file cannot be read, `FormatError` naming the first line that is not an object.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, parse_line(line, f"{path}, line {number}")
    except OSError as error:
        raise SourceError(f"{path.name} cannot be read: {error.strerror}", where=path) from error


def parse_line(line: bytes, where: str) -> dict[str, object]:
    """The object of one line. Raises `FormatError`."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"the line is not valid JSON: {error}", where=where, hint="the file is damaged or was cut: write it again"
        ) from error
    if not isinstance(value, dict):
        raise FormatError(f"the line holds {type(value).__name__}", where=where, expected="one JSON object a line")
    return value


def dump_line(value: object) -> bytes:
    """One line in the form draftkit writes: no spaces, UTF-8, a final newline."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass") + b"\n"


@contextmanager
def atomic_file(path: Path, force: bool = False) -> Iterator[BinaryIO]:
    """A file to write that becomes `path` when the body ends, and is removed when it raises.

    Raises `DraftkitError` when `path` exists and `force` is not given, when it is a folder, and when the disk is full
    or forbids writing.
    """
    if path.is_dir():
        raise DraftkitError("the output is a folder", where=path, expected="the name of a file")
    if path.exists() and not force:
        raise DraftkitError(
            "the output is already there", where=path, hint="choose another file, or replace it with --force"
        )
    temporary = sibling(path, "tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        settle_leftovers(path)
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        if error.errno not in DISK_FAILURES:
            raise
        raise DraftkitError(f"writing {path.name} failed: {error.strerror}", where=path) from error
    finally:
        temporary.unlink(missing_ok=True)
