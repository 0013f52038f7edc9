"""The structure of the package: rooms import downward only, families are found by being there, names are said once."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import FrameType

import pytest
from conftest import Command

from draftkit.layout.families import families

PACKAGE = Path(__file__).resolve().parents[1] / "draftkit"
# From the ground up. A room may import from those before it.
ROOMS = (
    "errors", "finding", "version", "zoo", "io", "media", "requests", "layout", "hub", "engines", "convert", "targets",
    "models", "runtime", "loading", "results", "data", "checks", "evaluate", "doctor", "train", "prepare", "report",
    "publish", "cli",
)  # fmt: skip
MOST_LINES = 100  # of a function
MOST_OF_ALL, MOST_FILES, MOST_ENTERED = 68_800, 441, 101
FILES = sorted(
    path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem not in ("__init__", "__main__")
)


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports(path: Path) -> tuple[str, ...]:
    """The modules of the package that a file imports, those within functions too."""
    found: list[str] = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.module == "draftkit":
            found += (f"draftkit.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("draftkit."):
            found.append(str(node.module))
    return tuple(found)


def types_of(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name
    for node in tree.body:
        if isinstance(node, ast.Assign) and not ast.unparse(node.value).startswith("TypeVar("):
            names = (target.id for target in node.targets if isinstance(target, ast.Name))
            yield from (name for name in names if re.fullmatch("[A-Z][a-z]+([A-Z][a-z]+)*", name))


def test_the_package_stays_within_its_budget() -> None:
    """The limits fall as the package is rebuilt; they never rise."""
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in PACKAGE.rglob("*.py"))
    assert lines <= MOST_OF_ALL
    assert len(FILES) <= MOST_FILES


def test_convert_enters_few_files(draftkit: Command, tmp_path: Path) -> None:
    """Those of which a line inside a function runs."""
    entered = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            entered.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        outcome = draftkit("convert", "zoo:eagle3", tmp_path / "draft", "--target", "zoo:target")
    finally:
        sys.setprofile(None)
    assert outcome.code == 0, outcome.err
    assert len({name for name in entered if name.startswith(str(PACKAGE))}) <= MOST_ENTERED


def test_every_file_is_in_a_room() -> None:
    assert {room_of(path) for path in FILES} == set(ROOMS)


@pytest.mark.slow
def test_imports_run_downward() -> None:
    upward = [
        f"{path.relative_to(PACKAGE)} imports {module}"
        for path in FILES
        for module in imports(path)
        if ROOMS.index(module.split(".")[1]) > ROOMS.index(room_of(path))
    ]
    assert not upward, "\n".join(upward)


def test_no_room_asks_which_family_a_draft_is_of() -> None:
    """`isinstance` and `match` over specs would have to be edited for every family."""
    specs = {cls.__name__ for cls in families().values()}
    asking = []
    for path in FILES:
        for node in ast.walk(parsed(path)):
            kinds: list[ast.expr] = []
            if isinstance(node, ast.MatchClass):
                kinds = [node.cls]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
                kinds = [name for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)]
            if any(isinstance(kind, ast.Name) and kind.id in specs for kind in kinds):
                asking.append(f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)}")
    assert not asking, "\n".join(asking)


@pytest.mark.slow
@pytest.mark.parametrize("family", [name.replace("-", "_") for name in families()])
def test_only_a_family_s_own_files_know_its_facts(family: str) -> None:
    """In every room the files of a family carry its name; no other imports its class of facts."""
    own = f"draftkit.layout.families.{family}"
    others = [
        str(path.relative_to(PACKAGE))
        for path in FILES
        if own in imports(path) and not path.stem.startswith(family) and family not in path.parts
    ]
    assert not others, "\n".join(others)


@pytest.mark.slow
def test_functions_are_short() -> None:
    """Of at most a hundred lines, with all options of a command. A kernel of Triton is one whole: what it would call is
    compiled into it anyway."""
    long = [
        f"{path.relative_to(PACKAGE)}: {node.name} has {length} lines"
        for path in FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := int(node.end_lineno or 0) - node.lineno + 1) > MOST_LINES
        and not any(ast.unparse(one).partition("(")[0] == "jit" for one in node.decorator_list)
    ]
    assert not long, "\n".join(long)


COMMAND = re.compile(
    r"(draftkit (data \w+|prepare [\w-]+|convert|inspect|eval|certify|gate|doctor|train|adapt"
    r"|report|push)"
    r"|vllm serve|llama-server|\bmv)( (OUT|SOURCE))* $"
    r"|--(target|draft|into|repo|data|states|out|dir|model) $"
)


@pytest.mark.slow
def test_what_a_command_is_printed_with_is_quoted() -> None:
    """A name or path in a printed command goes through `errors.command`, so that a shell takes it as it stands."""
    unquoted = []
    for path in FILES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.JoinedStr):
                unquoted += [
                    f"{path.relative_to(PACKAGE)}:{node.lineno}: {before.value}"
                    for before, after in pairwise(node.values)
                    if isinstance(before, ast.Constant)
                    and isinstance(after, ast.FormattedValue)
                    and COMMAND.search(str(before.value))
                ]
        if path.stem != "errors" and "shlex" in path.read_text(encoding="utf-8"):
            unquoted.append(f"{path.relative_to(PACKAGE)}: shlex")
    assert not unquoted, "\n".join(unquoted)


def test_findings_have_names_with_hyphens() -> None:
    """They are searched for, and stand in tables and JSON."""
    names = [
        node.args[0].value
        for path in FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Finding"
        if node.args and isinstance(node.args[0], ast.Constant)
    ]
    assert len(names) > 90
    assert not [name for name in names if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", str(name))]


def test_no_two_types_have_the_same_name() -> None:
    """Neither classes nor aliases; type variables are of their file."""
    names = Counter(name for path in FILES for name in types_of(parsed(path)))
    assert not [name for name, count in names.items() if count > 1]


def test_make_names_the_files_that_the_interpreter_runs() -> None:
    makefile = (PACKAGE.parent / "Makefile").read_text(encoding="utf-8")
    named = makefile.split("INTERPRETED := ")[1].split("\nPYTEST")[0].replace("\\", "").split()
    tests = PACKAGE.parent / "tests"
    marked = [
        str(file.relative_to(PACKAGE.parent))
        for file in sorted(tests.rglob("test_*.py"))
        if re.search(r"mark\.interpreter\b", file.read_text(encoding="utf-8"))
    ]
    assert named == marked


def test_contributing_has_the_rooms_in_their_order() -> None:
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    table = text.partition("| room | its job |")[2].partition("\n\n")[0]
    columns = [line.split("|")[1] for line in table.splitlines() if line]
    named = [name for column in columns for name in re.findall(r"`(\w+)(?:\.py|/)`", column)]
    assert tuple(named) == ROOMS


def test_contributing_names_files_that_there_are() -> None:
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    named = [word for word in re.findall(r"`([\w./-]+/[\w./-]*)`", text) if not re.search("[A-Z]{3}", word)]
    rooms = (
        PACKAGE.parent,
        PACKAGE,
        PACKAGE / "convert" / "formats",
        PACKAGE / "runtime",
        PACKAGE / "train",
        PACKAGE / "checks",
    )
    assert len(named) > 30
    assert not [word for word in named if not any((room / word).exists() for room in rooms)]


def test_every_attack_that_found_a_fault_keeps_its_test() -> None:
    tests = PACKAGE.parent / "tests"
    kept = re.findall(r"`([\w/]+\.py)(?:::(\w+))?` \|$", (tests / "attacks.md").read_text(), re.MULTILINE)
    assert len(kept) > 30
    gone = [
        f"{file}::{name}"
        for file, name in kept
        if not (tests / file).exists() or (name and f"def {name}(" not in (tests / file).read_text())
    ]
    assert not gone
