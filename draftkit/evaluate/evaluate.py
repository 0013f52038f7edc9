"""Measuring drafts: the same prompts without a draft and with each, on draftkit's own runtime."""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftkit.evaluate.loading import is_ngram, load_drafter, load_model, load_tokenizer, ngram_drafter, open_draft
from draftkit.evaluate.planning import plan_memory
from draftkit.evaluate.prompts import Prompt, encode_prompt, load_prompts
from draftkit.evaluate.statistics import (
    acceptance_length,
    accepted_per_position,
    expected_acceptance_length,
    percentiles,
)
from draftkit.hub import locate
from draftkit.layout.folder import Draft
from draftkit.models.devices import device_named, dtype_named, limit_threads
from draftkit.models.target import Target
from draftkit.runtime.drafters.protocol import Drafter
from draftkit.runtime.engine import Engine
from draftkit.runtime.memory import MemoryPlan
from draftkit.runtime.records import Generation, Request
from draftkit.runtime.sampling.parameters import DraftSampling, SamplingParameters
from draftkit.runtime.sampling.synthetic import SyntheticAcceptance
from draftkit.runtime.verify import Verification
from draftkit.version import __version__

Progress = Callable[[str, int, int, float], None]  # what runs, prompts done, prompts in all, acceptance length so far


@dataclass(frozen=True)
class Settings:
    """How to measure. `dtype` and `device` None: bfloat16 on a GPU where there is one, float32 on the CPU.

    Request i is drawn with the seed `sampling.seed` + i. `acceptance_rates` are those of synthetic verification.
    """

    num_speculative_tokens: int = 4
    max_new_tokens: int = 128
    concurrency: int = 1
    prompts: str = "zoo"
    limit: int | None = None
    device: str | None = None
    dtype: str | None = None
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    draft_sampling: DraftSampling = field(default_factory=DraftSampling)
    verification: Verification = "rejection"
    acceptance_rates: tuple[float, ...] | None = None
    k_by_batch: dict[int, int] | None = None
    eager: bool = False

    @property
    def draft_mode(self) -> str:
        """How drafts are drawn at these settings: greedy or probabilistic."""
        return "probabilistic" if self.draft_sampling.parameters(self.sampling).temperature else "greedy"

    @property
    def exact(self) -> bool:
        """Whether the output must be that of plain decoding, token for token."""
        return self.verification == "coupled" or (self.sampling.temperature == 0 and self.verification != "synthetic")


@dataclass(frozen=True)
class Run:
    """Generations of all prompts, in order, and how long they took, in seconds."""

    generations: list[Generation]
    seconds: float

    @property
    def output_tokens(self) -> int:
        return sum(len(g.tokens) for g in self.generations)

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds


def evaluate_draft(
    target: str, drafts: Sequence[str], settings: Settings | None = None, on_progress: Progress = lambda *_: None
) -> dict[str, object]:
    """Measure drafts against their target.

    `target` and `drafts` are paths, Hub ids or `zoo:NAME`; drafts may be foreign checkpoints, and `ngram[:MIN-MAX]`.
    Returns the result object of `eval --json`: provenance, and one cell per draft. Raises `DraftkitError`.
    """
    settings = settings or Settings()
    device = device_named(settings.device)
    dtype = dtype_named(settings.dtype, device)
    with ExitStack() as stack:
        # Everything that can be wrong with the input shows before the first long computation.
        prompts, tokenizer, requests = _requests(target, settings)
        opened = {source: stack.enter_context(_opened(source, target)) for source in drafts}
        for plan in _plans(target, opened, requests, settings).values():
            plan.require()
        model, _ = load_model(target, device=device, dtype=dtype)
        drafters = {
            source: ngram_drafter(source, model) if draft is None else load_drafter(draft, model, tokenizer)
            for source, draft in opened.items()
        }
    limit_threads(model)
    plain = _run(Target(model), None, 0, requests, settings, "no draft", on_progress)
    cells = []
    for source, drafter in drafters.items():
        k = settings.num_speculative_tokens
        run = _run(Target(model, drafter.taps), drafter, k, requests, settings, source, on_progress)
        cells.append(
            {"target": target, "draft": source, "method": _method(opened[source]), "dataset": settings.prompts}
            | _cell(prompts, run, plain, settings)
        )
    return {"schema": 1, "provenance": _provenance(model, tokenizer, settings, device), "cells": cells}


def plan_evaluation(target: str, drafts: Sequence[str], settings: Settings | None = None) -> dict[str, MemoryPlan]:
    """What `evaluate_draft` would take of memory with each draft; no weights are loaded. Raises `DraftkitError`."""
    settings = settings or Settings()
    with ExitStack() as stack:
        _, _, requests = _requests(target, settings)
        opened = {source: stack.enter_context(_opened(source, target)) for source in drafts}
        return _plans(target, opened, requests, settings)


def _requests(target: str, settings: Settings) -> tuple[list[Prompt], PreTrainedTokenizerBase, list[Request]]:
    prompts = load_prompts(settings.prompts, settings.limit)
    tokenizer = load_tokenizer(locate(target).path, "target")
    requests = [
        Request(
            prompt.id, encode_prompt(prompt, tokenizer), settings.max_new_tokens, settings.sampling.numbered(number)
        )
        for number, prompt in enumerate(prompts)
    ]
    return prompts, tokenizer, requests


def _opened(source: str, target: str) -> AbstractContextManager[Draft | None]:
    """The draft of a source; None of n-gram lookup, which has none."""
    return nullcontext() if is_ngram(source) else open_draft(source, target)


def _plans(
    target: str, drafts: Mapping[str, Draft | None], requests: list[Request], settings: Settings
) -> dict[str, MemoryPlan]:
    device = device_named(settings.device)
    return plan_memory(
        locate(target).path,
        drafts,
        device=torch.device(device),
        dtype=dtype_named(settings.dtype, device),
        num_slots=min(settings.concurrency, len(requests)),
        longest=max(request.max_length for request in requests),
        k=settings.num_speculative_tokens,
    )


def _method(draft: Draft | None) -> str:
    return "ngram" if draft is None else draft.spec.method


def _run(
    target: Target,
    drafter: Drafter | None,
    k: int,
    requests: list[Request],
    settings: Settings,
    name: str,
    on_progress: Progress,
) -> Run:
    rates = settings.acceptance_rates
    synthetic = settings.verification == "synthetic" and drafter is not None
    engine = Engine(
        target,
        drafter,
        num_speculative_tokens=k,
        num_slots=min(settings.concurrency, len(requests)),
        # Plain decoding draws with the noise that coupled verification compares with, which is also any target's own.
        verification=settings.verification if drafter is not None else "coupled",
        draft_sampling=settings.draft_sampling,
        synthetic=SyntheticAcceptance(rates) if synthetic and rates is not None else None,
        k_by_batch=settings.k_by_batch if drafter is not None else None,
        eager=settings.eager,
    )
    engine.reserve(max(request.max_length for request in requests))
    # Warm-up: the first calls compile, tune and capture graphs; they are not part of the measurement.
    engine.generate([replace(request, max_new_tokens=2 * (k + 1)) for request in requests[: engine.num_slots]])
    counts = {"finished": 0, "accepted": 0, "rounds": 0}

    def on_round(touched: list[Generation]) -> None:
        for generation in touched:
            counts["finished"] += generation.finished is not None
            counts["accepted"] += generation.rounds[-1].accepted if generation.rounds else 0
            counts["rounds"] += bool(generation.rounds)
        length = 1 + counts["accepted"] / max(counts["rounds"], 1)
        on_progress(name, counts["finished"], len(requests), length)

    began = time.perf_counter()
    generations = engine.generate(requests, on_round=on_round)
    return Run(generations, time.perf_counter() - began)


def _cell(prompts: list[Prompt], run: Run, plain: Run, settings: Settings) -> dict[str, object]:
    rounds = [r for g in run.generations for r in g.rounds]
    k = settings.num_speculative_tokens
    matching = sum(a.tokens == b.tokens for a, b in zip(run.generations, plain.generations, strict=True))
    categories = sorted({p.category for p in prompts})
    return {
        "num_speculative_tokens": k,
        "temperature": settings.sampling.temperature,
        "top_k": settings.sampling.top_k,
        "top_p": settings.sampling.top_p,
        "min_p": settings.sampling.min_p,
        "seed": settings.sampling.seed,
        "draft_sampling": settings.draft_mode,
        "verification": settings.verification,
        "concurrency": settings.concurrency,
        "num_prompts": len(prompts),
        "max_new_tokens": settings.max_new_tokens,
        "output_tokens": run.output_tokens,
        "num_drafts": len(rounds),
        "num_draft_tokens": sum(r.drafted for r in rounds),
        "num_accepted_tokens": sum(r.accepted for r in rounds),
        "num_accepted_tokens_per_pos": accepted_per_position(run.generations, k),
        "acceptance_length": acceptance_length(run.generations).to_dict(),
        "expected_acceptance_length": expected_acceptance_length(run.generations).to_dict(),
        "by_category": {
            category: acceptance_length(
                [g for g, p in zip(run.generations, prompts, strict=True) if p.category == category]
            ).to_dict()
            for category in categories
        },
        "tokens_per_second": run.tokens_per_second,
        "baseline_tokens_per_second": plain.tokens_per_second,
        "ttft_ms": percentiles([g.ttft for g in run.generations]),
        "tpot_ms": percentiles([g.tpot for g in run.generations if g.tpot is not None]),
        "itl_ms": percentiles([gap for g in run.generations for gap in g.itl]),
        "matches_greedy": matching == len(prompts) if settings.sampling.temperature == 0 else None,
        "num_matching_prompts": matching if settings.exact else None,
    }


def _provenance(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: Settings, device: str
) -> dict[str, object]:
    template = tokenizer.chat_template
    return {
        "draftkit": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else "cpu",
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "convention": "acceptance_length = 1 + accepted draft tokens / rounds",
        "prompts": settings.prompts,
        "chat_template_sha256": None if template is None else hashlib.sha256(str(template).encode()).hexdigest(),
    }
