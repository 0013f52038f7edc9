"""Settings: fields of dataclasses that say of themselves what they are for, and their values as users type them.

One reader of `--set NAME=VALUE` for `eval`, `train` and `convert`, and one list of what can be set, which
`--settings` prints.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass
from typing import Any, TypeVar

from draftkit.errors import DraftkitError, SettingError
from draftkit.io.jsonfile import parse
from draftkit.io.records import LATER, Bounds, did_you_mean, read_as

Record = TypeVar("Record")


def setting(
    help: str,
    default: object = MISSING,
    *,
    factory: Callable[[], object] | None = None,
    name: str | None = None,
    unit: str | None = None,
    needs: str | None = None,
    reads: Callable[[str], object] | None = None,
    later: bool = False,
) -> Any:
    """A field of a dataclass of settings.

    `help` says what it is for, `unit` what a number counts, `needs` what else has to be set for it to mean anything.
    `name`: what users call it, where that is not the field's own. `reads`: its value from text that is no JSON.
    `later`: the field is younger than some of the files, as `LATER` says.
    """
    said = {"help": help, "name": name, "unit": unit, "needs": needs, "reads": reads}
    metadata = {key: value for key, value in said.items() if value is not None} | (LATER if later else {})
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def group(factory: Callable[[], object]) -> Any:
    """A field that is a dataclass of settings itself, whose names are those of the whole."""
    return dataclasses.field(default_factory=factory, metadata={"group": True})


@dataclass(frozen=True)
class Setting:
    """One setting: `kind` is its type, `default` `MISSING` where it has to be given, `where` what it is of, in words.
    `record` is the dataclass that has it."""

    name: str
    kind: Any
    default: object
    help: str = ""
    unit: str = ""
    needs: str = ""
    where: str = ""
    record: type = object
    reads: Callable[[str], object] | None = None


def settings_of(cls: type, prefix: str = "") -> Iterator[Setting]:
    """What can be set of a dataclass; those of a dataclass within it as `FIELD.NAME`, or plainly of a `group`."""
    kinds = typing.get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        if "internal" in field.metadata:  # nobody sets it
            continue
        kind = kinds[field.name]
        inner = without_none(kind)
        if dataclasses.is_dataclass(inner) and isinstance(inner, type):
            yield from settings_of(inner, prefix if "group" in field.metadata else f"{prefix}{field.name}.")
            continue
        default = field.default if field.default_factory is MISSING else field.default_factory()
        said = {key: field.metadata[key] for key in ("help", "unit", "needs", "reads") if key in field.metadata}
        yield Setting(prefix + field.metadata.get("name", field.name), kind, default, record=cls, **said)


def values_of(record: object) -> dict[str, object]:
    """The values of a dataclass of settings and its groups, by name."""
    found: dict[str, object] = {}
    for field in dataclasses.fields(record):  # type: ignore[arg-type]
        value = getattr(record, field.name)
        found |= values_of(value) if "group" in field.metadata else {field.metadata.get("name", field.name): value}
    return found


def with_values(cls: type[Record], values: Mapping[str, object]) -> Record:
    """A dataclass of settings and its groups, made of those of `values` that are its own."""
    kinds = typing.get_type_hints(cls)
    given: dict[str, object] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        name = field.metadata.get("name", field.name)
        if "group" in field.metadata:
            given[field.name] = with_values(kinds[field.name], values)
        elif name in values:
            given[field.name] = values[name]
    return cls(**given)


def assignments(texts: Sequence[str]) -> dict[str, str]:
    """`NAME=VALUE` arguments as values by name, the last one where a name comes twice. Raises `DraftkitError`."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise DraftkitError(f"--set {text} names no setting and value", expected="--set NAME=VALUE")
        found[name] = value
    return found


def read_value(text: str, where: object = "the value") -> object:
    """A value that a user typed: as a YAML file has it, or numbers and truth values with commas between them, a list.

    Raises `DraftkitError` for text that no file can hold.
    """
    for candidate in (text, f"[{text}]") if "," in text else ():
        try:
            return parse(candidate.replace("True", "true").replace("False", "false"))
        except ValueError:
            continue
    from draftkit.io.yaml_text import read_yaml

    return read_yaml(text, where)


def tokens_of_text(text: str) -> int:
    """`4096` or `32k` → the number of tokens, k for 1,024 of them. Raises `ValueError` for anything else."""
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)


def as_meant(one: Setting, value: object) -> object:
    """The value of a setting where it is written in words: `none`, or `32k` tokens."""
    if value == "none" and type(None) in typing.get_args(one.kind) and without_none(one.kind) is not str:
        return None
    if one.unit == "tokens" and isinstance(value, str):
        with suppress(ValueError):
            return tokens_of_text(value)
    return value


def read_settings(known: Sequence[Setting], texts: Mapping[str, str]) -> dict[str, object]:
    """The values of settings, each of its type. Raises `DraftkitError` for an unknown name, `SettingError` for a value
    of another type."""
    by_name = {one.name: one for one in known}
    found: dict[str, object] = {}
    for name, text in texts.items():
        if name not in by_name:
            raise DraftkitError(
                f"there is no setting {name}{did_you_mean(name, by_name)}", hint="draftkit eval --settings"
            )
        found[name] = _typed(by_name[name], text)
    return found


def _typed(one: Setting, text: str) -> object:
    if one.reads is not None:
        return one.reads(text)
    value = text if without_none(one.kind) is str else as_meant(one, read_value(text, f"--set {one.name}"))
    if isinstance(value, str | int | float) and typing.get_origin(without_none(one.kind)) is tuple:
        value = [value]
    read, problems = read_as(one.kind, value, one.name)
    if problems:
        raise SettingError("; ".join(problems), one.name)
    return read


def without_none(kind: Any) -> Any:
    """A type without `None` and without checks."""
    if typing.get_origin(kind) is typing.Annotated:
        return without_none(typing.get_args(kind)[0])
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return without_none(next(part for part in typing.get_args(kind) if part is not type(None)))
    return kind


def words_of(kind: Any) -> str:
    """A type as a reader takes it: the words of a literal, the bounds of a number."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        bounds = [str(check).removeprefix("a finite number") for check in arguments[1:] if isinstance(check, Bounds)]
        return words_of(arguments[0]) + "".join(bounds)
    if origin is typing.Literal:
        return ", ".join(f"`{word}`" if word else "empty" for word in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(words_of(part) for part in arguments)
    if origin is tuple:
        return f"list of {words_of(arguments[0])}"
    words = {str: "text", bool: "true or false", int: "whole number", float: "number", type(None): "none"}
    return words.get(origin or kind, "object" if issubclass(origin or kind, Mapping) else kind.__name__)
