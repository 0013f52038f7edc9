"""Places on this machine in what is published, and the names that stand for them: the last part of each path."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from draftkit.io.jsonfile import dump

# Files whose strings are a tokenizer's own: only a value that is a whole path is one.
VERBATIM = ("tokenizer.json", "vocab.json", "added_tokens.json", "special_tokens_map.json")
PART = r"[^\s\"'`<>|()\[\]{},;]"


def names_of_paths(values: Iterable[object]) -> dict[str, str]:
    """Every string among JSON values that is a path of this machine → its last part."""
    return {text: Path(text).name for value in values for text in _strings(value) if _is_local(text)}


def with_names(value: Any, names: Mapping[str, str]) -> Any:
    """A JSON value with names instead of paths: those of `names`, and whatever lies in this user's folders."""
    if isinstance(value, dict):
        return {key: with_names(item, names) for key, item in value.items()}
    if isinstance(value, list):
        return [with_names(item, names) for item in value]
    return text_with_names(value, names) if isinstance(value, str) else value


def text_with_names(text: str, names: Mapping[str, str]) -> str:
    """The same of a text."""
    for path, name in sorted(names.items(), key=lambda pair: -len(pair[0])):
        text = re.sub(rf"(?<![\w/.-]){re.escape(path)}(?![\w/-])/?", lambda _, name=name: name, text)  # type: ignore[misc]
    for root in _own_folders():
        text = re.sub(rf"(?<![\w/.-]){re.escape(root)}(?:/{PART}*)?(?![\w/-])", lambda m: Path(m[0]).name, text)
    return text


def read_values(path: Path) -> object:
    """The content of a JSON or YAML file that may name places; None for any other file and one that is not valid."""
    if path.name in VERBATIM or path.suffix not in (".json", ".yaml"):
        return None
    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError):
        return None


def file_with_names(path: Path, names: Mapping[str, str]) -> Path | bytes:
    """A file as it is published: the file itself where it names no place."""
    values = read_values(path)
    named = with_names(values, names)
    if named == values:
        return path
    text = dump(named) if path.suffix == ".json" else yaml.safe_dump(named, sort_keys=False, allow_unicode=True)
    return text.encode()


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def _is_local(text: str) -> bool:
    """Absolute, from the home or the current folder, or a relative path to something that is there."""
    if "\n" in text or len(text) > 4096 or not Path(text).name:
        return False
    if text.startswith(("/", "~/", "./", "../")):
        return text.count("/") > 1 or not text.startswith("/") or os.path.exists(text)
    return "/" in text and os.path.exists(text)


def _own_folders() -> list[str]:
    folders = {str(Path.home()), os.getcwd(), os.path.realpath(tempfile.gettempdir())}
    return sorted((folder for folder in folders if folder != "/"), key=len, reverse=True)
