"""Processes that store states beside this one, each on devices of its own."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from draftkit.data.states.write import StatesSettings
from draftkit.errors import DraftkitError, last_words
from draftkit.io.atomic import temporary_folder
from draftkit.io.store import is_address
from draftkit.targets.devices import device_named
from draftkit.targets.pretrained import trusts_remote_code

_log = logging.getLogger(__name__)


def check_shared(out: Path | str, workers: int) -> None:
    """Raise `DraftkitError` for more workers than one on a store."""
    if workers > 1 and is_address(out):
        raise DraftkitError(
            f"{workers} workers cannot share {out}: a store has no locks",
            hint=f"run {workers} commands, with --shard 0/{workers} to {workers - 1}/{workers}",
        )


def on_devices(settings: StatesSettings, workers: int) -> list[StatesSettings]:
    """The settings of each of so many workers on this machine: on a GPU the next ones are its own.

    Raises `DraftkitError` for more workers than there are GPUs for.
    """
    if workers == 1:
        return [settings]
    first = (settings.device or "cuda:0") if settings.vllm_python else device_named(settings.device)
    kind, _, index = first.partition(":")
    if kind != "cuda":
        return [settings] * workers
    begin, each = int(index or 0), settings.tensor_parallel if settings.vllm_python else 1
    if (there := torch.cuda.device_count()) and begin + workers * each > there:
        raise DraftkitError(
            f"{workers} workers need {workers * each} GPUs from cuda:{begin} on, and there are {there}",
            hint="fewer --workers; those on other machines take part by the same command on the same folder",
        )
    return [replace(settings, device=f"cuda:{begin + number * each}") for number in range(workers)]


@contextmanager
def further_workers(samples: Path, out: Path | str, settings: Sequence[StatesSettings]) -> Iterator[None]:
    """Run a worker with each of the settings until the body ends, which does what one leaves that fails; this process
    and they share the cores."""
    cores = max((os.cpu_count() or 1) // (len(settings) + 1), 1)
    if settings:
        torch.set_num_threads(cores)
    with temporary_folder() as scratch, ExitStack() as stack:
        for number, own in enumerate(settings, start=1):
            stack.enter_context(_worker(number, command_of(samples, out, own), scratch / f"{number}.log", cores))
        yield


@contextmanager
def _worker(number: int, words: Sequence[str], log: Path, cores: int) -> Iterator[None]:
    with log.open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "draftkit", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,  # Ctrl-C is for the command, which ends it
            env=os.environ | {"OMP_NUM_THREADS": str(cores)},
        )
    try:
        yield
    finally:
        code = process.poll()
        process.terminate()  # of one that still runs nothing is wanted: all is there, or this process ends
        process.wait()
        if code:
            _log.warning("worker %d ended with exit code %d:\n%s", number, code, last_words(log))


def command_of(samples: Path, out: Path | str, settings: StatesSettings) -> list[str]:
    """The words of the command that does this job, and ends with the process that gives it."""
    layers = None if settings.layers is None else ",".join(map(str, settings.layers))
    options = {
        "--layers": layers,
        "--encoding": settings.encoding,
        "--tokens-per-row": settings.tokens_per_row,
        "--shard-tokens": settings.shard_tokens,
        "--vllm-python": settings.vllm_python,
        "--tensor-parallel": settings.tensor_parallel,
        "--device": settings.device,
        "--dtype": settings.dtype,
        "--media-root": settings.media_root,
        "--shard": str(settings.part),
    }
    words = ["data", "states", str(samples), str(out), "--target", settings.target, "--json", "--with-parent"]
    words += [str(word) for option in options.items() if option[1] is not None for word in option]
    return [*words, "--trust-remote-code"] if trusts_remote_code() else words
