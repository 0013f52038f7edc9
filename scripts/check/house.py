"""The house in figures: `python -m scripts.check.house [--json]`.

Prints how large the package is, how much of it imports, how many of its files a command enters, which files of a room
import in circles, and where functions and folders are largest, each beside the limit that it is held to. Nothing is
written.

Files entered: those of `draftkit/` of which a line inside a function runs. Import lines: lines of import statements, of
all lines. A circle: files of one room that import each other, at the top or inside functions.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import io
import json
import os
import re
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "draftkit"
OPTIMIZED = 0x1  # the flag of a function's code, which that of a module or class body lacks
ENGINE_NAMES = {"vllm", "llama.cpp", "sglang", "tensorrt-llm", "draftkit"}
SHORT = ("--limit", "2", "--max-new-tokens", "8", "--device", "cpu", "--set", "repeats=0", "--json")


class Row(NamedTuple):
    """A figure of the house, and the most that it may be."""

    name: str
    value: float
    limit: float
    detail: str = ""


@cache
def files() -> tuple[Path, ...]:
    return tuple(sorted(PACKAGE.rglob("*.py")))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def lines_of(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def sizes() -> Iterator[Row]:
    """Files, lines, and the share of them that imports."""
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in files())
    kinds = (ast.Import, ast.ImportFrom)
    imports = sum(lines_of(node) for path in files() for node in ast.walk(parsed(path)) if isinstance(node, kinds))
    yield Row("files of the package", len(files()), 400)
    yield Row("lines of the package", lines, 54_000)
    yield Row("import lines, %", round(100 * imports / lines, 1), 8)


def functions() -> Iterator[Row]:
    """The longest function, kernels aside, and the largest signatures."""
    found = []
    for path in files():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef) and not any("jit" in ast.unparse(d) for d in node.decorator_list):
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                where = f"{path.relative_to(PACKAGE)}:{node.name}"
                found.append((lines_of(node), len(given), where))
    length, _, longest = max(found)
    yield Row("lines of the longest function", length, 100, longest)
    _, parameters, largest = max(found, key=lambda function: function[1])
    yield Row("parameters of the largest signature", parameters, 35, largest)


def folders() -> Iterator[Row]:
    """Folders of so many Python files that nobody reads the list."""
    counted = Counter(path.parent for root in (PACKAGE, ROOT / "scripts") for path in root.rglob("*.py"))
    large = {str(folder.relative_to(ROOT)): count for folder, count in counted.items() if count >= 30}
    yield Row("folders of 30 files or more", len(large), 0, ", ".join(f"{k} {v}" for k, v in large.items()))


def circles() -> Iterator[Row]:
    """Groups of files in one room that reach each other by imports."""
    known = {module_of(path): path for path in files()}
    graph: dict[str, set[str]] = defaultdict(set)
    for name, path in known.items():
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                to = inner if inner in known else node.module
                if to in known and to != name and to.split(".")[:2] == name.split(".")[:2]:
                    graph[name].add(to)

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for to in graph[waiting.pop()] - seen:
                seen.add(to)
                waiting.append(to)
        return seen

    reach = {name: reached(name) for name in known}
    groups = {
        frozenset(other for other in reach[name] if name in reach[other]) for name in known if name in reach[name]
    }
    shown = "; ".join(sorted(", ".join(sorted(group)) for group in groups))
    yield Row("import circles inside rooms", len(groups), 0, shown.replace("draftkit.", ""))


def engine_names() -> Iterator[Row]:
    """Lines that compare with an engine's name where any engine should do."""
    found = []
    for path in files():
        room, *inner = path.relative_to(PACKAGE).parts
        if room not in ("cli", "evaluate", "report", "results") or inner[:1] == ["engines"]:
            continue
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.Compare):
                continue
            named = {
                part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)
            }
            told = re.search(r"\b(vllm|server|llama_cpp|sglang)\b", ast.unparse(node)) and "None" in ast.unparse(node)
            if named & ENGINE_NAMES or told:
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    where = Counter(place.partition(":")[0] for place in found)
    yield Row(
        "lines that compare with an engine's name", len(found), 0, ", ".join(f"{k} {v}" for k, v in where.items())
    )


@contextmanager
def entered() -> Iterator[set[str]]:
    """The files of the package that calls enter, in any thread."""
    found: set[str] = set()
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code not in seen:
            seen.add(code)
            if code.co_flags & OPTIMIZED and code.co_filename.startswith(str(PACKAGE)):
                found.add(code.co_filename)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@contextmanager
def counted(opened: Counter[str]) -> Iterator[None]:
    """Counts `locate` and the readings of `config.json` by draftkit's own code."""
    from draftkit.hub import locate as hub

    real_open, real_locate = io.open, hub.locate

    def by_us() -> bool:
        """Whether draftkit's own code opens: below it lies none of a library that reads files for it."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename.endswith(("pathlib.py", "pathlib/_local.py")):
            frame = frame.f_back
        return frame is not None and frame.f_code.co_filename.startswith(str(PACKAGE))

    def open_(file: Any, *arguments: Any, **options: Any) -> Any:
        mode = arguments[0] if arguments else options.get("mode", "r")
        reads = isinstance(file, (str, os.PathLike)) and Path(file).name == "config.json" and "r" in mode
        if reads and by_us():
            opened["config.json"] += 1
        return real_open(file, *arguments, **options)

    def locate(*arguments: Any, **options: Any) -> Any:
        opened["locate"] += 1
        return real_locate(*arguments, **options)

    places = [module for module in list(sys.modules.values()) if getattr(module, "locate", None) is real_locate]
    for module in places:
        module.locate = locate  # type: ignore[attr-defined]
    io.open = builtins.open = open_
    try:
        yield
    finally:
        io.open = builtins.open = real_open
        for module in places:
            module.locate = real_locate  # type: ignore[attr-defined]


def run(*arguments: str) -> None:
    """A command of draftkit in this process, without its output."""
    from draftkit.cli import main

    before, sys.argv = sys.argv, ["draftkit", *arguments]
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as errors:
            main()
    except SystemExit as end:
        if end.code:
            raise RuntimeError(errors.getvalue()) from end
    finally:
        sys.argv = before


def commands() -> Iterator[Row]:
    """What `convert` and `eval` of a draft of the zoo enter, locate and open."""
    opened: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        draft = f"{scratch}/draft"
        measure = ("eval", "--target", "zoo:target", "--draft", draft, *SHORT)
        with entered() as converting:
            run("convert", "zoo:eagle3", draft, "--target", "zoo:target")
        with entered() as measuring:
            run(*measure)
    with counted(opened):
        run("eval", "--target", "zoo:target", "--draft", "zoo:eagle3", *SHORT)
    yield Row("files entered by convert zoo:eagle3", len(converting), 70)
    yield Row("files entered by eval of it", len(measuring), 85)
    yield Row("locate calls in one eval", opened["locate"], 2)
    yield Row("readings of config.json by draftkit in one eval", opened["config.json"], 2)


def options() -> Iterator[Row]:
    """How many options `eval` has."""
    import typer.main

    from draftkit.cli import app

    command = typer.main.get_command(app).commands["eval"]  # type: ignore[attr-defined]
    yield Row("options of eval", sum(parameter.name != "help" for parameter in command.params), 35)


PARTS: tuple[Callable[[], Iterator[Row]], ...] = (sizes, functions, folders, circles, engine_names, commands, options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    asked = parser.parse_args()
    rows = [row for part in PARTS for row in part()]
    if asked.json:
        print(json.dumps([row._asdict() for row in rows], indent=1))
        return
    for row in rows:
        mark = "" if row.value <= row.limit else "  over"
        print(f"{row.name:<50} {row.value:>9,g}  of at most {row.limit:>7,g}{mark}")
        if row.detail and mark:
            print(f"    {row.detail}")


if __name__ == "__main__":
    main()
