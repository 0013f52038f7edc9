"""Reading and writing the small JSON files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

from draftkit.errors import FormatError, SourceError

MAX_BYTES = 64 << 20  # a config.json is a few kB; anything near this is not one


def read_object(path: Path) -> dict[str, object]:
    """The JSON object in a file. Raises `SourceError` when it is missing, `FormatError` when it is not an object."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise FormatError(f"{path.name} has {size:,} bytes", where=path, expected="a small JSON file")
        text = path.read_bytes()
    except FileNotFoundError:
        raise SourceError(
            f"{path.name} is missing", where=path, hint="pass the folder that holds config.json and the weights"
        ) from None
    except OSError as error:
        raise SourceError(f"{path.name} cannot be read: {error.strerror}", where=path) from error
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"{path.name} is not valid JSON: {error}", where=path, hint="download or write the file again"
        ) from error
    if not isinstance(value, dict):
        raise FormatError(f"{path.name} holds {type(value).__name__}, not an object", where=path)
    return value


def dump(value: object) -> str:
    """JSON text in the one form draftkit writes: two spaces, keys in the given order, a final newline."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
