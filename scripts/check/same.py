"""Does the package give what it gave at another commit? Both run on the same inputs and are compared byte for byte.

`python -m scripts.check.same --before REV [--only SUBJECT …] [--gone GLOB …] [--borrow] [--shown 3]`

The commit is checked out into a temporary worktree. A subject is a module of `tests/fixtures/net`: its `found(True)`
runs in a process of each tree, with that tree's own collectors, package and cache, and gives keys with values. The
subject `speed` times three commands of both trees by turns instead and fails nothing.

--gone   a key, as `training/eagle3/*`, that may be missing now; repeatable
--borrow use the collectors of the present tree where REV has none of a subject
--shown  how many changed values of a subject are shown as diffs

Exits with 1 when a value has changed, when a key is gone that no --gone names, and when a collector failed. New keys
are listed and fail nothing. The last lines are a summary.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import unified_diff
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
NET = Path("tests/fixtures/net")
SPEED, REPEATS = "speed", 3
LISTED, DIFF_LINES = 20, 24  # the most keys that are named of a kind, and the most lines of a diff
COLLECT = """
import importlib, json, sys
import torch
torch.set_num_threads(1)
module = importlib.import_module("fixtures.net." + sys.argv[1])
with open(sys.argv[2], "w") as file:
    for key, value in module.found(True):
        print(json.dumps([key, value], sort_keys=True, ensure_ascii=False), file=file, flush=True)
"""
WRITE_RESULT = """
import json, sys
from fixtures.report_results import full_result
result = full_result()
cells = [cell | {"temperature": step / 10} for step in range(5) for cell in result["cells"]]
json.dump(result | {"cells": cells[:200]}, open(sys.argv[1], "w"))
"""


@dataclass(frozen=True)
class Tree:
    """One side: a checkout, and a folder for what it caches and writes. `tests`: where its collectors are."""

    name: str
    path: Path
    work: Path

    def has(self, subject: str) -> bool:
        return (self.path / NET / f"{subject}.py").is_file()

    def environment(self, tests: Path) -> dict[str, str]:
        """What makes a Python use this package and the modules in `tests`, and one thread."""
        own = {
            "PYTHONPATH": f"{self.path}{os.pathsep}{tests}",
            "OMP_NUM_THREADS": "1",
            "XDG_CACHE_HOME": str(self.work / "cache"),
            "TMPDIR": str(self.work),
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "COLUMNS": "100",
        }
        return {name: value for name, value in os.environ.items() if not name.startswith("DRAFTKIT")} | own


@dataclass
class Comparison:
    """The lines of a subject on both sides; `failed`: what a collector said at its end."""

    subject: str
    before: Mapping[str, str]
    after: Mapping[str, str]
    failed: tuple[str, ...] = ()
    allowed: Sequence[str] = ()
    seconds: float = 0.0
    changed: list[str] = field(init=False)
    gone: list[str] = field(init=False)
    let_go: list[str] = field(init=False)
    new: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.changed = [key for key in self.before if self.after.get(key, self.before[key]) != self.before[key]]
        missing = [key for key in self.before if key not in self.after]
        self.let_go = [key for key in missing if any(fnmatchcase(f"{self.subject}/{key}", one) for one in self.allowed)]
        self.gone = [key for key in missing if key not in set(self.let_go)]
        self.new = [key for key in self.after if key not in self.before]

    @property
    def same(self) -> bool:
        return not (self.changed or self.gone or self.failed)

    @property
    def summary(self) -> str:
        equal = len(self.before) - len(self.changed) - len(self.gone) - len(self.let_go)
        counts = {"changed": self.changed, "gone": self.gone, "gone as named": self.let_go, "new": self.new}
        told = [f"{equal} equal", *(f"{len(keys)} {kind}" for kind, keys in counts.items() if keys)]
        told += [f"FAILED {side}" for side in self.failed]
        lines = f"{len(self.before)} → {len(self.after)} lines"
        return f"{self.subject:<12} {lines:<20} {', '.join(told)} ({self.seconds:.0f} s)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True, metavar="REV")
    parser.add_argument("--only", action="append", metavar="SUBJECT")
    parser.add_argument("--gone", action="append", default=[], metavar="GLOB")
    parser.add_argument("--borrow", action="store_true")
    parser.add_argument("--shown", type=int, default=3)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the worktree is removed
    began = time.monotonic()
    with TemporaryDirectory(prefix="same-") as folder, checked_out(options.before, Path(folder)) as path:
        before, after = (tree(name, at, Path(folder)) for name, at in (("before", path), ("after", ROOT)))
        known = subjects(before, after)
        asked = options.only or [*known, SPEED]
        if unknown := [name for name in asked if name not in (*known, SPEED)]:
            parser.error(f"no subject {', '.join(unknown)}; there are {', '.join([*known, SPEED])}")
        summary, same = [], True
        for subject in asked:
            if subject == SPEED:
                summary += list(speeds(before, after))
                continue
            if not after.has(subject) or not (before.has(subject) or options.borrow):
                summary.append(f"{subject:<12} not compared: {'REV' if after.has(subject) else 'this tree'} has none")
                print(summary[-1], flush=True)
                continue
            compared = compare(subject, before, after, options.gone)
            show(compared, options.shown)
            summary.append(compared.summary)
            same &= compared.same
    commits = f"{_commit('HEAD')}{' and what is not committed' if _git('status', '--porcelain') else ''}"
    host = f"{os.cpu_count()} cores of {platform.machine()}"
    print(f"\nsame --before {options.before} ({_commit(options.before)}), now {commits}; {host}")
    print(*(f"  {line}" for line in summary), sep="\n")
    print(f"  {'equal' if same else 'NOT EQUAL'}, {time.monotonic() - began:.0f} s in all")
    sys.exit(not same)


@contextmanager
def checked_out(revision: str, folder: Path) -> Iterator[Path]:
    """The commit in a worktree in `folder`, which is removed at the end."""
    path = folder / "tree"
    _git("worktree", "add", "--detach", str(path), revision)
    try:
        yield path
    finally:
        _git("worktree", "remove", "--force", str(path))


def tree(name: str, path: Path, folder: Path) -> Tree:
    (folder / name).mkdir()
    return Tree(name, path, folder / name)


def subjects(*trees: Tree) -> list[str]:
    """The modules of the net in any of the trees."""
    return sorted({file.stem for one in trees for file in (one.path / NET).glob("[!_]*.py")})


def compare(subject: str, before: Tree, after: Tree, allowed: Sequence[str]) -> Comparison:
    """The lines of both trees, which are collected at the same time, each by one thread."""
    began = time.monotonic()
    print(f"{subject} …", flush=True)
    started = [(one, _collecting(subject, one, one if one.has(subject) else after)) for one in (before, after)]
    failed = []
    for one, process in started:
        if process.wait():
            said = (one.work / f"{subject}.log").read_text(errors="replace")
            failed.append(f"{one.name}: {(said.strip().splitlines() or ['nothing was said'])[-1][:200]}")
    lines = [_lines(one.work / f"{subject}.jsonl") for one in (before, after)]
    return Comparison(subject, lines[0], lines[1], tuple(failed), allowed, time.monotonic() - began)


def _collecting(subject: str, one: Tree, collectors: Tree) -> subprocess.Popen[bytes]:
    out = one.work / f"{subject}.jsonl"
    with (one.work / f"{subject}.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-c", COLLECT, subject, str(out)],
            cwd=one.work, env=one.environment(collectors.path / "tests"), stdout=log, stderr=log,
        )  # fmt: skip


def _lines(file: Path) -> dict[str, str]:
    """Key → the value as readable text."""
    if not file.exists():
        return {}
    pairs = [json.loads(line) for line in file.read_text().splitlines()]
    return {key: json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) for key, value in pairs}


def show(compared: Comparison, shown: int) -> None:
    """What differs: the keys, and the first changed values as diffs."""
    print(compared.summary, flush=True)
    for kind, keys in (("changed", compared.changed), ("gone", compared.gone), ("new", compared.new)):
        for key in keys[:LISTED]:
            print(f"  {kind}: {compared.subject}/{key}")
        if len(keys) > LISTED:
            print(f"  {kind}: {len(keys) - LISTED} more")
    for key in compared.changed[:shown]:
        old, new = _readable(compared.before[key]), _readable(compared.after[key])
        diff = list(unified_diff(old, new, f"before {compared.subject}/{key}", "after", lineterm="", n=1))
        print(*(line[:200] for line in diff[:DIFF_LINES]), sep="\n")
        if len(diff) > DIFF_LINES:
            print(f"  … {len(diff) - DIFF_LINES} more lines")
    sys.stdout.flush()


def _readable(text: str) -> list[str]:
    """The lines of a value; a text within it has its own."""
    value = json.loads(text)
    return value.splitlines() if isinstance(value, str) else text.splitlines()


def speeds(before: Tree, after: Tree) -> Iterator[str]:
    """Three commands of both trees by turns, after one run of each that is not counted: medians and their ratios."""
    commands = {
        "eval": "eval --target zoo:target --draft zoo:eagle3 --limit 8 --max-new-tokens 32 --device cpu",
        "convert": "convert zoo:eagle3 OUT",
        "report": "report RESULT --out OUT.html",
    }
    for one in (before, after):
        environment = one.environment(one.path / "tests")
        subprocess.run([sys.executable, "-c", WRITE_RESULT, str(one.work / "result.json")], env=environment, check=True)
    for name, command in commands.items():
        print(f"{SPEED} {name} …", flush=True)
        taken: dict[str, list[tuple[float, float]]] = {before.name: [], after.name: []}
        for turn in range(REPEATS + 1):
            for one in (before, after) if turn % 2 else (after, before):
                taken[one.name].append(_timed(one, command, turn))
        sides = [[median(of) for of in zip(*taken[one.name][1:], strict=True)] for one in (before, after)]
        told = [
            f"{kind} {old:.2f} → {new:.2f} s ({new / old:.2f}×)"
            for kind, old, new in zip(("wall", "CPU"), *sides, strict=True)
        ]
        yield f"{SPEED} {name:<8} {', '.join(told)}; medians of {REPEATS}"


def _timed(one: Tree, command: str, turn: int) -> tuple[float, float]:
    """The seconds on the clock and of processors that a command takes."""
    places = {"OUT": f"out-{turn}", "OUT.html": f"out-{turn}.html", "RESULT": "result.json"}
    arguments = [places.get(word, word) for word in command.split()]
    log = one.work / "speed.log"
    began = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "draftkit", *arguments],
            cwd=one.work, env=one.environment(one.path / "tests"), stdout=file, stderr=file,
        )  # fmt: skip
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"draftkit {' '.join(arguments)} fails {one.name}:\n{log.read_text()[-2000:]}")
    return time.monotonic() - began, used.ru_utime + used.ru_stime


def _commit(revision: str) -> str:
    return _git("rev-parse", "--short", revision)


def _git(*arguments: str) -> str:
    ran = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    if ran.returncode:
        sys.exit(f"git {' '.join(arguments)}: {ran.stderr.strip()}")
    return ran.stdout.strip()


if __name__ == "__main__":
    main()
