"""What share of faults in a package do its own tests notice? Seeded mutations, one at a time.

`python -m scripts.check.mutants PACKAGE [--faults 100] [--seed 0] [--most 40]`

The operators are those of cosmic-ray (`pip install cosmic-ray==8.7.0`). PACKAGE is a folder of `draftkit` and of
`tests`, as `io`. Everything happens in a copy of the checkout. First the package's tests run once, and it is noted
which test enters which line. Then places in the package's code are drawn, and one mutation for each; annotations and
what is under `if TYPE_CHECKING` are left out. Against each runs what enters its line, at most `--most` tests, the
quickest first; a line of a module's top level is entered by all. A fault is noticed when a test fails, or takes ten
times as long. What only a further process enters counts as not entered, and a fault there as not noticed.

Prints the survivors, each with file, line and change, and the share that was noticed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
LIBRARY = "cosmic-ray==8.7.0"
WITH_ARGUMENTS = {"core/VariableReplacer", "core/VariableInserter"}  # these take names of variables
LEAST_SECONDS, TIMES_AS_LONG = 30, 10
TOP_LEVEL = ""  # entered while tests are collected


@dataclass(frozen=True)
class Fault:
    """A mutation: the operator's name, and which of the places in a file that it can change."""

    file: Path
    line: int
    operator: str
    occurrence: int


@dataclass(frozen=True)
class Entered:
    """The tests that enter each line of each file, and the seconds that each test takes."""

    tests: dict[tuple[str, int], list[str]]
    seconds: dict[str, float]

    def chosen(self, fault: Fault, most: int) -> list[str]:
        """The quickest of the tests that enter a fault's line."""
        found = set(self.tests.get((str(fault.file), fault.line), ()))
        if TOP_LEVEL in found:
            found = set(self.seconds)
        return sorted(found, key=lambda test: (self.seconds.get(test, 0.0), test))[:most]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", help="as io or train")
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=40, help="tests against one fault")
    options = parser.parse_args()
    operators = known_operators()
    with TemporaryDirectory(prefix="mutants-") as folder:
        copy = copied(Path(folder) / "copy")
        import_from(copy)
        tests, sources = copy / "tests" / options.package, sorted((copy / "draftkit" / options.package).rglob("*.py"))
        if not sources or not tests.is_dir():
            parser.error(f"draftkit has no package {options.package} with tests of its own")
        entered = enter(tests, copy / "draftkit" / options.package, Path(folder))
        check_sound(entered, options.most, Path(folder) / "log")
        found = list(faults(sources, operators, options.faults, options.seed))
        counts = Counter(judged(found, entered, operators, options.most, copy, Path(folder) / "log"))
    total = sum(counts.values())
    print(f"\n{options.package}: {total} faults, seed {options.seed}, {len(entered.seconds)} tests")
    print(*(f"  {kind}: {count} ({count / total:.0%})" for kind, count in counts.most_common()), sep="\n")


def known_operators() -> dict[str, Any]:
    """Name → operator of the library."""
    try:
        plugins = importlib.import_module("cosmic_ray.plugins")
    except ImportError:
        sys.exit(f"the mutations are those of cosmic-ray: pip install {LIBRARY}")
    return {name: plugins.get_operator(name)() for name in plugins.operator_names() if name not in WITH_ARGUMENTS}


def copied(path: Path) -> Path:
    """The files of the checkout that git knows or would add."""
    listed = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in filter(None, subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\0")):
        if (ROOT / name).is_file():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, path / name)
    return path


def import_from(copy: Path) -> None:
    """Let processes that are forked from here import the copy, with what is slow to import and none of its own."""
    own = {str(ROOT), str(ROOT / "tests"), ""}
    sys.path[:] = [str(copy), str(copy / "tests"), *(path for path in sys.path if path not in own)]
    os.environ |= {"PYTHONPATH": f"{copy}{os.pathsep}{copy / 'tests'}", "OMP_NUM_THREADS": "1"}
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # a mutation may have the size and the second of another
    sys.dont_write_bytecode = True
    os.chdir(copy)
    for name in ("pytest", "torch", "transformers", "hypothesis"):
        importlib.import_module(name)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("scripts", "draftkit")]:
        del sys.modules[name]


def enter(tests: Path, sources: Path, folder: Path) -> Entered:
    """Run all tests of the package once, and note which lines each enters."""
    out = folder / "entered.json"

    def run() -> int:
        tracer = Tracer(f"{sources}{os.sep}")
        with tracer.tracing():
            code = run_tests([str(tests)], tracer)
        tests_of = [[file, line, sorted(names)] for (file, line), names in tracer.lines.items()]
        out.write_text(json.dumps([tests_of, tracer.seconds]))
        return code

    print("the tests as they are …", flush=True)
    if code := in_a_process(run, folder / "log", None):
        print((folder / "log").read_text()[-3000:])
        sys.exit(f"the tests of the package fail as they are ({code})")
    tests_of, seconds = json.loads(out.read_text())
    return Entered({(file, line): names for file, line, names in tests_of}, seconds)


def check_sound(entered: Entered, most: int, log: Path) -> None:
    """End here where tests fail without a fault when they are run as they are against one."""
    if in_a_process(lambda: run_tests(sorted(entered.seconds)[:most]), log, None):
        print(log.read_text()[-3000:])
        sys.exit("tests that are asked for by name fail as they are")


class Tracer:
    """A plugin of pytest that notes the lines of files with a prefix that each test enters."""

    def __init__(self, prefix: str):
        self.lines: dict[tuple[str, int], set[str]] = defaultdict(set)
        self.seconds: dict[str, float] = {}
        self._prefix, self._test = prefix, TOP_LEVEL

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._test = nodeid

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        threading.settrace(self._of_call)
        sys.settrace(self._of_call)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(lambda *_: None)

    def _of_call(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self._prefix):
            return None
        at_top = frame.f_code.co_name == "<module>"
        file = frame.f_code.co_filename

        def of_line(frame: FrameType, event: str, _: Any) -> Any:
            self.lines[file, frame.f_lineno].add(TOP_LEVEL if at_top else self._test)
            return of_line

        return of_line(frame, event, None)


def faults(sources: Sequence[Path], operators: dict[str, Any], count: int, seed: int) -> Iterator[Fault]:
    """So many places of all that can be mutated, and one mutation for each."""
    of_place: dict[tuple[Path, tuple[int, int]], list[Fault]] = defaultdict(list)
    cosmic = importlib.import_module("cosmic_ray.ast")
    for file in sources:
        text = file.read_text()
        skipped, seen = list(without_effect(text)), Counter[str]()
        for node in cosmic.ast_nodes(cosmic.get_ast(text)):
            for name, operator in operators.items():
                for start, _ in operator.mutation_positions(node):
                    if not any(begin <= start < end for begin, end in skipped):
                        of_place[file, start].append(Fault(file, start[0], name, seen[name]))
                    seen[name] += 1
    chance = random.Random(seed)
    places = sorted(of_place)
    for place in chance.sample(places, min(count, len(places))):
        yield chance.choice(of_place[place])


def without_effect(text: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Beginning and end of what no run looks at: annotations, and what is under `if TYPE_CHECKING`."""
    for node in ast.walk(ast.parse(text)):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.arg | ast.AnnAssign):
            parts.append(node.annotation)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parts.append(node.returns)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            parts.append(node)
        for part in filter(None, parts):
            yield (part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)  # type: ignore[attr-defined]


def judged(
    found: Sequence[Fault], entered: Entered, operators: dict[str, Any], most: int, copy: Path, log: Path
) -> Iterator[str]:
    """What becomes of each fault, of which survivors are printed."""
    mutate_code = importlib.import_module("cosmic_ray.mutating").mutate_code
    began = time.monotonic()
    for number, fault in enumerate(found, start=1):
        original = fault.file.read_text()
        mutated = mutate_code(original, operators[fault.operator], fault.occurrence)
        tests, kind = entered.chosen(fault, most), "not entered"
        if tests:
            fault.file.write_text(mutated)
            limit = LEAST_SECONDS + TIMES_AS_LONG * sum(entered.seconds.get(test, 0.0) for test in tests)
            try:
                code = in_a_process(lambda tests=tests: run_tests(tests), log, limit)  # type: ignore[misc]
            finally:
                fault.file.write_text(original)
            kind = "noticed" if code else "survived"
        if kind != "noticed":
            print(f"{fault.file.relative_to(copy)}:{fault.line} {kind}, {len(tests)} tests: {fault.operator}")
            print(*changed_lines(original, mutated), sep="\n")
        print(f"{number} of {len(found)}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        yield kind


def changed_lines(original: str, mutated: str) -> Iterator[str]:
    for old, new in zip(original.splitlines(), mutated.splitlines(), strict=False):
        if old != new:
            yield f"  - {old.strip()}\n  + {new.strip()}"
            return


def run_tests(names: Sequence[str], *plugins: object) -> int:
    pytest = importlib.import_module("pytest")
    more = ["-x", "-q", "-n0", "-m", "not long", "-p", "no:cacheprovider", "--no-header"]
    return int(pytest.main([*more, *names], plugins=list(plugins)))


def in_a_process(work: Callable[[], int], log: Path, seconds: float | None) -> int:
    """What `work` returns in a fork of this process; its signal where that ends it, as when it takes too long."""
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if not process:
        os.setpgid(0, 0)  # with what it starts
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        code = 1
        with contextlib.suppress(BaseException):
            code = work()
        sys.stdout.flush()
        os._exit(code)
    end = time.monotonic() + (seconds or float("inf"))
    while True:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
        time.sleep(0.05)


if __name__ == "__main__":
    main()
