"""The wheel: it builds, carries the zoo, and its command runs outside the checkout."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import draftkit
from draftkit.version import DISTRIBUTION

ROOT = Path(__file__).resolve().parent.parent
# docs/reference is written when the site is built.
NOTEBOOK = ROOT / "docs/guides/notebook.md"  # whose cells go on from each other: tests/docs/test_notebook_page.py
PAGES = [ROOT / "README.md", *(page for page in sorted(ROOT.glob("docs/[!r_]*/*.md")) if page != NOTEBOOK)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (built,) = out.glob("*.whl")
    return built


@pytest.mark.slow
def test_wheel_contains_the_zoo(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for needed in ("target/model.safetensors", "eagle/pytorch_model.bin", "eagle3/pytorch_model.bin"):
        assert f"draftkit/zoo/models/{needed}" in names
    assert wheel.stat().st_size < 40_000_000
    assert "draftkit/zoo/prompts.jsonl" in names


@pytest.mark.slow
def test_hints_name_the_distribution_and_extras_that_it_has(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "draftkit").rglob("*.py")]
    hinted = {extra for text in sources for extra in re.findall(r"with_extra\(['\"](\w+)['\"]\)", text)}
    texts = (page.read_text(encoding="utf-8") for page in PAGES)
    told = re.findall(r"pip install '([\w-]+)\[(\w+)\]'", "".join(texts))
    assert metadata["Name"] == DISTRIBUTION
    assert hinted | {extra for _, extra in told} <= set(metadata.get_all("Provides-Extra"))
    assert {name for name, _ in told} == {DISTRIBUTION}
    assert "gguf" in hinted
    assert not [text for text in sources if "pip install 'draftkit" in text]


def test_zoo_weights_stay_small() -> None:
    files = (ROOT / "draftkit" / "zoo").rglob("*")
    assert sum(file.stat().st_size for file in files if file.is_file()) <= 35_000_000


@pytest.mark.slow
def test_command_runs_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    command = [str(site / "bin" / "draftkit"), "convert", "zoo:eagle", "converted"]
    environment = os.environ | {"PYTHONPATH": str(site)}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "converted" / "model.safetensors").is_file()
    where = [sys.executable, "-c", "import draftkit; print(draftkit.__file__)"]
    imported = subprocess.run(where, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert imported.stdout.startswith(str(site))


def python_examples() -> dict[str, str]:
    texts = {page.stem: page.read_text(encoding="utf-8") for page in PAGES}
    found = {name: re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE) for name, text in texts.items()}
    return {
        f"{name} {number}": example for name, examples in found.items() for number, example in enumerate(examples, 1)
    }


@pytest.mark.long
@pytest.mark.parametrize("example", python_examples().values(), ids=python_examples())
def test_examples_in_python_run_on_the_public_names(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "from draftkit." not in example
    exec(compile(example, "example", "exec"), {})
    assert capsys.readouterr().out


def test_every_public_name_is_there() -> None:
    assert all(getattr(draftkit, name) is not None for name in draftkit.__all__)
