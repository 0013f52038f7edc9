"""vLLM, started with each draft: how it is told of it, and its offline engine as a lane."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

from draftkit.engines.known import numbered
from draftkit.engines.records import Answer, Counters, DraftCounts, Token
from draftkit.engines.releases import Release
from draftkit.engines.vllm.accepts import ENGINE, check_target, check_verification, refusal_by_vllm, verdicts
from draftkit.engines.vllm.client import sampling_fields, warm_up
from draftkit.engines.vllm.images import image_arguments, image_prompt
from draftkit.engines.vllm.process import check_python, find_python, read_metrics, vllm_process
from draftkit.engines.vllm.serve import speculative_config
from draftkit.engines.vllm.settings import VllmSettings
from draftkit.engines.vllm.worker import Output, PromptTokens
from draftkit.errors import DraftkitError
from draftkit.evaluate.engine import BaseEngine
from draftkit.evaluate.job import Job
from draftkit.evaluate.measure import Conversations, Lane, Report, Run
from draftkit.layout.folder import Draft
from draftkit.loading import OpenedDraft
from draftkit.requests import Request
from draftkit.results.settings import VLLM, Settings
from draftkit.targets.devices import device_named, dtype_named
from draftkit.targets.pretrained import trusts_remote_code


def vllm_here() -> VllmEngine | None:
    """vLLM of the running environment, None where it has none."""
    return None if find_spec("vllm") is None else VllmEngine(VllmSettings())


class VllmEngine(BaseEngine):
    """vLLM in processes of its own: one without a draft, and one for each draft and K."""

    name = "vllm"
    settings_type = VllmSettings
    takes = frozenset({"image"})
    compared = True

    def __init__(self, settings: VllmSettings):
        self.settings = settings

    def check(self, job: Job) -> None:
        """Convert each draft that vLLM runs in another form than the unified, once. Raises `DraftkitError` with the
        reason where vLLM cannot run the target or a draft, or cannot draft as it is asked to."""
        super().check(job)
        VLLM.check(job.sweep)
        job.opened_target.require_no_adapter("vLLM")
        check_target(job.opened_target.config_folder)
        stated = self.settings.engine_arguments.get("speculative_config")
        check_verification(stated.get("rejection_sample_method") if isinstance(stated, Mapping) else None)
        version = check_python(self.settings.python)
        self.release = None if version is None else numbered(ENGINE, version)
        self.drafts = {source: _served(opened, self.release) for source, opened in job.opened.items()}

    @contextmanager
    def lane(self, source: str | None, asked: Conversations, report: Report) -> Iterator[Lane]:
        """A lane in a vLLM of its own. Raises `DraftkitError` with the end of vLLM's output when it fails."""
        requests, end_ids = asked.first_requests, self.job.opened_target.end_ids

        def prompts(asked: Sequence[Request]) -> list[PromptTokens]:
            return [_prompt(request, end_ids) for request in asked]

        python = find_python(self.settings.python)
        with vllm_process(python, self._arguments(source, asked), asked.settings.device) as process:
            warming = warm_up(requests, asked.settings.concurrency, asked.settings.num_speculative_tokens)
            before = read_metrics(process.ask(prompts(warming))["after"])

            def run(requests: Sequence[Request]) -> Run:
                nonlocal before

                def heard(metrics: Counters) -> None:
                    report((metrics.finished or 0) - (before.finished or 0), _length(_since(before, metrics)))

                result = process.ask(prompts(requests), heard)
                counted = _since(read_metrics(result["before"]), read_metrics(result["after"]))
                before = read_metrics(result["after"])
                report(len(requests), _length(counted))
                return Run(tuple(map(_answer, result["outputs"])), result["seconds"], counted, result["version"])

            yield run

    def _arguments(self, source: str | None, asked: Conversations) -> dict[str, object]:
        """The arguments of `vllm.LLM`, with a `speculative_config` where there is a draft."""
        settings, vllm, target = asked.settings, self.settings, self.job.opened_target
        device = device_named(settings.device)
        longest = asked.longest
        # A target without such a number, as state space models, has no limit.
        context = getattr(target.language_model, "max_position_embeddings", None) or sys.maxsize
        stated = dict(vllm.engine_arguments)
        further = stated.pop("speculative_config", {})
        arguments: dict[str, object] = {
            "model": str(target.folder),
            "skip_tokenizer_init": True,
            "dtype": str(dtype_named(settings.dtype, device)).removeprefix("torch."),
            "enforce_eager": settings.eager or device == "cpu",
            # vLLM stops drafting where a whole draft would not fit any more.
            "max_model_len": min(longest + settings.num_speculative_tokens + 2, max(context, longest)),
            "max_num_seqs": min(settings.concurrency, len(asked.first_requests)),
            "tensor_parallel_size": vllm.tensor_parallel_size,
            "enable_prefix_caching": False,  # the warm-up has the same prompts
            "disable_log_stats": False,
            "trust_remote_code": trusts_remote_code(),
        }
        shown = [len(request.images.files) for request in asked.first_requests if request.images is not None]
        if shown:  # later turns show no more than all turns of a prompt together
            arguments |= image_arguments(max(len(prompt.media) for prompt in asked.prompts))
        if vllm.gpu_memory_utilization is not None:
            arguments["gpu_memory_utilization"] = vllm.gpu_memory_utilization
        arguments |= stated
        if source is not None:
            draft = self.drafts[source]
            wanted = settings.num_speculative_tokens
            speculative = speculative_config(draft.spec, draft.path, wanted, self.release)
            further = further if isinstance(further, Mapping) else {}
            arguments["speculative_config"] = speculative | _drawing(settings) | dict(further)
        return arguments

    def alone(self, settings: Settings) -> str | None:
        """Why two engines cannot run at a time: they share a GPU only where each was told to take at most half of
        it."""
        if device_named(settings.device) == "cpu" or (self.settings.gpu_memory_utilization or 1.0) <= 0.5:
            return None
        return "each takes most of the GPU: add --set gpu_memory_utilization=0.45"


def _served(opened: OpenedDraft, release: Release | None) -> Draft:
    """The draft in a folder that vLLM loads. Raises `DraftkitError` where the installed release does not run it; None
    for one without a table."""
    draft = opened.draft if refusal_by_vllm(opened.draft.spec) is None else opened.converted("vllm")
    for found in verdicts(draft.spec, releases=[] if release is None else [release]):
        if not found.runs:
            problem = f"{release} is installed and does not run this draft: {found.sentence}"
            raise DraftkitError(problem, where=draft.path, hint=found.instead or None)
    return draft


def _drawing(settings: Settings) -> dict[str, object]:
    """How drafts are drawn and verified, where that is not vLLM's default."""
    fields: dict[str, object] = {}
    if settings.draft_mode == "probabilistic":
        fields["draft_sample_method"] = "probabilistic"
    if settings.verification == "block":
        fields["rejection_sample_method"] = "block"
    return fields


def _prompt(request: Request, end_ids: frozenset[int]) -> PromptTokens:
    wanted = {"logprobs": request.alternatives} if request.alternatives else {}
    sampling = sampling_fields(request, end_ids) | wanted
    if request.images is not None:
        return image_prompt(request.prompt, request.images.spans, request.images.files, sampling)
    return {"tokens": list(request.prompt), "sampling": sampling}


def _since(before: Counters, after: Counters) -> DraftCounts | None:
    """The drafts that were counted between two times; None without a draft."""
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
