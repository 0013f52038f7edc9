"""The states of targets that are too big for one process, from a vLLM installation of its own.

vLLM's `extract_hidden_states` writes a file for each prompt: `token_ids` [T] and `hidden_states` [T, ids, H], where id
i is the state after i layers, and the number of layers stands for the state before the final norm.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from draftkit.data.samples import Sample
from draftkit.data.states.final_norm import load_final_norm
from draftkit.errors import DraftkitError, FormatError
from draftkit.io.atomic import scratch_folder

WORKER = Path(__file__).with_name("states_worker.py")
LOG_TAIL = 2000  # characters of vLLM's log that an error shows


class VllmExtractor:
    """States from a running worker: `layers` in convention S, then the last after `norm`."""

    def __init__(self, worker: Worker, layers: Sequence[int], num_layers: int, norm: nn.Module):
        self._worker = worker
        self._norm = norm
        ids = layer_ids(layers, num_layers)
        self._columns = [ids.index(layer) for layer in layers]
        self._last = ids.index(num_layers)

    def __call__(self, documents: Sequence[Sample]) -> Iterator[tuple[int, Tensor]]:
        paths = self._worker.ask([document.tokens.tolist() for document in documents])
        for place, (document, path) in enumerate(zip(documents, paths, strict=True)):
            states = self._read(path, document)
            last = self._norm(states[:, self._last])
            yield place, torch.cat((states[:, self._columns], last[:, None]), dim=1)

    def _read(self, path: Path, document: Sample) -> Tensor:
        """[T, ids, H] of a file, which is then removed. Raises `FormatError` unless it is the document's."""
        try:
            with safe_open(path, "pt") as file:
                tokens, states = file.get_tensor("token_ids"), file.get_tensor("hidden_states")
        except (OSError, SafetensorError) as error:
            raise FormatError(f"vLLM's states of document {document.id} cannot be read: {error}", where=path) from error
        if tokens.tolist() != document.tokens.tolist() or states.shape[0] != len(document):
            raise FormatError(
                f"vLLM's states of document {document.id} are of {len(tokens)} tokens, not of its {len(document)}",
                where=path,
            )
        path.unlink()
        path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
        return states


def layer_ids(layers: Sequence[int], num_layers: int) -> list[int]:
    """The ids that vLLM is asked for: it gives each once, in the order of the layers."""
    return sorted({*layers, num_layers})


class Worker:
    """The process that runs vLLM."""

    def __init__(self, process: subprocess.Popen[str], log: Path):
        self._process = process
        self._log = log

    def ask(self, prompts: list[list[int]]) -> list[Path]:
        """The files of the prompts' states. Raises `DraftkitError` with the end of the log when vLLM has failed."""
        self.tell(prompts)
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            raise self._failed()
        return [Path(path) for path in json.loads(answer)]

    def tell(self, value: object) -> None:
        """Send one line."""
        assert self._process.stdin is not None
        try:
            print(json.dumps(value), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._failed() from None

    def _failed(self) -> DraftkitError:
        self._process.wait()
        end = self._log.read_text(errors="replace")[-LOG_TAIL:].strip()
        return DraftkitError(f"vLLM has failed:\n{end}", hint="--vllm-python needs vLLM 0.32 and the target")


@contextmanager
def vllm_extractor(
    python: str,
    target: Path,
    layers: Sequence[int],
    *,
    num_layers: int,
    dtype: torch.dtype,
    longest: int,
    tensor_parallel: int,
    beside: Path,
) -> Iterator[VllmExtractor]:
    """Run vLLM with the Python interpreter `python` until the body ends.

    `longest`: tokens of a document, at most. vLLM's files of a shard lie in a hidden folder beside `beside` until they
    are read. Raises `DraftkitError` when there is no such interpreter, and when vLLM fails.
    """
    norm = load_final_norm(target, dtype)
    with scratch_folder(beside) as scratch:
        log = scratch / "vllm.log"
        with log.open("w") as errors, _running(python, errors) as process:
            worker = Worker(process, log)
            worker.tell(
                {
                    "model": str(target),
                    "layer_ids": layer_ids(layers, num_layers),
                    "dtype": str(dtype).removeprefix("torch."),
                    "max_model_len": longest + 1,
                    "tensor_parallel_size": tensor_parallel,
                    "folder": str(scratch),
                }
            )
            yield VllmExtractor(worker, layers, num_layers, norm)


@contextmanager
def _running(python: str, errors: IO[str]) -> Iterator[subprocess.Popen[str]]:
    # -I: the worker's own folder has modules that are named as the standard library's.
    command = [python, "-I", str(WORKER)]
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
    except OSError as error:
        raise DraftkitError(f"{python} cannot be run: {error.strerror}", hint="give vLLM's --vllm-python") from error
    with process:  # closes its input, at the end of which it ends, and waits
        try:
            yield process
        except BaseException:
            process.terminate()
            raise
