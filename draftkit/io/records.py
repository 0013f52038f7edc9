"""Frozen dataclasses to JSON values and back, strictly: no fact is missing, unknown or of another type.

Only a field with a default may be missing: it is younger than some of the folders. A field's type may carry checks, as
`Annotated[int, Bounds(1)]`: callables that raise `DraftkitError` for a value of that type that will not do.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from draftkit.errors import DraftkitError, LayoutError

Record = TypeVar("Record")


@dataclass(frozen=True)
class Bounds:
    """A number from `least` to `most`, both included; above `above` and below `below` where they are given."""

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf

    def __call__(self, value: float) -> None:
        inside = self.least <= value <= self.most and self.above < value < self.below
        if not inside or not math.isfinite(value):
            raise DraftkitError(f"{value!r} is not {self}")

    def __str__(self) -> str:
        words = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        limits = [f"{word} {limit:,}" for word, limit in words.items() if math.isfinite(limit)]
        return " ".join(["a finite number", " and ".join(limits)]).strip()


def to_dict(record: object) -> dict[str, object]:
    """The fields of a dataclass as JSON values; tuples become lists."""
    return {field.name: _plain(getattr(record, field.name)) for field in dataclasses.fields(record)}  # type: ignore[arg-type]


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def from_dict(cls: type[Record], data: object, where: object, what: str = "the draftkit block") -> Record:
    """Build `cls` from what `to_dict` gave. Raises `LayoutError` that lists every problem of `what` at once."""
    problems: list[str] = []
    record = _read(cls, data, cls.__name__, problems)
    if problems:
        raise LayoutError(f"{what} is not valid:\n    " + "\n    ".join(problems), where=where)
    return typing.cast(Record, record)


def _read(kind: object, value: object, path: str, problems: list[str]) -> object:
    """`value` as type `kind`; a mismatch is appended to `problems`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _read_checked(arguments[0], arguments[1:], value, path, problems)
    if dataclasses.is_dataclass(kind):
        return _read_record(typing.cast(type, kind), value, path, problems)
    if origin is typing.Literal:
        if value not in arguments:
            problems.append(f"{path}: {value!r} is not one of {list(arguments)}{did_you_mean(value, arguments)}")
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _read(next(a for a in arguments if a is not type(None)), value, path, problems)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_read(arguments[0], item, f"{path}[{i}]", problems) for i, item in enumerate(value))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return _float(value)
    expected = typing.cast(type, origin or kind)
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        problems.append(f"{path}: {value!r} is not {expected.__name__}")
    return value


def _read_checked(
    kind: object, checks: Iterable[typing.Callable[[typing.Any], object]], value: object, path: str, problems: list[str]
) -> object:
    before = len(problems)
    read = _read(kind, value, path, problems)
    if len(problems) == before and read is not None:
        for check in checks:
            try:
                check(read)
            except DraftkitError as error:
                problems.append(f"{path}: {error}")
    return read


def _float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """The end of a message about an unknown name: the known one that it resembles, if any does."""
    close = difflib.get_close_matches(str(name)[:100], [text for text in known if isinstance(text, str)], n=1)
    return f", did you mean {close[0]}?" if close else ""


def _read_record(cls: type, value: object, path: str, problems: list[str]) -> object:
    if not isinstance(value, dict):
        problems.append(f"{path}: {value!r} is not an object")
        return None
    kinds = _kinds(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    required = [field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING]
    problems += [f"{path}.{name}: missing" for name in required if name not in value]
    problems += [f"{path}.{name}: unknown{did_you_mean(name, names)}" for name in value if name not in names]
    fields = {name: _read(kinds[name], value[name], f"{path}.{name}", problems) for name in names if name in value}
    return None if problems else cls(**fields)  # a record may check itself, and must not see ill-typed fields


@functools.cache
def _kinds(cls: type) -> dict[str, object]:
    return typing.get_type_hints(cls, include_extras=True)
