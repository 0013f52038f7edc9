"""The attacks of `scripts/attack/`, of which the tests run the first cases, count what goes wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ATTACKS = sorted(file.stem for file in (ROOT / "scripts/attack").glob("[a-z]*.py") if file.stem != "fuzz")
CASES = {"gguf": 300, "into": 60, "mtp": 200, "resume": 40, "servers": 100}

BADLY = """
import sys, time
from pathlib import Path
from scripts.attack._count import Lost, Silent, main
from draftkit.errors import FormatError
from fixtures.fuzzing import robust

def refused(folder): raise FormatError("no")
def silent(folder): raise Silent("taken for right")
def lost(folder): raise Lost("gone")
def hang(folder): time.sleep(9)
def crash(folder): (folder / "left").write_text(""); raise ValueError("a traceback")

robust.WAITING = 0.2
main(None, lambda corpus: [(f.__name__, f) for f in (refused, silent, lost, hang, crash, lambda folder: None)])
"""


def run(*arguments: object, timeout: int = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
    )


@pytest.mark.long
@pytest.mark.parametrize("name", ATTACKS)
def test_the_first_cases(name: str) -> None:
    done = run("-m", f"scripts.attack.{name}", "--cases", CASES[name], timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(" cases: 0 silent, 0 lost, 0 hangs, 0 tracebacks\n")


@pytest.mark.long
def test_what_goes_wrong_is_counted() -> None:
    done = run("-c", BADLY)
    assert done.returncode == 1
    assert done.stdout.endswith("6 cases: 1 silent, 1 lost, 1 hangs, 1 tracebacks\n"), done.stdout + done.stderr
    assert "4: crash: tracebacks" in done.stdout
    assert "ValueError: a traceback" in done.stdout
