"""States that a worker computes a little ahead of training, which uses them up: no more than a few rows are ever there.

Trainer and worker share a folder, on one machine or several:

- `manifest.json`: whose states are wanted, as of stored ones, without shards; `shard_tokens` bounds those of a row.
- `wanted/NUMBER-KEY.json`: the tokens of the samples of a row; the lowest number comes first.
- `rows/KEY.safetensors`: their states, as a shard has them. The trainer takes away both when it has read them.
- `failed/KEY.json`: why there are none.
- `done`: training is over.

Files appear whole, and nothing else is known: either side may be killed and begin again, and any number of workers
share the rows, by a lock file for each. The worker is `draftkit data stream`, which a
training run can keep beside itself.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import accumulate, islice
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from draftkit.data.samples import Sample
from draftkit.data.states.folder import write_tensors
from draftkit.data.states.offline import places_of, row_states
from draftkit.data.states.online import States
from draftkit.data.states.opened import read_sample
from draftkit.data.states.shards import (
    MANIFEST,
    NAMES,
    Manifest,
    read_manifest,
    sampled_sha256,
    write_manifest,
)
from draftkit.data.states.vllm import vllm_extractor
from draftkit.data.states.write import Extractor, shard_tensors
from draftkit.engines.vllm.process import find_python
from draftkit.errors import DraftkitError, FormatError, TargetError, command, last_words
from draftkit.io.atomic import is_empty, write_file
from draftkit.io.jsonfile import dump, read_object
from draftkit.io.lock import piece_lock, settle_piece_locks
from draftkit.io.records import to_dict
from draftkit.loading import open_target
from draftkit.targets.devices import DTYPES
from draftkit.targets.pretrained import trusts_remote_code
from draftkit.targets.states import AuxLayers

WANTED, ROWS, FAILED, DONE = "wanted", "rows", "failed", "done"
ROWS_TOGETHER = 8  # rows that are computed in one call
PAUSE = 0.02  # seconds between two looks at the folder
PATIENCE = 60.0  # seconds between two complaints that nothing comes

_log = logging.getLogger(__name__)


def begin_stream(folder: Path, manifest: Manifest) -> None:
    """Make the folder say what is wanted; what is there of other states goes.

    Raises `DraftkitError` for a folder of anything else.
    """
    if not is_empty(folder):
        if not (folder / MANIFEST).exists():
            raise DraftkitError("the folder for streamed states holds something else", where=folder)
        if _meaning(read_manifest(folder)) != _meaning(manifest):
            end_stream(folder)
    (folder / DONE).unlink(missing_ok=True)
    write_manifest(folder, manifest)  # first: it says whose the folder is, should the run be killed
    for name in (WANTED, ROWS, FAILED):
        (folder / name).mkdir(exist_ok=True)


def finish_stream(folder: Path) -> None:
    """Let workers know that training is over, and take away all states."""
    end_stream(folder)
    (folder / DONE).touch()


def end_stream(folder: Path) -> None:
    for name in (WANTED, ROWS, FAILED):
        shutil.rmtree(folder / name, ignore_errors=True)


def _meaning(manifest: Manifest) -> dict[str, object]:
    return {name: value for name, value in to_dict(manifest).items() if name not in NAMES}


class StreamedStates:
    """The trainer's side, of process `rank`. What an earlier run has left is used where it is wanted again.

    `samples`: those that numbers mean. `check` is called while a row is waited for, and raises where none will come.
    States are returned in `dtype` on the CPU.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        samples: Sequence[Sample],
        aux_layers: AuxLayers | None,
        *,
        dtype: torch.dtype,
        rank: int = 0,
        check: Callable[[], None] = lambda: None,
    ):
        self.folder = folder
        self._manifest = manifest
        self._samples = samples
        self._columns = places_of(aux_layers, manifest, folder)
        self._dtype = dtype
        self._rank = rank
        self._check = check
        self._announced = 0
        self._wanted: dict[str, Path] = {}
        for path in [*folder.glob(f"{WANTED}/*-{rank}.*"), *folder.glob(f"{FAILED}/{rank}.*")]:
            path.unlink()

    def announce(self, numbers: Sequence[int]) -> None:
        """Have the states of a row of samples computed, after those that were announced before."""
        content = self._content(numbers)
        key = self._key(content)
        if key not in self._wanted:
            self._wanted[key] = self.folder / WANTED / f"{self._announced:09d}-{key}.json"
            self._announced += 1
            write_file(self._wanted[key], content)

    def states_of(self, numbers: Sequence[int], size: int) -> States:
        """The states of a row of `size` tokens, of these samples, then zeros; they are gone from the folder then.

        Raises `DraftkitError` where the worker could not compute them.
        """
        self.announce(numbers)
        content = self._content(numbers)
        key = self._key(content)
        path = self.folder / ROWS / f"{key}.safetensors"
        self._wait_for(path, key, content)
        with safe_open(path, "pt") as file:
            offsets = file.get_tensor("offsets").tolist()
        if offsets != [0, *accumulate(len(self._samples[number]) for number in numbers)]:
            raise FormatError("these states are of other samples", where=path, hint=f"remove {self.folder}")
        manifest, dtype = self._manifest, self._dtype
        found = (read_sample(path, offsets, place, manifest.encoding, dtype) for place in range(len(numbers)))
        states = row_states(found, self._columns, size, manifest.hidden_size, dtype)
        self._wanted.pop(key).unlink()
        path.unlink()
        return states

    def _content(self, numbers: Sequence[int]) -> bytes:
        return json.dumps([self._samples[number].tokens.tolist() for number in numbers]).encode()

    def _key(self, content: bytes) -> str:
        return f"{self._rank}.{hashlib.sha256(content).hexdigest()[:24]}"

    def _wait_for(self, path: Path, key: str, content: bytes) -> None:
        complained = time.monotonic()
        while not path.exists():
            failure = self.folder / FAILED / f"{key}.json"
            if failure.exists():
                raise DraftkitError(str(read_object(failure)["error"]), where=self.folder)
            if not self._wanted[key].exists():  # another process may have made the folder anew
                write_file(self._wanted[key], content)
            self._check()
            if time.monotonic() - complained > PATIENCE:
                _log.warning("waiting for states: %s computes them", command("draftkit", "data", "stream", self.folder))
                complained = time.monotonic()
            time.sleep(PAUSE)


def serve(
    folder: Path, extractor: Extractor, alive: Callable[[], bool] = lambda: True, rows_together: int = ROWS_TOGETHER
) -> int:
    """The worker's side: compute what is wanted until training is over, or not `alive`. Returns how many rows.

    Up to `rows_together` rows are computed in one call, which is what vLLM makes batches of. Other workers may serve
    the same folder: each row is computed by the one that locks it. Raises `DraftkitError` where the extractor fails
    for another reason than the states of a sample, and when other states are wanted than in the beginning.
    """
    manifest, rows = read_manifest(folder), 0
    while alive() and not (folder / DONE).exists():
        with ExitStack() as locks:
            mine = list(islice(_locked_rows(folder, locks), rows_together))
            if mine and _meaning(read_manifest(folder)) != _meaning(manifest):
                raise DraftkitError("the run wants other states now", where=folder, hint="start the worker again")
            rows += _answer(folder, mine, manifest, extractor)
        if not mine:
            time.sleep(PAUSE)
    settle_piece_locks(folder)
    return rows


def _locked_rows(folder: Path, locks: ExitStack) -> Iterator[Path]:
    """The rows that are wanted, the first ones first, which no other worker has locked or answered."""
    for path in sorted(folder.glob(f"{WANTED}/*.json")):
        key = _key_of(path)
        if (
            not _is_answered(folder, key)
            and locks.enter_context(piece_lock(folder, key))
            and not _is_answered(folder, key)
        ):
            yield path


def _answer(folder: Path, wanted: Sequence[Path], manifest: Manifest, extractor: Extractor) -> int:
    """Write the states of rows, and return how many of them were still wanted."""
    rows: dict[str, list[Sample]] = {}
    for path in wanted:
        with suppress(FileNotFoundError):
            texts = json.loads(path.read_bytes())
            rows[_key_of(path)] = [Sample.of(str(place), tokens, []) for place, tokens in enumerate(texts)]
    try:
        found = dict(extractor([sample for samples in rows.values() for sample in samples])) if len(rows) > 1 else {}
    except TargetError:
        found = {}  # each row by itself, to see which it is
    begin = 0
    for key, samples in rows.items():
        computed = [found[place] for place in range(begin, begin + len(samples))] if found else None
        begin += len(samples)
        try:
            tensors = shard_tensors(samples, extractor if computed is None else _given(computed), manifest)
        except TargetError as error:
            write_file(folder / FAILED / f"{key}.json", dump({"error": str(error)}).encode())
        else:
            write_tensors(folder / ROWS / f"{key}.safetensors", tensors)
    return len(rows)


def _given(states: Sequence[Tensor]) -> Extractor:
    """An extractor of samples whose states are known."""
    return lambda samples: enumerate(states)


def _key_of(wanted: Path) -> str:
    return wanted.stem.partition("-")[2]


def _is_answered(folder: Path, key: str) -> bool:
    return (folder / ROWS / f"{key}.safetensors").exists() or (folder / FAILED / f"{key}.json").exists()


ATTEMPTS = 3  # how often in a row a worker may end soon after it was started
SOON = 600.0  # seconds after its start within which a worker ends soon


def run_worker(
    folder: Path,
    target: str,
    *,
    python: str | None,
    tensor_parallel: int = 1,
    device: str | None = None,
    alive: Callable[[], bool] = lambda: True,
    rows_together: int = ROWS_TOGETHER,
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
    if (found := opened.mark(sampled_sha256(opened.folder))) != manifest.target_sha256:
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
        return serve(folder, extractor, alive, rows_together)


def parent_lives() -> Callable[[], bool]:
    """A function that says whether the process that started this one is still there."""
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
            raise DraftkitError(
                f"the worker that computes states has ended with exit code {code}:\n{last_words(self._log)}"
            )
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
        settle_piece_locks(folder)
