"""Settings as YAML text. A settings file may come from anywhere: reading one runs nothing and always ends."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from draftkit.errors import DraftkitError
from draftkit.io.jsonfile import MAX_DIGITS

MAX_BYTES = 1 << 20  # settings are a few kB
MAX_DEPTH = 20  # of lists and objects in each other
MAX_VALUES = 10_000  # with those that an alias repeats

_SCIENTIFIC = re.compile(r"[+-]?\d+(\.\d*)?e[+-]?\d+", re.IGNORECASE)
_EXPECTED = "settings as YAML"


def read_yaml_file(path: Path) -> object:
    """The value in a YAML file. Raises `DraftkitError` for what is no settings file."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise DraftkitError(f"the configuration cannot be read: {error.strerror}", where=path) from error
    if len(text) > MAX_BYTES:
        raise DraftkitError("the configuration is too large", where=path, expected=f"at most {MAX_BYTES:,} bytes")
    try:
        return read_yaml(text.decode(), path)
    except UnicodeDecodeError as error:
        raise DraftkitError(f"not a configuration: {error}", where=path, expected=_EXPECTED) from error


def read_yaml(text: str, where: object) -> object:
    """The value of a YAML text: lists and objects of texts, numbers, booleans and null, 1e-4 a number.

    Raises `DraftkitError` for anything else, aliases on themselves and values of absurd size among them.
    """
    try:
        value = yaml.safe_load(text)
        return _plain(value, iter(range(MAX_VALUES)), MAX_DEPTH)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date or an integer that is none: ValueError
        raise DraftkitError(f"not a configuration: {error}", where=where, expected=_EXPECTED) from error


def write_yaml(value: object) -> str:
    """A text that `read_yaml` reads as `value`."""
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True)


def _plain(value: object, budget: Iterator[int], depth: int) -> object:
    """A copy of the value that no other part shares, with texts such as 1e-4 as numbers; YAML wants 1.0e-4."""
    if depth < 0 or next(budget, None) is None:
        raise ValueError("lists or objects that are nested too deep, or repeated too often by aliases")
    if isinstance(value, dict):
        return {_name(name): _plain(inner, budget, depth - 1) for name, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner, budget, depth - 1) for inner in value]
    if isinstance(value, str):
        _check_text(value)
        return float(value) if _SCIENTIFIC.fullmatch(value) else value
    if isinstance(value, int) and abs(value) >= 10**MAX_DIGITS:
        raise ValueError(f"an integer of more than {MAX_DIGITS} digits")
    if value is None or isinstance(value, bool | int | float):
        return value
    raise ValueError(f"a {type(value).__name__}, where only texts, numbers, true, false and null can stand")


def _name(name: object) -> str:
    if not isinstance(name, str):
        raise ValueError(f"{name!r} as a name")
    _check_text(name)
    return name


def _check_text(text: str) -> None:
    """Raise `ValueError` for a text that no file name can have."""
    if "\0" in text:
        raise ValueError("a text with a zero byte")
    text.encode(errors="surrogateescape")  # so Python holds the bytes of a file name that are not UTF-8
