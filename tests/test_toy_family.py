"""A family of drafts that nobody has heard of: one file in each room, and every command knows it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fixtures.training.samples import samples
from safetensors.torch import load_file, save_file

from draftkit.data.sample_files import write_samples
from draftkit.data.samples import SamplesOrigin

ROOT = Path(__file__).resolve().parents[1]
TOY = ROOT / "tests" / "fixtures" / "toy_family"
# What CONTRIBUTING says that a family is: these files, and no edit of any other.
FILES = {
    "facts.py": "layout/families/bigram.py",
    "format.py": "convert/formats/bigram.py",
    "model.py": "models/bigram.py",
    "drafter.py": "runtime/drafters/bigram.py",
    "recipe.py": "train/recipes/bigram.py",
}
VOCABULARY, WIDTH = 4096, 8


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with the toy's files in it, on no other path."""
    root = tmp_path_factory.mktemp("toy")
    shutil.copytree(ROOT / "draftkit", root / "draftkit", ignore=shutil.ignore_patterns("__pycache__"))
    for name, place in FILES.items():
        assert not (root / "draftkit" / place).exists()
        shutil.copyfile(TOY / name, root / "draftkit" / place)
    return root


def run(package: Path, *arguments: object) -> str:
    command = [sys.executable, "-m", "draftkit", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, cwd=package, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.long
def test_it_is_read_written_and_run(package: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    torch.manual_seed(0)
    tensors = {name: torch.randn(VOCABULARY, WIDTH) for name in ("bigram.newest", "bigram.next")}
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
    assert "bigram" in run(package, "inspect", "--formats")
    assert json.loads(run(package, "inspect", source, "--json"))["format"] == "bigram"
    run(package, "convert", source, tmp_path / "draft", "--target", "zoo:target")
    run(package, "convert", tmp_path / "draft", tmp_path / "back", "--to", "bigram")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config["architectures"] == ["DraftkitOnlyModel"]  # since vLLM has no class for it
    measured = run(
        package, "eval", "--target", "zoo:target", "--draft", tmp_path / "draft", "--limit", 2, "--max-new-tokens", 8,
        "--json",
    )  # fmt: skip
    (cell,) = json.loads(measured)["cells"]
    assert (cell["method"], cell["matches_greedy"]) == ("bigram", True)


@pytest.mark.long
def test_it_is_trained(package: Path, tmp_path: Path) -> None:
    origin = SamplesOrigin(target="zoo:target", tokenizer_sha256="0" * 64)
    write_samples(tmp_path / "samples.jsonl", samples(12), origin)
    run(
        package, "train", "--recipe", "bigram", "--target", "zoo:target", "--data", tmp_path / "samples.jsonl",
        "--out", tmp_path / "run", "--set", "optimization.max_steps=2", "--set", "options.width=8",
        "--set", "validation.share=0.3",
    )  # fmt: skip
    trained = load_file(tmp_path / "run" / "draft" / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in trained.items()} == {
        "newest.weight": (VOCABULARY, 8), "next.weight": (VOCABULARY, 8),
    }  # fmt: skip
