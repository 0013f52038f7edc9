"""The JSON Schema of a result file, from the types that it is read into."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from typing import Any

from draftkit.results.record import SCHEMA, Result

PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean"}


def result_schema() -> dict[str, Any]:
    """What `eval --json` and `--out` write (JSON Schema 2020-12).

    Later versions add keys, so that unknown ones are allowed; null stands for what has a default.
    """
    parts: dict[str, Any] = {}
    result = _object(Result, parts)
    del result["properties"]["path"]  # where it was read from
    result["properties"]["schema"] = {"const": SCHEMA}
    result["required"].append("schema")
    return (
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "draftkit result"}
        | result
        | {"$defs": parts}
    )


def _object(cls: type, parts: dict[str, Any]) -> dict[str, Any]:
    kinds = typing.get_type_hints(cls, include_extras=True)
    fields = dataclasses.fields(cls)
    bare = [
        field.name
        for field in fields
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    return {
        "description": inspect.cleandoc(cls.__doc__ or ""),
        "type": "object",
        "properties": {
            field.name: _kind(kinds[field.name], parts, nullable=field.name not in bare) for field in fields
        },
        "required": bare,
    }


def _kind(kind: Any, parts: dict[str, Any], *, nullable: bool = False) -> dict[str, Any]:
    """The schema of one type; those of dataclasses go to `parts`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (part for part in arguments if part is not type(None))
        return _kind(inner, parts, nullable=True)
    if nullable:
        return {"anyOf": [_kind(kind, parts), {"type": "null"}]}
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if kind.__name__ not in parts:
            parts[kind.__name__] = {}
            parts[kind.__name__] = _object(kind, parts)
        return {"$ref": f"#/$defs/{kind.__name__}"}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        return {"type": "array", "items": _kind(arguments[0], parts)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _kind(arguments[1], parts)}
    return {} if kind is object else {"type": PLAIN[kind]}
