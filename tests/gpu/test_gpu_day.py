"""A day on a GPU, tried without one: every command of it runs, and its page says which promises were kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from draftkit.evaluate.round_cost import H100
from scripts.gpu.promises import NEAREST, ROUNDS, Day, judged, page

ROOT = Path(__file__).parents[2]
SECTIONS = (
    "kernels", "runtime", "lossless", "counts", "rounds-1", "rounds-8", "rounds-64", "launches", "attention",
    "long-prompts", "beside-vllm",
)  # fmt: skip


def gpu_day(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable, "VLLM_PYTHON": sys.executable}
    command = ["bash", str(ROOT / "scripts/gpu_day.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.long
@pytest.mark.parametrize("section", [name for name in SECTIONS if name not in ("rounds-1", "rounds-8")])
def test_every_command_of_a_day_runs(section: str, tmp_path: Path) -> None:
    done = gpu_day("--dry-run", "--out", str(tmp_path), section)
    assert done.returncode == 0, (tmp_path / f"{section}.txt").read_text(encoding="utf-8")
    assert Day(tmp_path).sections == [section]
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert done.stdout.strip() == str(tmp_path / "README.md")
    assert "tried without one" in text
    assert "kept**" not in text
    figures = Day(tmp_path).figures
    assert bool(figures) == (section.startswith("rounds") or section in ("launches", "long-prompts"))


def test_a_section_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = gpu_day("--dry-run", "--out", str(tmp_path / "day"), "rounds-9")
    assert done.returncode == 2
    assert "no section rounds-9; there are: kernels runtime" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_a_day_ends_at_once(tmp_path: Path) -> None:
    done = gpu_day("--out", str(tmp_path / "day"))
    assert done.returncode == 1
    assert done.stderr == "torch sees no GPU; --dry-run tries the commands without one\n"
    assert not list(tmp_path.iterdir())


def test_a_day_names_all_its_sections() -> None:
    text = (ROOT / "scripts/gpu_day.sh").read_text(encoding="utf-8")
    assert f"names=({' '.join(SECTIONS)})" in text


def write(folder: Path, section: str, *, code: int = 0, **told: object) -> None:
    (folder / f"{section}.code").write_text(f"{code}\n")
    (folder / f"{section}.json").write_text(json.dumps(told))


def cell(engine: str, **figures: object) -> dict[str, object]:
    counts = {"num_drafts": 9, "num_draft_tokens": 36, "num_accepted_tokens": 12, "num_accepted_tokens_per_pos": [7, 5]}
    heading = {"engine": engine, "draft": "zoo:eagle3", "num_speculative_tokens": 4, "concurrency": 8}
    return heading | counts | {"tokens_per_second": 100.0} | figures


def verdicts(folder: Path) -> dict[str, bool | None]:
    return {one.what: one.kept for one in judged(Day(folder))}


@pytest.mark.parametrize("good", [True, False])
def test_promises_are_judged_by_what_was_measured(tmp_path: Path, good: bool) -> None:
    assert set(verdicts(tmp_path).values()) == {None}
    much = 0.99 if good else 1.01
    plain, drafted = (1e3 * ROUNDS[name].seconds(H100, 8, 1000) for name in ("plain", "EAGLE-3"))
    rounds = [
        {"figure": "round", "draft": "plain", "batch": 8, "positions": 1000, "ms": NEAREST * much * plain},
        {"figure": "round", "draft": "EAGLE-3", "batch": 8, "positions": 1000, "ms": NEAREST * much * drafted},
    ]
    kernels = [{"figure": "kernels", "draft": "plain", "of_a_round": 399 if good else 400}]
    read = [{"figure": "attention", "batch": 8, "length": 4096, "of_copy": 0.9 if good else 0.7}]
    write(tmp_path, "lossless", code=0 if good else 1)
    write(tmp_path, "rounds-8", device="NVIDIA H100 80GB HBM3", figures=rounds)
    write(tmp_path, "launches", device="NVIDIA H100 80GB HBM3", figures=kernels)
    write(tmp_path, "attention", device="NVIDIA H100 80GB HBM3", figures=read)
    write(tmp_path, "counts", cells=[cell("draftkit"), cell("vllm", num_accepted_tokens=12 if good else 13)])
    write(tmp_path, "beside-vllm", cells=[cell("draftkit"), cell("vllm", tokens_per_second=99.0 if good else 101.0)])
    found = verdicts(tmp_path)
    assert found.pop("8B, EAGLE-3, batch 8: pays from")  # as much longer as a plain round
    measured = {what: kept for what, kept in found.items() if kept is not None}
    assert set(measured.values()) == {good}
    assert measured.keys() == {
        "the output with a draft is the target's", "the same counts as vLLM, in float32",
        "kernels of a plain round, greedy", "8B, plain, batch 8", "8B, EAGLE-3, batch 8",
        "attention over 8 sequences of 4,096 and more", "tokens a second beside vLLM, zoo:eagle3, K = 4, batch 8",
    }  # fmt: skip
    text = page(Day(tmp_path))
    assert text.startswith("# NVIDIA H100 80GB HBM3\n\n")
    assert "zoo:eagle3: num_accepted_tokens" in text or good


def test_figures_of_a_section_that_failed_are_none(tmp_path: Path) -> None:
    write(tmp_path, "launches", code=124, figures=[{"figure": "kernels", "draft": "plain", "of_a_round": 399}])
    assert verdicts(tmp_path)["kernels of a plain round, greedy"] is None
