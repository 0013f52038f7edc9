"""Measuring a server takes a client, without torch and transformers: an image that serves may have others of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
from fixtures.servers.speaking import SpeakingServer, simulated

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "docs/client-requirements.txt"
K = 3
# Runs the command where what a client does without cannot be imported.
REFUSING = """
import importlib.abc, sys
_, refused, *arguments = sys.argv
class Refusing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused.split(","):
            raise ImportError(f"a client imports {name}")
sys.meta_path.insert(0, Refusing())
sys.argv = ["draftkit", *arguments]
from draftkit.__main__ import main
main()
"""
NEEDLESS = (
    "torch,transformers,numpy,accelerate,peft,safetensors,tokenizers,huggingface_hub,jinja2,psutil,datasets,triton"
)


def requirements(lines: list[str]) -> set[str]:
    return {re.split(r"[>=<~!;\[ ]", line)[0] for line in lines if line and not line.startswith("#")}


def measured(*command: object) -> dict[str, object]:
    """The one cell of a measurement of two servers, without a target here."""
    with SpeakingServer("vllm", simulated(K), K) as drafting, SpeakingServer("vllm", simulated(0)) as plain:
        options = ("--server", drafting.url, "--server-baseline", plain.url, "--k", K)
        asked = (
            "eval",
            *options,
            "--dataset",
            "zoo",
            "--limit",
            2,
            "--max-new-tokens",
            8,
            "--set",
            "repeats=0",
            "--json",
        )
        ran = subprocess.run([*map(str, (*command, *asked))], capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr
    (cell,) = json.loads(ran.stdout)["cells"]
    return dict(cell)


@pytest.mark.slow
def test_a_server_is_measured_without_torch_and_transformers() -> None:
    cell = measured(sys.executable, "-c", REFUSING, NEEDLESS)
    assert cell["acceptance_length"]["mean"] > 1  # type: ignore[index]
    assert cell["speedup"] is not None


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_one_message_without_them() -> None:
    command = [
        sys.executable,
        "-c",
        REFUSING,
        NEEDLESS,
        "eval",
        "--target",
        "zoo:target",
        "--server",
        "http://127.0.0.1:9",
    ]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "the server does not answer" in ran.stderr


def test_the_list_of_a_client_is_of_the_package_itself() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert requirements(REQUIREMENTS.read_text().splitlines()) < requirements(project["dependencies"])


@pytest.mark.long
def test_the_list_of_a_client_is_enough(tmp_path: Path) -> None:
    """As the guide says it for an image that serves: the package without what it depends on, and that list."""
    venv.create(tmp_path / "client", with_pip=True)
    python = tmp_path / "client/bin/python"
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for what in (("-r", REQUIREMENTS), ("--no-deps", ROOT)):
        subprocess.run([*install, *what], check=True, timeout=600)
    listed = subprocess.run([python, "-m", "pip", "list"], capture_output=True, text=True, check=True).stdout
    assert not {"torch", "transformers", "numpy"} & {line.split()[0] for line in listed.splitlines()}
    cell = measured(tmp_path / "client/bin/draftkit")
    assert cell["acceptance_length"]["mean"] > 1  # type: ignore[index]
