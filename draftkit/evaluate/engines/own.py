"""draftkit's own runtime: the only engine that keeps a record of every round."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftkit.engines.records import Answer
from draftkit.errors import SettingError, TargetError, command
from draftkit.evaluate.engine import BaseEngine
from draftkit.evaluate.job import Job
from draftkit.evaluate.measure import Conversations, Lane, PromptProgress, ReferenceAnswers, Report, Run
from draftkit.evaluate.near_ties import generated, near_ties, widest_tie
from draftkit.evaluate.planning import plans_of
from draftkit.evaluate.runtime_lane import engine_of, runtime_lane
from draftkit.evaluate.speed import batches_up_to, measure_round_times, speed_model
from draftkit.layout.folder import Draft
from draftkit.loading import load_drafter
from draftkit.results.cell import Cell
from draftkit.results.record import SpeedModel
from draftkit.results.settings import Settings
from draftkit.runtime.compiled.programs import check_compiler
from draftkit.runtime.drafters.protocol import Drafter
from draftkit.runtime.engine import check_draft_tokens, check_drafts_trees
from draftkit.runtime.memory_plan import GIB, MemoryPlan
from draftkit.targets.devices import device_named, dtype_named, tune_for_cpu
from draftkit.targets.rope import Positions
from draftkit.targets.target import Target

BY_VLLM = "--engine vllm --vllm-python ENV/bin/python runs vLLM, --server URL takes a server of it"


class OwnEngine(BaseEngine):
    """draftkit's own engine, with target and drafts loaded once for all cells."""

    name = "draftkit"
    takes = frozenset({"image"})
    keeps_rounds = True

    def check(self, job: Job) -> None:
        super().check(job)
        job.opened_target.require_runtime(BY_VLLM)
        if job.sweep.first.compile:
            _check_compiled(job.sweep.first)
        _check_contexts(job)

    def open(self, on_progress: PromptProgress) -> None:
        super().open(on_progress)
        job, sweep = self.job, self.job.sweep
        for source, draft in job.drafts.items():
            check_draft_tokens(max(sweep.k), draft.spec.architecture.most_draft_tokens, source)
        self.plans = plans_of(job, sweep.largest)
        for source, plan in self.plans.items():
            _check_size(source, job.opened_target.name, plan, job.drafts[source])
            plan.require()
        device = device_named(sweep.first.device)
        dtype = dtype_named(sweep.first.dtype, device)
        _ = job.digest  # begins beside what is loaded
        self.model = job.loaded_target.load(device=device, dtype=dtype)
        self.drafts = {
            source: _Loaded.of(draft, self.model, job.opened_target.tokenizer) for source, draft in job.drafts.items()
        }
        tune_for_cpu(self.model)
        if any(settings.tree is not None for settings in sweep.settings):
            for source, loaded in self.drafts.items():
                check_drafts_trees(loaded.target, loaded.needed, source)

    @contextmanager
    def lane(self, source: str | None, asked: Conversations, report: Report) -> Iterator[Lane]:
        settings = asked.settings
        loaded = _Loaded(Target(self.model), None) if source is None else self.drafts[source]
        slots = min(settings.concurrency, len(asked.first_requests))
        recorded = self.job.records and source is not None
        runtime = engine_of(loaded.target, loaded.drafter, settings, num_slots=slots, estimates=recorded)
        runtime.reserve(asked.longest)
        runtime.warm_up(asked.first_requests)
        yield runtime_lane(runtime, report)

    def alone(self, settings: Settings) -> str | None:
        twice = all(plan.holds_twice("target cache", "target states") for plan in self.plans.values())
        return None if twice else "the memory that is left does not hold the target's cache twice"

    def told(self, cell: Cell, run: Run, plain: Run | None) -> Cell:
        """Add the plan of memory, and the near-ties where the output is to be that of plain decoding, token by token.
        Raises `DraftkitError` where it is another."""
        ties = None
        in_full = self.model.dtype == torch.float32 and cell.temperature == 0
        if plain is not None and in_full:
            ties = tuple(near_ties(self.model, run.generations, plain.generations, cell.draft))
        return replace(cell, near_ties=ties, memory=self.plans[cell.draft])

    def reference(self, plain: Run) -> ReferenceAnswers:
        """The answers of transformers' `generate`."""
        target, texts = Target(self.model), plain.generations
        answers = tuple(Answer(generated(target, text.request), None, None) for text in texts)
        return ReferenceAnswers("transformers' generate", answers, widest_tie(target, texts))

    def speed_models(self, cells: Sequence[Cell]) -> list[SpeedModel]:
        """Tell of each draft in each context what its round times say about every K and batch size."""
        own = [cell for cell in cells if cell.engine == self.name]
        return [
            self._speed_model(source, [cell for cell in own if (cell.context or 0) == context], context)
            for source in self.drafts
            for context in self.job.sweep.context
        ]

    def _speed_model(self, source: str, own: Sequence[Cell], context: int) -> SpeedModel:
        mine = [cell for cell in own if cell.draft == source and cell.temperature == own[0].temperature]
        mine = [cell for cell in mine if cell.min_confidence == own[0].min_confidence]
        sweep, loaded = self.job.sweep, self.drafts[source]
        settings = sweep.first.at(num_speculative_tokens=max(sweep.k), context=context)
        batches = batches_up_to(max(cell.concurrency for cell in mine))
        self.on_progress(f"{source}, round times", 0, 1, _length(mine[0]))
        requests = self.job.conversations(settings).first_requests
        times = measure_round_times(Target(self.model), loaded.target, loaded.needed, requests, settings, batches)
        return replace(speed_model(source, mine, times), context=context or None)


@dataclass(frozen=True)
class _Loaded:
    """A draft's drafter, and the target with the aux_layers that it reads; None without a draft."""

    target: Target
    drafter: Drafter | None

    @classmethod
    def of(cls, draft: Draft, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> _Loaded:
        drafter = load_drafter(draft, model, tokenizer)
        return cls(Target(model, drafter.aux_layers), drafter)

    @property
    def needed(self) -> Drafter:
        assert self.drafter is not None
        return self.drafter


def _check_size(source: str, target: str, plan: MemoryPlan, draft: Draft) -> None:
    """Raise `TargetError` for a draft model that is larger than its target: it can only be slower."""
    own, of_target = plan.fixed.get(f"weights of {source}", 0), plan.fixed["target weights"]
    if draft.spec.architecture.own_model and own > of_target:
        raise TargetError(
            f"{source} is larger than its target {target}: {own / GIB:.3f} and {of_target / GIB:.3f} GiB of weights",
            hint=f"did you mean {command('--target', source, '--draft', target)}?",
        )


def _check_compiled(settings: Settings) -> None:
    """Raise `DraftkitError` where rounds are to be compiled and cannot be."""
    if (device := device_named(settings.device)) != "cpu":
        what = f"rounds are compiled on a CPU alone, and the device is {device}"
        raise SettingError(what, "compile", hint="leave out --compile: a GPU replays rounds from CUDA graphs")
    check_compiler()


def _check_contexts(job: Job) -> None:
    """Raise `DraftkitError` for a context that the target has no positions for, before texts are put together."""
    for context in filter(None, job.sweep.context):
        positions = Positions.of(job.opened_target.config)
        positions.check(f"of --context {context}", context, job.sweep.first.max_new_tokens)


def _length(cell: Cell) -> float:
    """The acceptance length as progress shows it."""
    return cell.acceptance_length.mean if cell.acceptance_length else math.nan
