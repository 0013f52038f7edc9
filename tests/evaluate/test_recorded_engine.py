"""An engine is one file: measurements and certificates do for one that nobody knows what they do for every engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from fixtures.recorded_engine import FIRST, ROUND, RecordedEngine

import draftkit
from draftkit.evaluate.certificate import Certificate, certify_draft
from draftkit.results.settings import Settings, Sweep

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "tests" / "fixtures" / "recorded_engine.py"
# Commands, one after the other in one process.
COMMANDS = """
import json, sys
from draftkit.cli import main

for command in json.loads(sys.argv[1]):
    sys.argv = ["draftkit", *command]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, command
"""


@pytest.mark.long
def test_a_file_that_is_dropped_into_the_package_is_an_engine(tmp_path: Path) -> None:
    """`--engine` finds it, with `--out`, `--resume`, `--slice` and a certificate, and no edit of any other file."""
    package, out, certified = tmp_path / "copy", tmp_path / "result.json", tmp_path / "certificate.json"
    shutil.copytree(ROOT / "draftkit", package / "draftkit", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copyfile(ENGINE, package / "draftkit" / "evaluate" / "engines" / "recorded.py")
    pair = ("--engine", "recorded", "--target", "zoo:target", "--draft", "zoo:eagle3", "--limit", "4")
    measure = ("eval", *pair, "--max-new-tokens", "12", "--slice", "category", "--set", "repeats=0", "--out", str(out))
    commands = [
        (*measure, "--k", "2"),
        (*measure, "--k", "2,3", "--resume"),
        ("certify", *pair, "--max-new-tokens", "12", "--out", str(certified)),
    ]
    ran = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(commands)],
        env=os.environ | {"PYTHONPATH": f"{package}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    cells = json.loads(out.read_text())["cells"]
    assert [(cell["engine"], cell["num_speculative_tokens"]) for cell in cells] == [("recorded", 2), ("recorded", 3)]
    # A millisecond for each run before: the second command ran plain decoding and K=3, as the file held K=2.
    assert [round(cell["runtime_s"] % ROUND * 1000) for cell in cells] == [2, 2]
    assert all(len(cell["slices"]) == 4 for cell in cells)
    (found,) = json.loads(certified.read_text())["certificates"]
    assert (found["engine"], found["verdict"]) == ("recorded", "no difference seen")


def test_several_passes_count_each_answer_once() -> None:
    """Tokens, rounds and times to a token are those of one pass; the seconds of the run are the mean of all passes."""
    settings = Settings(concurrency=4, limit=4, max_new_tokens=12, repeats=0)
    (once,) = draftkit.evaluate_draft("zoo:target", "zoo:eagle3", settings, engines=[RecordedEngine()]).cells
    engine = RecordedEngine()
    asked = replace(settings, repeats=3)
    (cell,) = draftkit.evaluate_draft("zoo:target", "zoo:eagle3", asked, engines=[engine]).cells
    assert cell.passes == 2  # of a single pair nothing is known, and two agree
    assert [source for source, _ in engine.ran] == [None, "zoo:eagle3", "zoo:eagle3", None] * (len(engine.ran) // 4)
    for name in ("num_prompts", "output_tokens", "num_drafts", "acceptance_length", "ttft_ms", "tpot_ms", "itl_ms"):
        assert getattr(cell, name) == getattr(once, name), name
    per_token = [(r.seconds - FIRST) / (r.tokens - 1) for r in once.by_prompt or ()]
    assert cell.tpot_ms is not None
    assert cell.tpot_ms.mean == pytest.approx(1000 * fmean(per_token))


ASKED = Settings(limit=3, max_new_tokens=10)


def certified(engine: RecordedEngine, asked: Settings | Sweep = ASKED) -> Certificate:
    (found,) = certify_draft("zoo:target", "zoo:eagle3", asked, engines=[engine])
    return found


@pytest.mark.parametrize("errs", [False, True])
def test_a_certificate_of_a_lane_finds_what_its_draft_changes(errs: bool) -> None:
    found = certified(RecordedEngine(errs=errs))
    assert found.verdict == ("bug" if errs else "no difference seen")
    assert [d.position for d in found.divergences] == ([1] * 3 if errs else [])
    assert found.reference is None


def test_a_certificate_asks_once_without_the_draft_and_never_one_request_alone() -> None:
    engine = RecordedEngine()
    found = certified(engine, ASKED.sweep(k=(2, 4), temperature=(0.0, 0.5, 1.0)))
    assert engine.ran == [(None, 0), ("zoo:eagle3", 4)]
    assert found.concurrency == 2
