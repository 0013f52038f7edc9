"""Places on this machine, and the names that stand for them in what is kept and published."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from draftkit import zoo
from draftkit.io.jsonfile import dump

# Files whose strings are a tokenizer's own: only a value that is a whole path is one.
VERBATIM = ("tokenizer.json", "vocab.json", "added_tokens.json", "special_tokens_map.json")
CACHED = re.compile(r"/models--(?P<org>[^/]+?)--(?P<name>[^/]+)/snapshots/[0-9a-f]+$")  # a folder of the Hub's cache
IN_RUN = re.compile(r"draft|checkpoint-\d+")
PART = r"[^\s\"'`<>|()\[\]{},;]"


def public_name(source: str) -> str:
    """What a source is called where it is kept: `zoo:NAME`, a Hub id, or the name of a folder or file, not its path.

    A folder of the zoo or of the Hub's cache has the name of what lies there.
    """
    source = source.removeprefix("hf://")
    if source.startswith("zoo:") or not (os.path.exists(os.path.expanduser(source)) or looks_like_path(source)):
        return source
    path = Path(os.path.abspath(os.path.expanduser(source)))
    if cached := CACHED.search(path.as_posix()):
        return f"{cached['org']}/{cached['name']}"
    return zoo.name_of(path) or path.name


def looks_like_path(source: str) -> bool:
    """Whether a source can only be a path, whatever is there."""
    return source.startswith((".", "/", "~")) or source.partition("@")[0].count("/") > 1


def reachable(name: str | None) -> str | None:
    """A name that is kept of a source, if it leads there: in the zoo and on the Hub always, else where it lies here."""
    return name if name is not None and (":" in name or "/" in name or os.path.exists(name)) else None


def names_of_paths(values: Iterable[object]) -> dict[str, str]:
    """Every string among JSON values that is a path of this machine → the name of what lies there.

    It is that of `public_name`, for a folder in a training run after the run's, and after those of more folders where
    another path has the same; each is also found under its absolute path, and so are the models of the zoo.
    """
    places: dict[str, list[str]] = {}  # absolute path → as the values have it
    for text in dict.fromkeys(text for value in values for text in _strings(value) if _is_local(text)):
        places.setdefault(os.path.abspath(os.path.expanduser(text)), []).append(text)
    names = {place: _name_in_run(place) for place in places}
    for parts in range(2, 6):
        taken = Counter(names.values())
        names = {
            place: name if taken[name] == 1 else "/".join(Path(place).parts[1:][-parts:])
            for place, name in names.items()
        }
    embedded = {str(zoo.path(name)): f"zoo:{name}" for name in zoo.names()}
    return embedded | {text: names[place] for place, texts in places.items() for text in (place, *texts)}


def named(value: Any) -> Any:
    """A JSON value with names instead of the paths that are in it."""
    return with_names(value, names_of_paths([value]))


def with_names(value: Any, names: Mapping[str, str]) -> Any:
    """A JSON value with names instead of paths: those of `names`, and whatever lies in this user's folders."""
    if isinstance(value, dict):
        return {with_names(key, names): with_names(item, names) for key, item in value.items()}
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
    import yaml

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
    from draftkit.io.yaml_text import write_yaml

    return (dump(named) if path.suffix == ".json" else write_yaml(named)).encode()


def copy_named(source: str | Path, copy: str | Path) -> None:
    """Copy a file as it may be published: with names, where it is a JSON or YAML file that has paths."""
    source, copy = Path(source), Path(copy)
    content = file_with_names(source, names_of_paths([read_values(source)]))
    if isinstance(content, bytes):
        copy.write_bytes(content)
    elif source != copy:
        shutil.copyfile(source, copy)


def _name_in_run(place: str) -> str:
    """A name that draftkit or a trainer gives in every run says nothing without the run's."""
    path = Path(place)
    return f"{path.parent.name}/{path.name}" if IN_RUN.fullmatch(path.name) else public_name(place)


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
