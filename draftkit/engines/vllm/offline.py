"""Generation by vLLM's offline engine, measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from draftkit.engines.records import Answer, Counters, DraftCounts, EngineRun, Lane, Progress, Token
from draftkit.engines.vllm.process import read_metrics, vllm_process
from draftkit.engines.vllm.request import sampling_fields
from draftkit.engines.vllm.settings import VllmSettings
from draftkit.engines.vllm.worker import Output, PromptTokens, WorkerAnswer
from draftkit.requests import Request


@dataclass(frozen=True, kw_only=True)
class OfflineEngine:
    """vLLM on this machine: the interpreter, the arguments of `vllm.LLM`, and the ids that end an output.

    `device`: `cuda:N` for the first GPU to use, None where vLLM chooses.
    """

    python: str
    arguments: Mapping[str, object]
    end_ids: frozenset[int]
    device: str | None = None


def engine_arguments(
    target: Path,
    vllm: VllmSettings,
    speculative: Mapping[str, object] | None,
    *,
    dtype: str,
    eager: bool,
    longest: int,
    context: int,
    num_speculative_tokens: int,
    max_num_seqs: int,
    trust_remote_code: bool,
) -> dict[str, object]:
    """The arguments of `vllm.LLM` for a target, with a draft when there is a `speculative_config`.

    `longest`: tokens of a request, at most; `context`: those that the target can read.
    """
    arguments: dict[str, object] = {
        "model": str(target),
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "enforce_eager": eager,
        # vLLM stops drafting where a whole draft would not fit any more.
        "max_model_len": min(longest + num_speculative_tokens + 2, max(context, longest)),
        "max_num_seqs": max_num_seqs,
        "tensor_parallel_size": vllm.tensor_parallel_size,
        "enable_prefix_caching": False,  # the warm-up has the same prompts
        "disable_log_stats": False,
        "trust_remote_code": trust_remote_code,
    }
    if vllm.gpu_memory_utilization is not None:
        arguments["gpu_memory_utilization"] = vllm.gpu_memory_utilization
    stated = dict(vllm.engine_arguments)
    further = stated.pop("speculative_config", {})
    arguments |= stated
    if speculative is not None:
        arguments["speculative_config"] = {**speculative, **(further if isinstance(further, Mapping) else {})}
    return arguments


@contextmanager
def offline_lane(engine: OfflineEngine, warming: Sequence[Request], on_progress: Progress) -> Iterator[Lane]:
    """vLLM, started and warm, that runs requests until the body ends.

    Raises `DraftkitError` with its last words when it fails.
    """
    with vllm_process(engine.python, engine.arguments, engine.device) as process:
        before = read_metrics(process.ask([_prompt(request, engine) for request in warming])["after"])

        def run(requests: Sequence[Request]) -> EngineRun:
            nonlocal before

            def report(metrics: Counters) -> None:
                on_progress((metrics.finished or 0) - (before.finished or 0), _length(_since(before, metrics)))

            result = process.ask([_prompt(request, engine) for request in requests], report)
            before = read_metrics(result["after"])
            run = _run(result)
            on_progress(len(requests), _length(run.counted))
            return run

        yield run


def _prompt(request: Request, engine: OfflineEngine) -> PromptTokens:
    wanted = {"logprobs": request.alternatives} if request.alternatives else {}
    return {"tokens": list(request.prompt), "sampling": sampling_fields(request, engine.end_ids) | wanted}


def _run(result: WorkerAnswer) -> EngineRun:
    counted = _since(read_metrics(result["before"]), read_metrics(result["after"]))
    return EngineRun(tuple(map(_answer, result["outputs"])), result["seconds"], counted, result["version"])


def _since(before: Counters, after: Counters) -> DraftCounts | None:
    """What was drafted between two times; None without a draft."""
    return None if before.drafts is None or after.drafts is None else after.drafts - before.drafts


def _length(counts: DraftCounts | None) -> float:
    return counts.acceptance_length if counts is not None and counts.num_drafts else 1.0


def _answer(output: Output) -> Answer:
    histogram, drafted = output["histogram"], output["num_draft_tokens"]
    drafts = None if histogram is None or drafted is None else DraftCounts.of_histogram(histogram, drafted)
    tokens = tuple(output["tokens"])
    rows = None if output["logprobs"] is None else tuple(dict[Token, float](row) for row in output["logprobs"])
    own = None if rows is None else tuple(row[token] for token, row in zip(tokens, rows, strict=True))
    return Answer(tokens, output["ttft"], output["latency"], drafts=drafts, logprobs=own, alternatives=rows)
