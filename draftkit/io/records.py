"""Frozen dataclasses to JSON values and back, strictly: no fact is missing, unknown or of another type.

Only a field with a default may be missing: it is younger than some of the folders. A field's type may carry checks, as
`Annotated[int, Bounds(1)]`: callables that raise `DraftkitError` for a value of that type that will not do. A record
that does not hold together may raise `ValueError` when it is made.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

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


WORDS = {
    bool: "true or false", int: "a whole number", float: "a number", str: "text", dict: "an object", tuple: "a list",
}  # fmt: skip
LATER = {"later": True}  # metadata of a field that is younger than some of the files


def to_dict(record: object, *, brief: bool = False) -> dict[str, object]:
    """The fields of a dataclass as JSON values; tuples become lists.

    `brief` leaves out `LATER` fields that have their default, so that a record has the bytes that it had before them.
    """
    fields = dataclasses.fields(record)  # type: ignore[arg-type]
    values = {field.name: getattr(record, field.name) for field in fields}
    unsaid = {f.name for f in fields if brief and "later" in f.metadata and values[f.name] == f.default}
    fields_of = partial(to_dict, brief=brief)
    return {name: json_value(value, fields_of) for name, value in values.items() if name not in unsaid}


def json_value(value: object, fields_of: Callable[[Any], dict[str, Any]]) -> object:
    """A value as JSON has it: tuples become lists, and dataclasses, wherever they are in it, what `fields_of` says."""
    if dataclasses.is_dataclass(value):
        return fields_of(value)
    if isinstance(value, dict):
        return {name: json_value(item, fields_of) for name, item in value.items()}
    return [json_value(item, fields_of) for item in value] if isinstance(value, tuple | list) else value


def from_dict(
    cls: type[Record], data: object, where: object, what: str = "the draftkit block", path: str = ""
) -> Record:
    """Build `cls` from what `to_dict` gave. Raises `LayoutError` that lists every problem of `what` at once, each by
    its field's name after `path`."""
    record, problems = read_record(cls, data, path=path)
    if problems:
        raise LayoutError(f"{what} is not valid:\n    " + "\n    ".join(problems), where=where)
    return typing.cast(Record, record)


def read_record(
    cls: type[Record], data: object, *, path: str = "", lenient: bool = False
) -> tuple[Record | None, list[str]]:
    """`cls` from JSON values, and every problem with them, each under its place after `path`; None where there are any.

    `lenient`: the values are those of a file of measurements, to which later versions and other programs add and from
    which they leave out. Unknown keys are passed over, null stands for a default, and so does a mean of nothing:
    statistics that are all null.
    """
    reader = _Reader(lenient, [])
    record = reader.record(cls, data, path)
    return typing.cast("Record | None", record), reader.problems


def read_as(kind: object, value: object, path: str) -> tuple[object, list[str]]:
    """A JSON value as a type of a field, and every problem with it, each by its place after `path`."""
    reader = _Reader(False, [])
    return reader.read(kind, value, path), reader.problems


@dataclass(frozen=True)
class _Reader:
    """Appends every mismatch to `problems`."""

    lenient: bool
    problems: list[str]

    def read(self, kind: object, value: object, path: str) -> object:
        """`value` as type `kind`."""
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if origin is typing.Annotated:
            return self.checked(arguments[0], arguments[1:], value, path)
        if dataclasses.is_dataclass(kind):
            return self.record(typing.cast(type, kind), value, path)
        if origin is typing.Literal:
            if value not in arguments:
                shown = f"{excerpt(value)} is not one of {list(arguments)}"
                self.problems.append(f"{path}: {shown}{did_you_mean(value, arguments)}")
            return value
        if origin in (typing.Union, types.UnionType):
            if type(None) in arguments and (value is None or (self.lenient and _is_of_nothing(value))):
                return None
            return self.read(next(a for a in arguments if a is not type(None)), value, path)
        if origin is tuple and isinstance(value, list | tuple):
            return tuple(self.read(arguments[0], item, f"{path}[{i}]") for i, item in enumerate(value))
        if origin is dict and isinstance(value, dict):
            return {name: self.read(arguments[1], item, f"{path}.{name}") for name, item in value.items()}
        return self.plain(typing.cast(type, origin or kind), value, path)

    def plain(self, kind: type, value: object, path: str) -> object:
        """A value of one type: text, number, truth value, or anything where the type is `object`."""
        if kind is float and type(value) is int:
            value = _float(value)
        if kind is not object and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            self.problems.append(f"{path}: {excerpt(value)} is not {WORDS.get(kind, kind.__name__)}")
        elif self.lenient and isinstance(value, float) and not math.isfinite(value):
            self.problems.append(f"{path}: {value} is not a finite number")
        return value

    def checked(
        self, kind: object, checks: Iterable[typing.Callable[[typing.Any], object]], value: object, path: str
    ) -> object:
        before = len(self.problems)
        read = self.read(kind, value, path)
        if len(self.problems) == before and read is not None:
            for check in checks:
                try:
                    check(read)
                except DraftkitError as error:
                    self.problems.append(f"{path}: {error}")
        return read

    def record(self, cls: type, value: object, path: str) -> object:
        if not isinstance(value, dict):
            self.problems.append(f"{path}: {excerpt(value)} is not an object".removeprefix(": "))
            return None
        before, prefix = len(self.problems), f"{path}." if path else ""
        if self.lenient:
            value = {name: item for name, item in value.items() if name in _kinds(cls)}
            value = {name: item for name, item in value.items() if item is not None or name in _required(cls)}
        self.problems.extend(f"{prefix}{name}: missing" for name in _required(cls) if name not in value)
        unknown = [name for name in value if name not in _kinds(cls)]
        self.problems.extend(f"{prefix}{name}: unknown{_meant(name, _kinds(cls))}" for name in unknown)
        fields = {
            name: self.read(kind, value[name], prefix + name) for name, kind in _kinds(cls).items() if name in value
        }
        if len(self.problems) > before:
            return None  # a record may check itself, and must not see ill-typed fields
        try:
            return cls(**fields)
        except ValueError as error:
            self.problems.append(f"{path}: {error}" if path else str(error))
            return None


def _is_of_nothing(value: object) -> bool:
    """Whether all statistics in an object are null: those of no samples."""
    return isinstance(value, dict) and bool(value) and all(part is None for part in value.values())


def _float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """The end of a message about an unknown name: the known one that it resembles, if any does."""
    close = difflib.get_close_matches(str(name)[:100], [text for text in known if isinstance(text, str)], n=1)
    return f", did you mean {close[0]}?" if close else ""


def _meant(name: object, kinds: dict[str, object]) -> str:
    """What `did_you_mean` says of a field's name; a nested record may have exactly that name."""
    for record, kind in kinds.items():
        if dataclasses.is_dataclass(kind) and name in _kinds(typing.cast(type, kind)):
            return f", did you mean {record}.{name}?"
    return did_you_mean(name, kinds)


def excerpt(value: object) -> str:
    """A value as an error quotes it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]} …"


@functools.cache
def _kinds(cls: type) -> dict[str, object]:
    """The fields of a record, in their order, with their types."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


@functools.cache
def _required(cls: type) -> tuple[str, ...]:
    """The fields that have no default."""
    fields = dataclasses.fields(cls)
    return tuple(f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING)
