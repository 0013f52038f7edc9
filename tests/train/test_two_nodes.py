"""Nodes of torchrun over loopback, by the commands of the guide to several machines; and torchrun itself is stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from fixtures.checkpoints import pico
from fixtures.training.samples import samples

from draftkit.data.sample_files import write_samples
from draftkit.data.samples import SamplesOrigin

SETTINGS = (
    "--recipe", "eagle3", "--set", "device=cpu", "--set", "tokens_per_row=96", "--set", "options.steps=2",
    "--set", "save_every=2",
)  # fmt: skip


def nodes(folder: Path, steps: int, *more: str) -> list[subprocess.Popen[bytes]]:
    """Two torchruns, each the only process of its node; what they print is in `node-N.log`."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    train = ("-m", "draftkit", "train", "--target", folder / "target", "--data", folder / "data.jsonl", *SETTINGS)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    started = []
    for rank in (0, 1):
        launch = (
            "-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 1, "--node-rank", rank,
            "--master-addr", "127.0.0.1", "--master-port", port,
        )  # fmt: skip
        words = (*launch, *train, "--out", folder / "run", "--set", f"optimization.max_steps={steps}", *more)
        with (folder / f"node-{rank}.log").open("ab") as log:
            command = [sys.executable, *map(str, words)]
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    return started


def saved(folder: Path) -> list[int]:
    """The steps that checkpoints are of."""
    return [int(path.name.rpartition("-")[2]) for path in folder.glob("run/checkpoint-*")]


@pytest.mark.long
def test_two_nodes_are_stopped_and_go_on(tmp_path: Path) -> None:
    """A signal to one rank of one node saves the run, every rank ends with 143, and the run goes on from there."""
    pico.save_tokenizer(pico.save_llama(tmp_path / "target"))
    write_samples(tmp_path / "data.jsonl", samples(16), SamplesOrigin(target="pico", tokenizer_sha256="0" * 64))
    started = nodes(tmp_path, 4000)
    until = time.monotonic() + 300
    while not saved(tmp_path) and time.monotonic() < until and started[0].poll() is None:
        time.sleep(0.2)
    (rank,) = psutil.Process(started[1].pid).children()
    rank.send_signal(signal.SIGTERM)
    assert [process.wait(timeout=300) for process in started] != [0, 0]
    said = [(tmp_path / f"node-{number}.log").read_text() for number in (0, 1)]
    assert all("exitcode  : 143" in text for text in said), said
    step = max(saved(tmp_path))
    again = nodes(tmp_path, step + 2, "--resume")
    assert [process.wait(timeout=300) for process in again] == [0, 0], said
    assert max(saved(tmp_path)) == step + 2


@pytest.mark.long
def test_a_signal_to_torchrun_itself_saves_the_run(tmp_path: Path) -> None:
    """As Slurm and Kubernetes send it: each process saves before it ends with 143, and the run goes on from there."""
    pico.save_tokenizer(pico.save_llama(tmp_path / "target"))
    write_samples(tmp_path / "data.jsonl", samples(16), SamplesOrigin(target="pico", tokenizer_sha256="0" * 64))
    rank = tmp_path / "rank.sh"  # torchrun does not tell how processes ended that it has stopped
    rank.write_text(f'trap : TERM\n{sys.executable} -m draftkit train "$@"\necho $? >> {tmp_path}/code-$RANK\n')
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "--no-python", "sh", rank)
    where = ("--target", tmp_path / "target", "--data", tmp_path / "data.jsonl", "--out", tmp_path / "run")

    def started(steps: int, *more: str) -> subprocess.Popen[bytes]:
        words = [*launch, *where, *SETTINGS, "--set", f"optimization.max_steps={steps}", *more]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.Popen([sys.executable, *map(str, words)], env=environment)

    torchrun = started(4000)
    until = time.monotonic() + 300
    while not saved(tmp_path) and time.monotonic() < until and torchrun.poll() is None:
        time.sleep(0.2)
    torchrun.send_signal(signal.SIGTERM)
    torchrun.wait(timeout=300)
    assert [(tmp_path / f"code-{rank}").read_text() for rank in (0, 1)] == ["143\n", "143\n"]
    step = max(saved(tmp_path))
    assert (tmp_path / f"run/checkpoint-{step}/trainer_state.json").exists()
    assert started(step + 2, "--resume").wait(timeout=300) == 0
    assert max(saved(tmp_path)) == step + 2
