"""Measuring drafts: the same prompts without a draft and with each, on draftkit's own runtime."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftkit.evaluate.cells import cell_of
from draftkit.evaluate.datasets import PromptSet, load_prompt_set
from draftkit.evaluate.forecast import forecast
from draftkit.evaluate.loading import is_ngram, load_drafter, load_model, load_tokenizer, ngram_drafter, open_draft
from draftkit.evaluate.measure import Conversations, Progress, measure
from draftkit.evaluate.mistakes import mistakes_of_cell, mistakes_of_prompts
from draftkit.evaluate.planning import plan_memory
from draftkit.evaluate.provenance import provenance
from draftkit.evaluate.saved import SCHEMA, ResultFile, append_rounds, key_of
from draftkit.evaluate.settings import Settings, Sweep
from draftkit.evaluate.speed import batches_up_to, measure_round_times, speed_model
from draftkit.hub import locate
from draftkit.layout.folder import Draft
from draftkit.models.devices import device_named, dtype_named, limit_threads
from draftkit.models.target import Target
from draftkit.runtime.drafters.protocol import Drafter
from draftkit.runtime.memory import MemoryPlan

__all__ = ["Settings", "Sweep", "evaluate_draft", "plan_evaluation"]

Cell = dict[str, Any]


def evaluate_draft(
    target: str,
    drafts: Sequence[str],
    settings: Settings | None = None,
    on_progress: Progress = lambda *_: None,
    *,
    sweep: Sweep | None = None,
    advise: bool = False,
    predict: bool = False,
    saved: ResultFile | None = None,
    records: Path | None = None,
) -> dict[str, Any]:
    """Measure drafts against their target.

    `target` and `drafts` are paths, Hub ids or `zoo:NAME`; drafts may be foreign checkpoints, and `ngram[:MIN-MAX]`.
    `sweep` varies K, concurrency and temperature. `advise` times rounds and says which K would be fastest at which
    batch size; `predict` tells acceptance at other temperatures and K from a greedy run. Cells that `saved` holds are
    not measured again. `records`: a file to which the raw record of every round is appended.

    Returns the result object of `eval --json`: provenance, a cell for each draft and combination of settings,
    warnings, and speed models. Raises `DraftkitError`.
    """
    settings, sweep = settings or Settings(), sweep or Sweep()
    with ExitStack() as stack:
        # Everything that can be wrong with the input shows before the first long computation.
        prompts, tokenizer, asked = _prompts(target, settings)
        opened = {source: stack.enter_context(_opened(source, target)) for source in drafts}
        plans = _plans(target, opened, asked, sweep.largest(settings))
        for plan in plans.values():
            plan.require()
        evaluation = _Evaluation(target, opened, prompts, tokenizer, settings, on_progress, records)
        first_ids = asked.first_requests[0].prompt
        warned = [*mistakes_of_prompts(prompts, first_ids, tokenizer.bos_token_id, settings)]
        made = provenance(evaluation.model, tokenizer, prompts, first_ids, settings)
        if saved is not None:
            saved.begin(made)
        cells = [] if saved is None else list(saved.cells)
        for shared, drafting in sweep.groups(settings):
            for cell in evaluation.group(shared, drafting, {key_of(cell) for cell in cells}):
                cell["memory"] = plans[cell["draft"]].to_dict()
                cells.append(cell)
                if saved is not None:
                    saved.add(cell)
        for cell in cells:
            warned += mistakes_of_cell(cell, settings)
        result: dict[str, Any] = {"schema": SCHEMA, "provenance": made, "cells": cells}
        if predict:
            evaluation.predict(cells)
        if advise:
            result["speed_models"] = [evaluation.speed_model(source, cells) for source in drafts]
        result["warnings"] = [warning.to_dict() for warning in dict.fromkeys(warned)]
        if saved is not None:
            saved.write(result)
        return result


def plan_evaluation(target: str, drafts: Sequence[str], settings: Settings | None = None) -> dict[str, MemoryPlan]:
    """What `evaluate_draft` would take of memory with each draft; no weights are loaded. Raises `DraftkitError`."""
    settings = settings or Settings()
    with ExitStack() as stack:
        _, _, asked = _prompts(target, settings)
        opened = {source: stack.enter_context(_opened(source, target)) for source in drafts}
        return _plans(target, opened, asked, settings)


class _Evaluation:
    """Target and drafts, loaded once for all cells."""

    def __init__(
        self,
        target: str,
        opened: Mapping[str, Draft | None],
        prompts: PromptSet,
        tokenizer: PreTrainedTokenizerBase,
        settings: Settings,
        on_progress: Progress,
        records: Path | None = None,
    ):
        device = device_named(settings.device)
        self.target = target
        self.model, _ = load_model(target, device=device, dtype=dtype_named(settings.dtype, device))
        self.drafts = {source: _Loaded.of(source, draft, self.model, tokenizer) for source, draft in opened.items()}
        self.prompts = prompts
        self.tokenizer = tokenizer
        self.settings = settings
        self.on_progress = on_progress
        self.records = records
        limit_threads(self.model)

    def group(self, shared: Settings, drafting: Sequence[Settings], done: set[tuple[object, ...]]) -> Iterable[Cell]:
        """The cells of settings that share a run without a draft, but for those that are done."""
        wanted = [
            (source, settings)
            for source in self.drafts
            for settings in drafting
            if key_of(self._heading(source, settings)) not in done
        ]
        if not wanted:
            return
        plain = measure(Target(self.model), None, self._asked(shared), "no draft", self.on_progress)
        for source, settings in wanted:
            loaded = self.drafts[source]
            name = f"{source}, K={settings.num_speculative_tokens}"
            run = measure(loaded.target, loaded.drafter, self._asked(settings), name, self.on_progress)
            if self.records is not None:
                append_rounds(self.records, self._heading(source, settings), run.generations)
            yield self._heading(source, settings) | cell_of(run, plain, settings, self.tokenizer)

    def predict(self, cells: Sequence[Cell]) -> None:
        """Give each draft's greedy cell of the most draft tokens what it predicts for other settings."""
        for source, loaded in self.drafts.items():
            greedy = [c for c in cells if c["draft"] == source and c["temperature"] == 0]
            if not greedy:
                continue
            cell = max(greedy, key=lambda c: c["num_speculative_tokens"])
            settings = next(
                s
                for _, drafting in Sweep((cell["num_speculative_tokens"],), (), (0.0,)).groups(self.settings)
                for s in drafting
            )
            self.on_progress(f"{source}, other temperatures", 0, 1, cell["acceptance_length"]["mean"])
            cell["predicted"] = forecast(loaded.target, loaded.drafter, self._asked(settings))

    def speed_model(self, source: str, cells: Sequence[Cell]) -> dict[str, object]:
        """What a draft's round times say about every K and batch size."""
        mine = [c for c in cells if c["draft"] == source and c["temperature"] == cells[0]["temperature"]]
        loaded = self.drafts[source]
        batches = batches_up_to(max(c["concurrency"] for c in mine))
        self.on_progress(f"{source}, round times", 0, 1, mine[0]["acceptance_length"]["mean"])
        requests = self._asked(self.settings).first_requests
        times = measure_round_times(Target(self.model), loaded.target, loaded.drafter, requests, self.settings, batches)
        return speed_model(source, mine, times)

    def _asked(self, settings: Settings) -> Conversations:
        return Conversations(self.prompts.prompts, self.tokenizer, settings)

    def _heading(self, source: str, settings: Settings) -> Cell:
        return {
            "target": self.target,
            "draft": source,
            "method": self.drafts[source].method,
            "dataset": self.prompts.name,
            "engine": "draftkit",
            "num_speculative_tokens": settings.num_speculative_tokens,
            "temperature": settings.sampling.temperature,
            "concurrency": settings.concurrency,
        }


@dataclass(frozen=True)
class _Loaded:
    """A draft's drafter, and the target with the taps that it reads."""

    method: str
    target: Target
    drafter: Drafter

    @classmethod
    def of(
        cls, source: str, draft: Draft | None, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> _Loaded:
        drafter = ngram_drafter(source, model) if draft is None else load_drafter(draft, model, tokenizer)
        method = "ngram" if draft is None else draft.spec.method
        return cls(method, Target(model, drafter.taps), drafter)


def _prompts(target: str, settings: Settings) -> tuple[PromptSet, PreTrainedTokenizerBase, Conversations]:
    prompts = load_prompt_set(settings.prompts, settings.limit)
    tokenizer = load_tokenizer(locate(target).path, "target")
    return prompts, tokenizer, Conversations(prompts.prompts, tokenizer, settings)


def _opened(source: str, target: str) -> AbstractContextManager[Draft | None]:
    """The draft of a source; None of n-gram lookup, which has none."""
    return nullcontext() if is_ngram(source) else open_draft(source, target)


def _plans(
    target: str, drafts: Mapping[str, Draft | None], asked: Conversations, settings: Settings
) -> dict[str, MemoryPlan]:
    device = device_named(settings.device)
    return plan_memory(
        locate(target).path,
        drafts,
        device=torch.device(device),
        dtype=dtype_named(settings.dtype, device),
        num_slots=min(settings.concurrency, len(asked.prompts)),
        longest=asked.longest,
        k=settings.num_speculative_tokens,
    )
