"""Generation with vLLM; run by `draftkit.engines.vllm.offline` with the Python of vLLM's own environment.

Reads a `Job` as JSON from standard input. Writes JSON lines to standard output: an object with `finished` (requests)
and `length` (acceptance length so far) every second, and at the end one with `result`. Anything that is printed goes to
standard error.
"""

import json
import os
import sys
import time
from threading import Event, Thread
from typing import IO, Any, TypedDict

PREFIX = "vllm:spec_decode_"
PER_POSITION = "num_accepted_tokens_per_pos"
COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", PER_POSITION)
POLL_SECONDS = 1.0


class Prompt(TypedDict):
    tokens: list[int]
    sampling: dict[str, Any]  # arguments of SamplingParams


class Job(TypedDict):
    engine: dict[str, Any]  # arguments of LLM
    warm_up: list[Prompt]
    prompts: list[Prompt]


class Output(TypedDict):
    tokens: list[int]
    ttft: float | None
    latency: float | None
    histogram: list[int] | None
    num_draft_tokens: int | None


class Result(TypedDict):
    outputs: list[Output]
    seconds: float
    counters: dict[str, Any]  # name → count, or counts by position; empty without speculative decoding
    version: str


def prepare_cpu() -> None:
    """vLLM's engine in this process."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def build(settings: dict[str, Any]) -> Any:
    """The engine, with each request's own counts where this vLLM has them."""
    from vllm import LLM, EngineArgs  # type: ignore[import-not-found]

    if "speculative_config" in settings and hasattr(EngineArgs, "per_request_spec_decode_metrics"):
        settings = {"per_request_spec_decode_metrics": "summary"} | settings
    return LLM(**settings)


def generate(llm: Any, prompts: list[Prompt]) -> list[Any]:
    from vllm import SamplingParams

    tokens = [{"prompt_token_ids": prompt["tokens"]} for prompt in prompts]
    sampling = [SamplingParams(detokenize=False, **prompt["sampling"]) for prompt in prompts]
    return llm.generate(tokens, sampling, use_tqdm=False)


def read_counters(llm: Any) -> dict[str, Any]:
    """vLLM's counters of drafts and of finished requests, summed over its engines."""
    counters: dict[str, Any] = {"finished": 0}
    for metric in llm.get_metrics():
        if metric.name == "vllm:request_success":
            counters["finished"] += metric.value
        elif (name := metric.name.removeprefix(PREFIX)) in COUNTERS:
            if name == PER_POSITION:
                earlier = counters.get(name, [0] * len(metric.values))
                counters[name] = [a + b for a, b in zip(earlier, metric.values, strict=True)]
            else:
                counters[name] = counters.get(name, 0) + metric.value
    return counters


def difference(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    return {
        name: [a - b for a, b in zip(value, before[name], strict=True)]
        if isinstance(value, list)
        else value - before[name]
        for name, value in after.items()
    }


def report_progress(llm: Any, before: dict[str, Any], done: Event, answers: IO[str]) -> None:
    while not done.wait(POLL_SECONDS):
        counted = difference(read_counters(llm), before)
        length = 1 + counted.get("num_accepted_tokens", 0) / max(counted.get("num_drafts", 0), 1)
        print(json.dumps({"finished": counted["finished"], "length": length}), file=answers, flush=True)


def as_output(output: Any) -> Output:
    """Times are those of the engine, from when the request was scheduled: waiting for its turn is not in them."""
    completion, times = output.outputs[0], output.metrics
    drafts = getattr(completion, "spec_decode_metrics", None)
    return {
        "tokens": list(completion.token_ids),
        "ttft": times and times.first_token_ts - times.scheduled_ts,
        "latency": times and times.last_token_ts - times.scheduled_ts,
        "histogram": drafts and drafts.histogram,
        "num_draft_tokens": drafts and drafts.num_draft_tokens,
    }


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # before vLLM, which logs to standard output
    job: Job = json.load(sys.stdin)
    try:
        import vllm
    except ModuleNotFoundError as error:
        sys.exit(f"{sys.executable} has no vLLM: {error}")
    from vllm.platforms import current_platform  # type: ignore[import-not-found]

    if current_platform.is_cpu():
        prepare_cpu()
    llm = build(job["engine"])
    generate(llm, job["warm_up"])
    before, done = read_counters(llm), Event()
    progress = Thread(target=report_progress, args=(llm, before, done, answers), daemon=True)
    progress.start()
    began = time.perf_counter()
    outputs = generate(llm, job["prompts"])
    seconds = time.perf_counter() - began
    done.set()
    progress.join()
    counters = difference(read_counters(llm), before)
    del counters["finished"]
    result: Result = {
        "outputs": [as_output(output) for output in outputs],
        "seconds": seconds,
        "counters": counters,
        "version": vllm.__version__,
    }
    print(json.dumps({"result": result}), file=answers, flush=True)


if __name__ == "__main__":
    main()
