"""Reading and writing the small JSON files of a checkpoint."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

from draftkit.errors import FormatError, SourceError

MAX_BYTES = 64 << 20  # a config.json is a few kB; anything near this is not one
MAX_DIGITS = 20  # of an integer: those of 64 bits
MAX_DEPTH = 100  # of lists and objects in each other; Python writes a few hundred
TOO_DEEP = f"lists and objects that are nested more than {MAX_DEPTH} deep"
DEEPER = 10  # what a draft's config may add to those of the config that it holds


def read_object(path: Path) -> dict[str, object]:
    """The JSON object in a file, of which every value can be written again. Raises as `read_text` and `object_in`."""
    return object_in(read_text(path), path)


def read_text(path: Path) -> bytes:
    """The text of a small file. Raises `SourceError` when it is missing, `FormatError` when it is not small."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe or a device may never end
            raise SourceError(f"{path.name} is not a file", where=path)
        if status.st_size > MAX_BYTES:
            raise FormatError(f"{path.name} has {status.st_size:,} bytes", where=path, expected="a small JSON file")
        return path.read_bytes()
    except FileNotFoundError:
        raise SourceError(
            f"{path.name} is missing", where=path, hint="pass the folder that holds config.json and the weights"
        ) from None
    except OSError as error:
        raise SourceError(f"{path.name} cannot be read: {error.strerror}", where=path) from error


def object_in(text: bytes, where: Path | str) -> dict[str, object]:
    """The JSON object of a file's text, as `read_object`. Raises `FormatError` when it is none."""
    name = PurePath(where).name
    value = decoded(text, name, where, parse)
    if not isinstance(value, dict):
        raise FormatError(f"{name} holds {type(value).__name__}, not an object", where=where)
    return value


def parse(text: str | bytes) -> object:
    """The value of a JSON text, which can be written into a config again. Raises `ValueError`."""
    try:
        value = json.loads(text, parse_int=_integer)
        _check_writable(value, MAX_DEPTH + (DEEPER if isinstance(value, dict) and "draftkit" in value else 0))
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    return value


def loads(text: str | bytes) -> Any:
    """The value of a JSON text of any size, for rows and answers. Raises `ValueError`, also where it nests too deep."""
    brackets = text.count("[") + text.count("{") if isinstance(text, str) else text.count(b"[") + text.count(b"{")
    try:
        value = json.loads(text)
        if brackets > MAX_DEPTH:  # fewer cannot nest deeper; to look costs more than to count
            _check_depth(value, MAX_DEPTH)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    return value


def decoded(text: str | bytes, what: str, where: object, decode: Callable[[str | bytes], Any] = loads) -> Any:
    """The value of a JSON text. Raises `FormatError` that calls the text `what`."""
    try:
        return decode(text)
    except ValueError as error:
        raise FormatError(
            f"{what} is not valid JSON: {error}", where=where, hint="the file is damaged or was cut: get it again"
        ) from error


def _check_depth(value: object, depth: int) -> None:
    if depth < 0:
        raise ValueError(TOO_DEEP)
    if isinstance(value, list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            if isinstance(part, list | dict):
                _check_depth(part, depth - 1)


def _integer(digits: str) -> int:
    if len(digits.lstrip("-")) > MAX_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _check_writable(value: object, depth: int) -> None:
    """Raise `ValueError` for what Python's parser takes and its writer does not; `depth` levels may be nested."""
    if depth < 0:
        raise ValueError(TOO_DEEP)
    if isinstance(value, str):
        value.encode()  # half of a surrogate pair has no encoding
    elif isinstance(value, list | dict):
        for part in [*value, *value.values()] if isinstance(value, dict) else value:
            _check_writable(part, depth - 1)


def finite(value: object) -> object:
    """The value with null for what JSON has no number for: NaN and infinity, as the mean of nothing."""
    match value:
        case dict():
            return {key: finite(inner) for key, inner in value.items()}
        case list() | tuple():
            return [finite(inner) for inner in value]
        case float() if not math.isfinite(value):
            return None
        case _:
            return value


def dump(value: object, *, ascii_only: bool = False) -> str:
    """JSON text in the one form draftkit writes: two spaces, keys in the given order, a final newline."""
    return json.dumps(value, indent=2, ensure_ascii=ascii_only) + "\n"
