"""A day on a GPU, tried without one: every command of it takes its arguments, and every test that it names is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def gpu_day(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable, "VLLM_PYTHON": sys.executable}
    command = ["bash", str(ROOT / "scripts/gpu_day.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.long
def test_every_command_of_a_day_is_there(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    done = gpu_day("--dry-run", "--out", str(page))
    text = page.read_text(encoding="utf-8")
    assert done.returncode == 0, text
    assert done.stdout.strip() == str(page)
    rows = text.partition("## What was to be shown")[2].strip().splitlines()[2:]
    assert len(rows) == 11
    assert all("dry run: " in row for row in rows)


def test_a_section_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = gpu_day("--dry-run", "--out", str(tmp_path / "page.md"), "rounds-9")
    assert done.returncode == 2
    assert "no section rounds-9" in done.stderr
    assert not list(tmp_path.iterdir())
