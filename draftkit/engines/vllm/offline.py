"""vLLM's offline engine, in a process of its own that may have another Python."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from draftkit.engines.vllm.records import Answer, DraftCounts, VllmRun
from draftkit.engines.vllm.request import end_token_ids, sampling_fields, warm_up
from draftkit.engines.vllm.settings import VllmSettings
from draftkit.engines.vllm.worker import Job, Output, Prompt, Result
from draftkit.errors import DraftkitError
from draftkit.evaluate.measure import Progress
from draftkit.hub.locate import locate
from draftkit.io.atomic import temporary_folder
from draftkit.models.devices import device_named, dtype_named
from draftkit.models.remote_code import trusts_remote_code
from draftkit.models.target import read_config
from draftkit.requests import Request
from draftkit.results.settings import Settings

WORKER = Path(__file__).with_name("worker.py")
LOG_LINES = 30  # of vLLM's output that an error shows


@dataclass(frozen=True)
class OfflineEngine:
    """vLLM on this machine: the interpreter, the arguments of `vllm.LLM`, and the ids that end an output."""

    python: str
    arguments: dict[str, object]
    end_ids: frozenset[int]


def offline_engine(
    target: str,
    requests: Sequence[Request],
    settings: Settings,
    vllm: VllmSettings,
    speculative: Mapping[str, object] | None,
) -> OfflineEngine:
    """The engine for a target (path, Hub id or `zoo:target`), with a draft when there is a `speculative_config`.

    Raises `DraftkitError` when no interpreter is given and the running one has no vLLM.
    """
    python = find_python(vllm.python)
    folder = locate(target).path
    device = device_named(settings.device)
    longest = max(request.max_length for request in requests)
    # A target without such a number, as state space models, has no limit.
    context = getattr(read_config(folder).get_text_config(), "max_position_embeddings", sys.maxsize)
    arguments: dict[str, object] = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "dtype": str(dtype_named(settings.dtype, device)).removeprefix("torch."),
        "enforce_eager": settings.eager or device == "cpu",
        # vLLM stops drafting where a whole draft would not fit any more.
        "max_model_len": min(longest + settings.num_speculative_tokens + 2, max(context, longest)),
        "max_num_seqs": min(settings.concurrency, len(requests)),
        "tensor_parallel_size": vllm.tensor_parallel_size,
        "enable_prefix_caching": False,  # the warm-up has the same prompts
        "disable_log_stats": False,
        "trust_remote_code": trusts_remote_code(),
    }
    if vllm.gpu_memory_utilization is not None:
        arguments["gpu_memory_utilization"] = vllm.gpu_memory_utilization
    stated = dict(vllm.engine_arguments)
    further = stated.pop("speculative_config", {})
    arguments |= stated
    if speculative is not None:
        arguments["speculative_config"] = {**speculative, **(further if isinstance(further, Mapping) else {})}
    return OfflineEngine(python, arguments, end_token_ids(folder))


def find_python(stated: str | None) -> str:
    """The interpreter to run vLLM with. Raises `DraftkitError` when none is stated and the running one has no vLLM."""
    if stated is None and find_spec("vllm") is None:
        raise DraftkitError(
            "this Python environment has no vLLM",
            where=sys.executable,
            hint="pass --vllm-python ENV/bin/python of an environment with vLLM, or --vllm-url of a running server",
        )
    return stated or sys.executable


def run_offline(
    name: str, engine: OfflineEngine, requests: Sequence[Request], settings: Settings, on_progress: Progress
) -> VllmRun:
    """Start vLLM, warm it up, run all requests and end it. Raises `DraftkitError` with its last words when it fails."""
    warming = warm_up(requests, settings.concurrency, settings.num_speculative_tokens)
    job: Job = {
        "engine": engine.arguments,
        "warm_up": [_prompt(request, engine) for request in warming],
        "prompts": [_prompt(request, engine) for request in requests],
    }
    with temporary_folder() as scratch:
        log = scratch / "vllm.log"
        with log.open("w") as errors, _running(engine.python, job, errors) as answers:
            for line in answers:
                answer = json.loads(line)
                if "result" in answer:
                    on_progress(name, len(requests), len(requests), _length(answer["result"]))
                    return _run(answer["result"])
                on_progress(name, answer["finished"], len(requests), answer["length"])
        end = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
    raise DraftkitError(f"vLLM has failed:\n{end}", where=engine.python)


def _prompt(request: Request, engine: OfflineEngine) -> Prompt:
    return {"tokens": list(request.prompt), "sampling": sampling_fields(request, engine.end_ids)}


@contextmanager
def _running(python: str, job: Job, errors: IO[str]) -> Iterator[IO[str]]:
    """What the worker writes. After an error here, the worker ends, and with it the processes that vLLM has started."""
    # The worker's own folder stays out of its path: it has modules for draftkit. Its last words are not to be buffered.
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
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
        raise DraftkitError(f"{python} cannot be run: {error.strerror}", hint="give vLLM's --vllm-python") from error
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        try:
            with process.stdin as questions:
                json.dump(job, questions)
        except BrokenPipeError:  # it has ended already; its output says why
            pass
        try:
            yield process.stdout
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            raise


def _run(result: Result) -> VllmRun:
    answers = tuple(map(_answer, result["outputs"]))
    return VllmRun(answers, result["seconds"], _counts(result), result["version"])


def _counts(result: Result) -> DraftCounts | None:
    counters = result["counters"]
    if not counters:
        return None
    return DraftCounts(
        counters["num_drafts"],
        counters["num_draft_tokens"],
        counters["num_accepted_tokens"],
        tuple(counters["num_accepted_tokens_per_pos"]),
    )


def _length(result: Result) -> float:
    counts = _counts(result)
    return 1.0 if counts is None else counts.acceptance_length


def _answer(output: Output) -> Answer:
    histogram, drafted = output["histogram"], output["num_draft_tokens"]
    drafts = None if histogram is None or drafted is None else DraftCounts.of_histogram(histogram, drafted)
    return Answer(tuple(output["tokens"]), output["ttft"], output["latency"], drafts=drafts)
