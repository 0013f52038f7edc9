"""JSONL files: read line by line, with errors that name the line, and written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from draftkit.errors import FormatError, SourceError
from draftkit.io.jsonfile import decoded


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
    value = decoded(line, "the line", where)
    if not isinstance(value, dict):
        raise FormatError(f"the line holds {type(value).__name__}", where=where, expected="one JSON object a line")
    return value


def dump_line(value: object) -> bytes:
    """One line in the form draftkit writes: no spaces, UTF-8, a final newline."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass") + b"\n"
