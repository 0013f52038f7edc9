"""Facts of a draft by name, as `--set` names them: `rope_theta=10000`, `aux_layer_ids=2,16,29`.

So that a room can ask for a fact, or try another value of it, without knowing which family has it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

from draftkit.errors import LayoutError
from draftkit.io.records import did_you_mean, read_record, to_dict
from draftkit.io.settings import Setting, settings_of
from draftkit.layout.architecture import Architecture

Spec = TypeVar("Spec", bound=Architecture)

# Facts that users know under the name of a config key.
PATHS = {
    "rope_theta": ("decoder", "rope", "base"),
    "rope_scaling": ("decoder", "rope", "scaling"),
    "max_position_embeddings": ("decoder", "rope", "max_position_embeddings"),
}
WHOLE = ("config", "parts", "scaling")  # objects that are one fact each, verbatim


def settings_of_facts(architecture: type[Architecture]) -> Iterator[Setting]:
    """What can be set of the drafts of a family, each under the name that `--set` takes."""
    names = {".".join(path): name for name, path in PATHS.items()}
    for one in settings_of(architecture):
        yield replace(one, name=names.get(one.name, one.name.rpartition(".")[2]))


def facts_of(architecture: Architecture) -> dict[str, object]:
    """Every fact that decides what the draft computes, by name; tuples as lists."""
    return dict(_leaves(to_dict(architecture)))


def fact_of(architecture: Architecture, name: str) -> object:
    """The value that `with_facts` would replace; None where the draft has no such fact."""
    if not has(architecture, name):
        return None
    holder, key = _find(to_dict(architecture), architecture.closed, name, "the draft")
    return holder[key]


def has(architecture: Architecture, name: str) -> bool:
    """Whether `with_facts` takes this name for this draft."""
    return name in _settable(to_dict(architecture), architecture.closed)


def with_facts(architecture: Spec, where: object = "the draft", /, **values: object) -> Spec:
    """These facts with other values for those named; one value may stand for a list of one.

    Raises `LayoutError` for unknown names and ill-typed values; `where` says whose facts they are.
    """
    data: dict[str, Any] = copy.deepcopy(to_dict(architecture))
    for name, value in values.items():
        holder, key = _find(data, architecture.closed, name, where)
        holder[key] = [value] if isinstance(holder[key], list) and not isinstance(value, list | tuple) else value
    record, problems = read_record(type(architecture), data)
    if record is None:
        raise LayoutError("; ".join(_of_fact(problem) for problem in problems), where=where)
    return record


def _of_fact(problem: str) -> str:
    """A problem with a value, under the name that users set it by."""
    path, said, what = problem.partition(": ")
    name = next((known for known, keys in PATHS.items() if path == ".".join(keys)), path.rpartition(".")[2])
    return f"--set {name}: {what}" if said else problem


def _leaves(record: dict[str, object], *path: str) -> Iterator[tuple[str, object]]:
    names: dict[tuple[str, ...], str] = {where: name for name, where in PATHS.items()}
    for key, value in record.items():
        if isinstance(value, dict) and key not in WHOLE:
            yield from _leaves(value, *path, key)
        elif key != "declared_base":  # what a config said, and nobody followed
            yield names.get((*path, key), key), value


def _find(
    architecture: dict[str, Any], closed: tuple[str, ...], name: str, where: object
) -> tuple[dict[str, Any], str]:
    """The object that holds a fact, and its key there."""
    *parents, key = PATHS.get(name, (name,)) if "decoder" in architecture else (name,)
    for holder in _objects(architecture, closed):
        nested: Any = holder
        for parent in parents:
            nested = nested.get(parent) if isinstance(nested, dict) else None
        if isinstance(nested, dict) and key in nested:
            return nested, key
    settable = sorted(_settable(architecture, closed))
    raise LayoutError(
        f"there is no fact {name} to set{did_you_mean(name, settable)}",
        where=where,
        expected="one of " + ", ".join(settable),
    )


def _objects(value: dict[str, Any], closed: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """An object and those within it, the outer ones first; without those under the keys `closed`."""
    inner = (child for key, child in value.items() if isinstance(child, dict) and key not in closed)
    return [value] + [one for child in inner for one in _objects(child)]


def _settable(architecture: dict[str, Any], closed: tuple[str, ...]) -> set[str]:
    holders = _objects(architecture, closed)
    names = {key for holder in holders for key, value in holder.items() if not isinstance(value, dict)}
    return names | (set(PATHS) if "decoder" in architecture else set()) - {"base"}
