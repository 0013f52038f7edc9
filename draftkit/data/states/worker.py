"""The process that computes streamed states: `draftkit data stream`, and how a training run keeps one beside itself."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from draftkit.data.states.shards import MANIFEST, SAMPLED, read_manifest, target_sha256
from draftkit.data.states.stream import PAUSE, serve
from draftkit.data.states.vllm import vllm_extractor
from draftkit.engines.vllm.process import find_python
from draftkit.errors import DraftkitError, TargetError
from draftkit.loading import open_target
from draftkit.targets.devices import DTYPES
from draftkit.targets.remote_code import trusts_remote_code

LOG_LINES = 30  # of a worker that has failed
ATTEMPTS = 3  # of a worker that ends soon after it was started
SOON = 600.0  # seconds


def run_worker(
    folder: Path,
    target: str,
    *,
    python: str | None,
    tensor_parallel: int = 1,
    device: str | None = None,
    alive: Callable[[], bool] = lambda: True,
) -> int:
    """Compute the states that training wants in `folder` with vLLM, until it is over. Returns how many rows.

    `python`: the interpreter of an environment with vLLM, None for the running one; `device` as of `vllm_extractor`.
    Waits for training to begin. Raises `DraftkitError` for another target than the run's, and when vLLM fails.
    """
    interpreter = find_python(python)
    while not (folder / MANIFEST).exists():
        if not alive():
            return 0
        time.sleep(PAUSE)
    manifest, opened = read_manifest(folder), open_target(target)
    if (found := target_sha256(opened.folder, SAMPLED)) != manifest.target_sha256:
        raise TargetError(
            f"the run has another target than {target}",
            where=folder / MANIFEST,
            expected=f"{manifest.target}, fingerprint {manifest.target_sha256[:12]}…; found {found[:12]}…",
        )
    with vllm_extractor(
        interpreter,
        opened.folder,
        manifest.layers,
        num_layers=opened.facts.num_hidden_layers,
        dtype=DTYPES[manifest.dtype],
        longest=manifest.shard_tokens,
        tensor_parallel=tensor_parallel,
        device=device,
        beside=folder.absolute() / "vllm",
    ) as extractor:
        return serve(folder, extractor, alive)


def parent_lives() -> Callable[[], bool]:
    """What says whether the process that started this one is still there."""
    parent = os.getppid()
    return lambda: os.getppid() == parent


class LocalWorker:
    """A worker on this machine, started anew when it has ended before training has."""

    def __init__(self, arguments: list[str], log: Path):
        self._arguments = arguments
        self._log = log
        self._failures = 0
        self._start()

    def check(self) -> None:
        """See to it that the worker runs. Raises `DraftkitError` with its last words where it keeps ending."""
        code = self.process.poll()
        if code is None:
            return
        self._failures = self._failures + 1 if time.monotonic() - self._started < SOON else 1
        if self._failures >= ATTEMPTS:
            end = "\n".join(self._log.read_text(errors="replace").splitlines()[-LOG_LINES:])
            raise DraftkitError(f"the worker that computes states has ended with exit code {code}:\n{end}")
        self._start()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()

    def _start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "draftkit", "data", "stream", *self._arguments, "--with-parent"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the run, which ends it
            )
        self._started = time.monotonic()


@contextmanager
def local_worker(
    folder: Path, target: str, python: str, *, tensor_parallel: int, device: str | None
) -> Iterator[LocalWorker]:
    """Keep a worker until the body ends."""
    arguments = [str(folder), "--target", target, "--vllm-python", python, "--tensor-parallel", str(tensor_parallel)]
    if device is not None:
        arguments += ["--device", device]
    if trusts_remote_code():
        arguments.append("--trust-remote-code")
    worker = LocalWorker(arguments, folder / "worker.log")
    try:
        yield worker
    finally:
        worker.stop()
