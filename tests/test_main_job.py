"""The four commands of the README, as a user types them, against a Hub on this machine.

The repositories have the names, configs and tensor names of the published ones, at a tiny size. Each command runs in a
process of its own. What is asserted: exit codes, the files that appear, and what reaches the Hub.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures.checkpoints import pico
from fixtures.servers.hub_uploads import WRITE, HubUploads
from fixtures.training.samples import samples

from draftkit.data.sample_files import write_samples
from draftkit.data.samples import SamplesOrigin

SOURCE, TARGET, OWN = "yuhuili/EAGLE-LLaMA3-Instruct-8B", "meta-llama/Meta-Llama-3-8B-Instruct", "me/my-draft"
CONVERTED = "EAGLE-LLaMA3-Instruct-8B-draftkit"
FORBIDDEN = ("HF_", "HTTP", "DRAFTKIT_")  # what would lead away from the Hub of this test
Ran = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubUploads]:
    """A Hub with the target and its EAGLE draft, whose weights are a pytorch_model.bin, as published."""
    folder = tmp_path_factory.mktemp("hub")
    target = pico.save_tokenizer(pico.save_llama(folder / "target"))
    draft = pico.write_checkpoint(folder / "draft", pico.eagle_config(), pico.eagle_tensors())
    with HubUploads(folder / "served") as server:
        for repo, files in ((TARGET, target), (SOURCE, draft)):
            server.create(repo)
            server.record(repo, "main", {path.name: path.read_bytes() for path in files.iterdir()})
        yield server


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands run, with a file of samples."""
    folder = tmp_path_factory.mktemp("place")
    write_samples(folder / "samples.jsonl", samples(24), SamplesOrigin(target=TARGET, tokenizer_sha256="0" * 64))
    return folder


@pytest.fixture(scope="module")
def typed(hub: HubUploads, place: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ran]:
    """What runs a line as it would be typed."""
    given = {name: value for name, value in os.environ.items() if not name.upper().startswith(FORBIDDEN)}
    settings: dict[str, Any] = {
        "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path_factory.mktemp("home")), "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1", "HF_TOKEN": WRITE, "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[1]), "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    program = f"{sys.executable} -m draftkit"

    def run(line: str) -> Ran:
        ran = subprocess.run(
            f"{program} {line.removeprefix('draftkit ')}", shell=True, cwd=place, env=given | settings,
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        return ran

    return run


@pytest.mark.slow
def test_the_four_commands(typed: Callable[[str], Ran], hub: HubUploads, place: Path) -> None:
    typed(f"draftkit convert {SOURCE}")
    assert {"config.json", "model.safetensors"} <= {path.name for path in (place / CONVERTED).iterdir()}

    typed(
        f"draftkit train --recipe eagle --target {TARGET} --data samples.jsonl --draft {SOURCE} --out run "
        "--set optimization.max_steps=2"
    )
    assert {"config.json", "model.safetensors"} <= {path.name for path in (place / "run" / "draft").iterdir()}

    typed(
        f"draftkit eval --target {TARGET} --draft run/draft --dataset zoo --limit 10 --max-new-tokens 16 "
        "--out result.json"
    )
    assert (place / "result.json").stat().st_size

    typed(f"draftkit push run/draft {OWN} --results result.json --license mit")
    assert {"config.json", "model.safetensors", "README.md", "eval/result.json"} <= hub.names(OWN)
    assert hub.commits[OWN] == 1
