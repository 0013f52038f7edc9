"""Changes to sound inputs: of a JSON value at any place, of a text, of bytes."""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


WRONG: dict[str, Any] = {
    "null": None,
    "true": True,
    "a text": "64",
    "negative": -64,
    "NaN": float("nan"),
    "64 bits": (1 << 64) - 1,
    "a list": [64],
    "an object": {"rope_type": "linear", "factor": "2", "rope_theta": {}},
}
HOSTILE: dict[str, Any] = {
    "zero": 0,
    "a fraction": 1.5,
    "a billion": 10**9,
    "infinite": float("-inf"),
    "beyond floats": 10**400,
    "as many digits as Python prints": 10**4299,
    "no text": "",
    "half a surrogate pair": "\ud800",
    "a long text": "a" * 100_000,
    "control characters": "\0\x1b[2J\n",
    "deep": nested(95),
    "deeper than Python writes": nested(400),
}
PLAIN = (
    False,
    1,
    2,
    3,
    7,
    8,
    16,
    32,
    64,
    128,
    0.5,
    1e-5,
    1e4,
    "default",
    "linear",
    "llama",
    "silu",
    [],
    {},
    [0, 1],
    "a",
)
SNIPPETS = (
    "",
    "\0",
    "\n",
    "\r\n",
    "\t",
    "\ufeff",
    "\u2028",
    "é",
    "🜁",
    "\\u",
    '"',
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "//",
    "1e999",
    "NaN",
)


def possible_keys(*sources: Path) -> set[str]:
    """Every text in the code that could be the key of a config, so that none is forgotten that a format reads."""
    files = [file for source in sources for file in (source.rglob("*.py") if source.is_dir() else [source])]
    constants = [
        node for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)
    ]
    texts = {constant.value for constant in constants if isinstance(constant.value, str)}
    return {text for text in texts if re.fullmatch(r"[a-z_][a-z0-9_]+", text)}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside a JSON value, itself included."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from places(part, (*path, key))


def value_at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy of a JSON value with another value at a place."""
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


def removed(value: Any, path: tuple[Any, ...]) -> Any:
    """A copy of a JSON value without what is at a place, which is not the value itself."""
    parent = value_at(value, path[:-1]).copy()
    del parent[path[-1]]
    return replaced(value, path[:-1], parent)


def any_value(rng: random.Random, like: Any = None) -> Any:
    """A JSON value, often near the one that it takes the place of."""
    choice = rng.random()
    if choice < 0.3 and isinstance(like, int | float) and not isinstance(like, bool):
        return rng.choice([like + 1, like - 1, like * 2, -like, like // 2, 0.5, str(like)])
    if choice < 0.3 and isinstance(like, str) and like:
        return rng.choice([like.upper(), like[:-1], like + "x", misspelled(rng, like), like + "\0"])
    if choice < 0.3 and isinstance(like, list):
        return rng.choice([like[:-1], like + like, like[::-1], [*like, None], [[item] for item in like]])
    if choice < 0.5:
        return rng.choice(PLAIN)
    value = rng.choice([*WRONG.values(), *HOSTILE.values()])
    return rng.choice([value, value, value, [value], {"rope_type": value}, {"a": value}])


def changed(rng: random.Random, value: Any, keys: Sequence[str] = (), times: int = 1) -> Any:
    """A copy of a JSON value that differs in about `times` places; `keys` are those that objects may get."""
    for _ in range(times):
        path = rng.choice(list(places(value)))
        here, choice = value_at(value, path), rng.random()
        if choice < 0.2 and path:
            value = removed(value, path)
        elif choice < 0.5 and keys and isinstance(here, dict):
            value = replaced(value, path, here | {rng.choice(keys): any_value(rng)})
        elif choice < 0.6 and isinstance(here, dict) and here:
            name = str(rng.choice(list(here)))
            rest = {key: part for key, part in here.items() if key != name}
            value = replaced(value, path, rest | {misspelled(rng, name): here.get(name)})
        elif path or rng.random() < 0.1:
            value = replaced(value, path, any_value(rng, here))
    return value


def misspelled(rng: random.Random, text: str) -> str:
    place = rng.randrange(len(text) + 1)
    return rng.choice(
        [text[:place] + text[place + 1 :], text[:place] + rng.choice("aeiou_-. ") + text[place:], text.upper()]
    )


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Bytes of which a part is missing, repeated, or something else."""
    start = rng.randrange(len(data) + 1)
    end = min(len(data), start + rng.choice([0, 1, 1, 2, 8, 100]))
    new = rng.choice(
        [b"", bytes([rng.randrange(256)]), rng.choice(SNIPPETS).encode(), data[start:end] * 2, b"\xff\xfe"]
    )
    cut = rng.random() < 0.1
    return data[:start] + new + (b"" if cut else data[end:])


def written(rng: random.Random, value: Any) -> bytes:
    """JSON text of a value, damaged now and then."""
    try:
        text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
    except (RecursionError, ValueError):
        text = "[" * 5000
    data = text.encode(errors="surrogatepass")
    return damaged(rng, data) if rng.random() < 0.05 else data
