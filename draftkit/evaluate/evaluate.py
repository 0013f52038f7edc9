"""Measuring drafts: the same prompts without a draft and with each, on draftkit's own runtime."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftkit.checks.measurement import Asked, name_of
from draftkit.checks.registry import Evidence, findings
from draftkit.engines.vllm.settings import VllmSettings
from draftkit.errors import DraftkitError, NonFiniteError
from draftkit.evaluate.cells import cell_of
from draftkit.evaluate.datasets import PromptSet, load_prompt_set
from draftkit.evaluate.forecast import forecast
from draftkit.evaluate.greedy import near_ties
from draftkit.evaluate.measure import Conversations, Progress, measure
from draftkit.evaluate.planning import plan_memory
from draftkit.evaluate.provenance import provenance
from draftkit.evaluate.speed import batches_up_to, measure_round_times, speed_model
from draftkit.evaluate.vllm_measure import check_with_vllm, measure_with_vllm, run_plain
from draftkit.finding import Finding
from draftkit.hub.locate import locate
from draftkit.layout.digest import draft_sha256, target_sha256
from draftkit.layout.folder import Draft
from draftkit.loading import load_drafter, load_model, open_draft
from draftkit.models.chat import load_tokenizer, template_sha256
from draftkit.models.devices import device_named, dtype_named, limit_threads
from draftkit.models.positions import Positions
from draftkit.models.target import Target, read_target_config
from draftkit.results.saved import DIGESTS, SCHEMA, ResultFile, append_rounds, check_records, key_of, replaced_by
from draftkit.results.settings import Settings, Sweep
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
    vllm: VllmSettings | None = None,
) -> dict[str, Any]:
    """Measure drafts against their target.

    `target` and `drafts` are paths, Hub ids or `zoo:NAME`; drafts may be foreign checkpoints, and `ngram[:MIN-MAX]`.
    `sweep` varies K, concurrency and temperature. `advise` times rounds and says which K would be fastest at which
    batch size; `predict` tells acceptance at other temperatures and K from a greedy run. Cells that `saved` holds are
    not measured again. `records`: a file to which the raw record of every round is appended. With `vllm` the same
    prompts run through vLLM too, and through it alone where draftkit's engine cannot run the pair.

    Returns the result object of `eval --json`: provenance, a cell for each draft and combination of settings,
    warnings, and speed models. Raises `DraftkitError`.
    """
    settings, sweep = settings or Settings(), sweep or Sweep()
    with ExitStack() as stack:
        # Everything that can be wrong with the input shows before the first long computation.
        if records is not None:
            check_records(records)
        if vllm is not None:
            check_with_vllm(target, drafts, settings, vllm)
        prompts, tokenizer, asked = _prompts(target, settings)
        device = device_named(settings.device)
        first_ids = asked.first_requests[0].prompt
        turns = [len(prompt.turns) for prompt in prompts.prompts]
        seen = Asked(prompts.source, turns, prompts.masked, first_ids, tokenizer.bos_token_id)
        warned = findings(Evidence(asked=seen, settings=settings), "measurement")
        made = provenance(device, dtype_named(settings.dtype, device), tokenizer, prompts, first_ids, settings)
        if saved is not None:
            saved.begin(made)
        cells = [] if saved is None else list(saved.cells)
        done = {key_of(cell) for cell in cells}
        measured: list[Iterator[Cell]] = []
        evaluation = None
        digests = _Digests(prompts.sha256, None if settings.template is False else template_sha256(tokenizer))
        try:
            opened = {source: stack.enter_context(open_draft(source, target)) for source in drafts}
            digests = digests.with_weights(opened, None if saved is None else locate(target).path)
            plans = _plans(target, opened, asked, sweep.largest(settings))
            for plan in plans.values():
                plan.require()
            evaluation = _Evaluation(target, opened, plans, digests, prompts, tokenizer, settings, on_progress, records)
            measured.append(evaluation.cells(sweep, done))
        except DraftkitError as error:
            if vllm is None or isinstance(error, NonFiniteError):  # another engine would measure garbage
                raise
            warned.append(_warning("vllm-only", f"draftkit's own engine does not run this pair: {error}"))
        if vllm is not None:
            if vllm.url is not None and any(cell["engine"] == "vllm" for cell in cells):
                warned.append(_warning("server-resumed", "kept figures of a server, whose weights cannot be compared"))
            measured.append(_with_vllm(target, drafts, asked, digests, sweep, vllm, done, on_progress))
        for cell in itertools.chain.from_iterable(measured):
            warned += [_warning(**concern) for concern in cell.pop("warnings", ())]
            if reason := replaced_by(cell, cells):
                warned.append(_warning("measured-again", f"{name_of(cell)}: measured again, because {reason}"))
            cells.append(cell)
            if saved is not None:
                saved.add(cell)
        for cell in cells:
            warned += findings(Evidence(cell=cell, settings=settings), "measurement")
        result: dict[str, Any] = {"schema": SCHEMA, "provenance": made, "cells": cells}
        if evaluation is not None:
            own = [cell for cell in cells if cell["engine"] == "draftkit"]
            if predict:
                evaluation.predict(own)
            if advise:
                result["speed_models"] = [evaluation.speed_model(source, own) for source in drafts]
        result["warnings"] = [{"name": w.name, "message": w.message} for w in dict.fromkeys(warned)]
        if saved is not None:
            saved.write(result)
        return result


def _warning(name: str, message: str) -> Finding:
    return Finding(name, "warning", message)


def _with_vllm(
    target: str,
    drafts: Sequence[str],
    asked: Conversations,
    digests: _Digests,
    sweep: Sweep,
    vllm: VllmSettings,
    done: set[tuple[object, ...]],
    on_progress: Progress,
) -> Iterator[Cell]:
    """The cells that vLLM measures, but for those that are done."""
    categories = [prompt.category for prompt in asked.prompts]
    of = {source: (digests.without_weights() if vllm.url else digests).of(source) for source in drafts}
    for shared, drafting in sweep.groups(asked.settings):
        headings = [
            (source, settings, {"target": target, "draft": source, "engine": "vllm"} | _varied(settings) | of[source])
            for source in drafts
            for settings in drafting
        ]
        wanted = [(source, settings) for source, settings, heading in headings if key_of(heading) not in done]
        if not wanted:
            continue
        requests = Conversations(asked.prompts, asked.tokenizer, shared).first_requests
        plain = run_plain(target, requests, shared, vllm, on_progress)
        for source, settings in wanted:
            cell = measure_with_vllm(
                target, source, requests, settings, vllm, plain=plain, categories=categories, on_progress=on_progress
            )
            yield cell | of[source]


@dataclass(frozen=True)
class _Digests:
    """What is measured, by content: as a server is, without the weights, or with them. `drafts`: None of those
    without a checkpoint."""

    prompts: str
    template: str | None
    target: str | None = None
    drafts: Mapping[str, str | None] = field(default_factory=dict)

    def with_weights(self, drafts: Mapping[str, Draft], target: Path | None) -> _Digests:
        """Those of the drafts too, and of the target, which takes longest, where there is a use for it."""
        own = {source: draft_sha256(draft) if draft.tensors else None for source, draft in drafts.items()}
        return replace(self, target=None if target is None else target_sha256(target), drafts=own)

    def without_weights(self) -> _Digests:
        return _Digests(self.prompts, self.template)

    def of(self, draft: str) -> Cell:
        """By the names of a cell."""
        return dict(zip(DIGESTS, (self.target, self.drafts.get(draft), self.prompts, self.template), strict=True))


def _varied(settings: Settings) -> Cell:
    """What a sweep varies, by the names of a cell."""
    return {
        "num_speculative_tokens": settings.num_speculative_tokens,
        "temperature": settings.sampling.temperature,
        "concurrency": settings.concurrency,
    }


def plan_evaluation(target: str, drafts: Sequence[str], settings: Settings | None = None) -> dict[str, MemoryPlan]:
    """What `evaluate_draft` would take of memory with each draft; no weights are loaded. Raises `DraftkitError`."""
    settings = settings or Settings()
    with ExitStack() as stack:
        _, _, asked = _prompts(target, settings)
        opened = {source: stack.enter_context(open_draft(source, target)) for source in drafts}
        return _plans(target, opened, asked, settings)


class _Evaluation:
    """Target and drafts, loaded once for all cells."""

    def __init__(
        self,
        target: str,
        opened: Mapping[str, Draft],
        plans: Mapping[str, MemoryPlan],
        digests: _Digests,
        prompts: PromptSet,
        tokenizer: PreTrainedTokenizerBase,
        settings: Settings,
        on_progress: Progress,
        records: Path | None,
    ):
        device = device_named(settings.device)
        self.target = target
        self.model, _ = load_model(target, device=device, dtype=dtype_named(settings.dtype, device))
        self.drafts = {source: _Loaded.of(draft, self.model, tokenizer) for source, draft in opened.items()}
        self.plans = plans
        self.digests = digests
        self.prompts = prompts
        self.tokenizer = tokenizer
        self.settings = settings
        self.on_progress = on_progress
        self.records = records
        limit_threads(self.model)

    def cells(self, sweep: Sweep, done: set[tuple[object, ...]]) -> Iterator[Cell]:
        """All cells but those that are done."""
        for shared, drafting in sweep.groups(self.settings):
            yield from self._group(shared, drafting, done)

    def _group(self, shared: Settings, drafting: Sequence[Settings], done: set[tuple[object, ...]]) -> Iterator[Cell]:
        """The cells of settings that share a run without a draft."""
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
            ties = None
            if self.model.dtype == torch.float32 and settings.exact and settings.sampling.temperature == 0:
                ties = [tie.to_dict() for tie in near_ties(self.model, run.generations, plain.generations, source)]
            cell = self._heading(source, settings) | cell_of(run, plain, settings, self.tokenizer)
            yield cell | {"near_ties": ties, "memory": self.plans[source].to_dict()}

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
            **self.digests.of(source),
        } | _varied(settings)


@dataclass(frozen=True)
class _Loaded:
    """A draft's drafter, and the target with the aux_layers that it reads."""

    method: str
    target: Target
    drafter: Drafter

    @classmethod
    def of(cls, draft: Draft, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> _Loaded:
        drafter = load_drafter(draft, model, tokenizer)
        return cls(draft.spec.method, Target(model, drafter.aux_layers), drafter)


def _prompts(target: str, settings: Settings) -> tuple[PromptSet, PreTrainedTokenizerBase, Conversations]:
    prompts = load_prompt_set(settings.prompts, settings.limit)
    tokenizer = load_tokenizer(locate(target).path, "target")
    return prompts, tokenizer, Conversations(prompts.prompts, tokenizer, settings)


def _plans(target: str, drafts: Mapping[str, Draft], asked: Conversations, settings: Settings) -> dict[str, MemoryPlan]:
    folder, device = locate(target).path, device_named(settings.device)
    positions = Positions.of(read_target_config(folder))
    for name, prompt, new in asked.extents:
        positions.check(name, prompt, new)
    return plan_memory(
        folder,
        drafts,
        device=torch.device(device),
        dtype=dtype_named(settings.dtype, device),
        num_slots=min(settings.concurrency, len(asked.prompts)),
        longest=asked.longest,
        k=settings.num_speculative_tokens,
    )
