"""vLLM's offline engine; run by `draftkit.engines.vllm.process` with the Python of vLLM's own environment.

Reads JSON lines from standard input: first the arguments of `LLM`, then questions, each a list of prompts. Answers each
with lines on standard output: `{"samples": …}` every second, and at the end a `WorkerAnswer`. Anything that is printed
goes to standard error.

Also for `extract_hidden_states`, whose engine writes a file of states for each prompt: then an answer is complete once
its files are.
"""

import base64
import fcntl
import json
import os
import sys
import time
from io import BytesIO
from threading import Event, Thread
from typing import IO, Any, TypedDict

REPORT_SECONDS = 1.0
WRITTEN_SECONDS = 0.005

Samples = list[tuple[str, int | None, float]]  # a counter's name, the draft position where it has one, its value


class TokensAlone(TypedDict):
    tokens: list[int]
    sampling: dict[str, Any]  # arguments of SamplingParams


class PromptTokens(TokensAlone, total=False):
    images: list[str]  # files in base64, for each of which one token stands in the prompt


class Output(TypedDict):
    tokens: list[int]
    ttft: float | None
    latency: float | None
    histogram: list[int] | None
    num_draft_tokens: int | None
    states: str | None  # the file of hidden states
    logprobs: list[list[tuple[int, float]]] | None  # of each token and of the likeliest ones there, where asked for


class WorkerAnswer(TypedDict):
    outputs: list[Output]
    seconds: float
    before: Samples
    after: Samples
    version: str


def extracts_states(arguments: dict[str, Any]) -> bool:
    return "kv_transfer_config" in arguments


def prepare_cpu(arguments: dict[str, Any]) -> None:
    """vLLM's engine in this process; for states no pinned memory, which torch has only with an accelerator."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    if not extracts_states(arguments):
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        return
    import torch

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    empty_like = torch.empty_like

    def unpinned(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        return empty_like(tensor, **options | {"pin_memory": False})

    torch.empty_like = unpinned  # type: ignore[assignment]


def complete_events() -> None:
    """The CPU build's stand-ins for CUDA events lack `query`: what they would wait for is already done."""
    import torch

    for event in (torch.Event, torch.cuda.Event):
        if event.__name__ == "_EventPlaceholder":
            event.query = lambda self: True  # type: ignore[method-assign]


def build(arguments: dict[str, Any]) -> Any:
    """The engine, with each request's own counts where this vLLM has them."""
    from vllm import LLM, EngineArgs

    drafts = "speculative_config" in arguments and not extracts_states(arguments)
    if drafts and hasattr(EngineArgs, "per_request_spec_decode_metrics"):
        arguments = {"per_request_spec_decode_metrics": "summary"} | arguments
    return LLM(**arguments)


def generate(llm: Any, prompts: list[PromptTokens]) -> list[Any]:
    from vllm import SamplingParams

    asked = [{"prompt_token_ids": prompt["tokens"]} | media_of(prompt) for prompt in prompts]
    sampling = [SamplingParams(detokenize=False, **prompt["sampling"]) for prompt in prompts]
    return llm.generate(asked, sampling, use_tqdm=False)


def media_of(prompt: PromptTokens) -> dict[str, Any]:
    if not prompt.get("images"):
        return {}
    from PIL import Image

    images = [Image.open(BytesIO(base64.b64decode(image))).convert("RGB") for image in prompt["images"]]
    return {"multi_modal_data": {"image": images}}


def read_samples(llm: Any) -> Samples:
    """vLLM's numbers and lists of numbers by position; of each engine its own."""
    samples: Samples = []
    for metric in llm.get_metrics():
        if hasattr(metric, "values"):
            samples += [(metric.name, position, value) for position, value in enumerate(metric.values)]
        elif hasattr(metric, "value"):
            samples.append((metric.name, None, metric.value))
    return samples


def report(llm: Any, done: Event, answers: IO[str]) -> None:
    while not done.wait(REPORT_SECONDS):
        print(json.dumps({"samples": read_samples(llm)}), file=answers, flush=True)


def is_written(path: str) -> bool:
    """The writer holds the lock beside a file until it is complete."""
    with open(path + ".lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def wait_for_states(llm: Any, paths: list[str], on_cpu: bool) -> None:
    while not all(map(is_written, paths)):
        if on_cpu:
            llm.llm_engine.step()  # an engine in this process writes the last files only when it is stepped
        time.sleep(WRITTEN_SECONDS)


def as_output(output: Any) -> Output:
    """Times are those of the engine, from when the request was scheduled: waiting for its turn is not in them."""
    completion, times = output.outputs[0], output.metrics
    drafts = getattr(completion, "spec_decode_metrics", None)
    stored = getattr(output, "kv_transfer_params", None) or {}
    logprobs = getattr(completion, "logprobs", None)
    return {
        "tokens": list(completion.token_ids),
        "ttft": times and times.first_token_ts - times.scheduled_ts,
        "latency": times and times.last_token_ts - times.scheduled_ts,
        "histogram": drafts and drafts.histogram,
        "num_draft_tokens": drafts and drafts.num_draft_tokens,
        "states": stored.get("hidden_states_path"),
        "logprobs": logprobs and [[(token, one.logprob) for token, one in row.items()] for row in logprobs],
    }


def answer(llm: Any, prompts: list[PromptTokens], *, counts: bool, on_cpu: bool, answers: IO[str]) -> WorkerAnswer:
    import vllm

    before, done = read_samples(llm) if counts else [], Event()
    reporting = Thread(target=report, args=(llm, done, answers), daemon=True)
    if counts:
        reporting.start()
    began = time.perf_counter()
    outputs = [as_output(output) for output in generate(llm, prompts)]
    seconds = time.perf_counter() - began
    if counts:
        done.set()
        reporting.join()
    wait_for_states(llm, [output["states"] for output in outputs if output["states"]], on_cpu)
    after = read_samples(llm) if counts else []
    return {"outputs": outputs, "seconds": seconds, "before": before, "after": after, "version": vllm.__version__}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # before vLLM, which logs to standard output
    arguments = json.loads(sys.stdin.readline())
    try:
        from vllm.platforms import current_platform
    except ModuleNotFoundError as error:
        sys.exit(f"{sys.executable} has no vLLM: {error}")
    on_cpu = current_platform.is_cpu()
    if on_cpu:
        prepare_cpu(arguments)
    llm = build(arguments)
    if on_cpu and extracts_states(arguments):
        complete_events()
    counts = not arguments.get("disable_log_stats", True)
    for line in sys.stdin:
        result = answer(llm, json.loads(line), counts=counts, on_cpu=on_cpu, answers=answers)
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main()
