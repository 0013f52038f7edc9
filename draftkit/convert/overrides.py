"""Facts that the user sets: `--set rope_theta=10000`, `--set aux_layer_ids=2,16,29`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from draftkit.errors import LayoutError
from draftkit.io.jsonfile import parse
from draftkit.io.records import to_dict
from draftkit.layout.architecture import Architecture
from draftkit.layout.spec import DraftSpec

# Facts that users know under the name of a config key.
PATHS = {
    "rope_theta": ("decoder", "rope", "base"),
    "rope_scaling": ("decoder", "rope", "scaling"),
    "max_position_embeddings": ("decoder", "rope", "max_position_embeddings"),
}

WHOLE = ("config", "scaling")  # objects that are one fact each, verbatim


def facts_of(spec: DraftSpec) -> dict[str, object]:
    """Every fact of a spec that decides what the draft computes, under the name that users know it by."""
    found = {"dtype": spec.dtype} | facts_of_architecture(spec.architecture)
    return found if spec.quantization is None else found | {"quantization": spec.quantization}


def facts_of_architecture(architecture: Architecture) -> dict[str, object]:
    """`facts_of` without dtype and quantization."""
    return dict(_leaves(to_dict(architecture)))


def _leaves(record: dict[str, object], *path: str) -> Iterator[tuple[str, object]]:
    names: dict[tuple[str, ...], str] = {where: name for name, where in PATHS.items()}
    for key, value in record.items():
        if isinstance(value, dict) and key not in WHOLE:
            yield from _leaves(value, *path, key)
        elif key != "declared_base":  # what a config said, and nobody followed
            yield names.get((*path, key), key), value


def parse_override(text: str) -> object:
    """The value of an override: a JSON value, a comma-separated list of them, or else the text itself.

    Raises `LayoutError` for text that no file can hold.
    """
    for candidate in (text, f"[{text}]") if "," in text else (text,):
        try:
            return parse(candidate.replace("True", "true").replace("False", "false"))
        except ValueError:
            continue
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise LayoutError(f"{text!r} cannot be written", expected="valid Unicode") from error
    return text


def override_spec(spec: DraftSpec, overrides: Mapping[str, str], where: object) -> DraftSpec:
    """The spec with other values for the facts named. Raises `LayoutError` for unknown names and ill-typed values."""
    data: dict[str, Any] = json.loads(json.dumps(spec.to_dict()))
    for name, text in overrides.items():
        holder, key = _find(data["architecture"], name, where)
        value = parse_override(text)
        holder[key] = [value] if isinstance(holder[key], list) and not isinstance(value, list) else value
    return DraftSpec.from_dict(data, where)


def _find(architecture: dict[str, Any], name: str, where: object) -> tuple[dict[str, Any], str]:
    """The object that holds a fact, and its key there."""
    *parents, key = PATHS.get(name, (name,)) if "decoder" in architecture else (name,)
    for holder in _objects(architecture):
        nested: Any = holder
        for parent in parents:
            nested = nested.get(parent) if isinstance(nested, dict) else None
        if isinstance(nested, dict) and key in nested:
            return nested, key
    raise LayoutError(
        f"there is no fact {name} to set",
        where=where,
        expected="one of " + ", ".join(sorted(settable(architecture))),
    )


def _objects(value: dict[str, Any]) -> list[dict[str, Any]]:
    """An object and those within it, the outer ones first."""
    return [value] + [inner for child in value.values() if isinstance(child, dict) for inner in _objects(child)]


def settable(architecture: dict[str, Any]) -> set[str]:
    """The names that `--set` takes for a draft of this architecture."""
    names = {key for holder in _objects(architecture) for key, value in holder.items() if not isinstance(value, dict)}
    return names | (set(PATHS) if "decoder" in architecture else set()) - {"base"}
