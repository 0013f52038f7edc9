"""Measuring drafts: the same prompts without a draft and with each, on draftkit's own runtime."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftkit.checks.measurement import Asked
from draftkit.checks.registry import Evidence, findings
from draftkit.engines.serving import serve_commands
from draftkit.engines.vllm.settings import VllmSettings
from draftkit.errors import DraftkitError, NonFiniteError, TargetError, UnsupportedTarget, command
from draftkit.evaluate.axes import with_slices
from draftkit.evaluate.by_turns import by_turns, sides
from draftkit.evaluate.cells import cell_of, drawn_as
from draftkit.evaluate.datasets import PromptSet, load_prompt_set
from draftkit.evaluate.forecast import TEMPERATURES, forecast
from draftkit.evaluate.greedy import near_ties
from draftkit.evaluate.measure import Conversations, Lane, Progress, Run
from draftkit.evaluate.notebook import notebook_progress
from draftkit.evaluate.planning import plan_memory
from draftkit.evaluate.present_device import present_device
from draftkit.evaluate.provenance import provenance
from draftkit.evaluate.round_cost import DEVICES
from draftkit.evaluate.speed import MISSED, batches_up_to, measure_round_times, speed_model
from draftkit.evaluate.time_plan import PlannedRound, plan_time
from draftkit.evaluate.vllm import BY_VLLM, check_with_vllm, measure_with_vllm, plain_lane, vllm_here
from draftkit.finding import Finding
from draftkit.hub.locate import locate
from draftkit.io.lock import sole_writer
from draftkit.layout.digest import draft_sha256, target_sha256
from draftkit.layout.folder import Draft, is_unified
from draftkit.layout.target import read_target_facts
from draftkit.loading import (
    OWN_HEAD,
    load_drafter,
    load_model,
    load_target_tokenizer,
    open_draft,
    require_runtime,
    runtime_refusal,
)
from draftkit.results.record import Cell, Heading, Predicted, Result, ResultVerdict, ResultWarning, SpeedModel
from draftkit.results.saved import ResultFile, append_rounds, check_records, replaced_by
from draftkit.results.settings import Settings, Sweep
from draftkit.results.verdict import verdicts
from draftkit.runtime.drafters.protocol import Drafter
from draftkit.runtime.engine import check_draft_tokens
from draftkit.runtime.memory_plan import GIB, MemoryPlan
from draftkit.targets.chat import template_sha256
from draftkit.targets.devices import device_named, dtype_named, tune_for_cpu
from draftkit.targets.positions import Positions
from draftkit.targets.target import Target, read_target_config

T = TypeVar("T", bound=Heading)


def evaluate_draft(
    target: str,
    drafts: str | Sequence[str],
    asked: Settings | Sweep | None = None,
    on_progress: Progress | None = None,
    *,
    advise: bool = False,
    predict: bool = False,
    saved: ResultFile | None = None,
    records: Path | None = None,
    vllm: VllmSettings | None = None,
    fall_back: bool = True,
) -> Result:
    """Measure drafts against their target.

    `target` and `drafts` are paths, Hub ids or `zoo:NAME`; drafts may be foreign, `ngram[:MIN-MAX]` and `suffix`.
    One draft may be given by itself. `on_progress` None: bars in a notebook, nothing elsewhere.
    `asked`: how, at one setting or at those of a sweep. `advise` times rounds and says which K would be fastest at
    which batch size; `predict` tells acceptance at other temperatures and K. Cells that `saved` holds
    are not measured again. `records`: a file to which the raw record of every round is appended. With `vllm` the same
    prompts run through vLLM too, and through it alone where draftkit's engine cannot run the pair; without it they do
    where that does not run the target and this environment has vLLM, unless `fall_back` is False.

    Returns a cell for each draft and setting, with provenance, warnings and speed models: `Result.to_dict` is what
    `eval --json` prints. Raises `DraftkitError`.
    """
    drafts = [drafts] if isinstance(drafts, str) else drafts
    on_progress = on_progress or notebook_progress()
    sweep = Sweep.of(asked or Settings())
    settings = sweep.first
    with ExitStack() as stack:
        # Everything that can be wrong with the input shows before the first long computation.
        if records is not None:
            stack.enter_context(sole_writer(records))
            check_records(records)
        refusal = runtime_refusal(target)
        if refusal is not None:
            vllm = vllm or (vllm_here() if fall_back else None)
            if vllm is None:
                raise refusal.otherwise(BY_VLLM)
            own = {"--advise": advise, "--predict": predict, "--records": records is not None}
            if asked_for := [name for name, given in own.items() if given]:
                raise refusal.otherwise(f"leave out {', '.join(asked_for)}: vLLM does not tell of single rounds")
        if vllm is not None:
            check_with_vllm(target, drafts, sweep, vllm)
        else:
            _check_contexts(target, sweep)
        prompts, tokenizer, conversations = _prompts(target, settings)
        device = device_named(settings.device)
        first_ids = conversations.first_requests[0].prompt
        turns = [len(prompt.turns) for prompt in prompts.prompts]
        seen = Asked(prompts.source, turns, prompts.masked, first_ids, tokenizer.bos_token_id, prompts.left_out)
        warned = findings(Evidence(asked=seen, settings=settings), "measurement")
        made = provenance(device, dtype_named(settings.dtype, device), tokenizer, prompts, first_ids, settings)
        if saved is not None:
            saved.begin(made, [target, *drafts])
        cells = [] if saved is None else list(saved.cells)
        done = {cell.key for cell in cells}
        measured: list[Iterator[tuple[Cell, tuple[str, ...]]]] = []
        opened: dict[str, Draft] = {}
        evaluation = None
        digests = _Digests(prompts.sha256, None if settings.template is False else template_sha256(tokenizer))
        try:
            opened = {source: stack.enter_context(open_draft(source, target)) for source in drafts}
            warned += _made_for_others(target, opened)
            digests = digests.with_weights(opened, None if saved is None else locate(target).path)
            if refusal is not None:
                raise refusal
            for source, draft in opened.items():
                check_draft_tokens(max(sweep.k), draft.spec.architecture.most_draft_tokens, source)
            largest = Conversations(prompts.prompts, tokenizer, sweep.largest)
            plans = _plans(target, opened, largest, sweep.largest)
            for source, plan in plans.items():
                _check_size(source, target, plan, opened[source])
                plan.require()
            evaluation = _Evaluation(target, opened, plans, digests, prompts, tokenizer, sweep, on_progress, records)
            measured.append(evaluation.cells(done))
        except DraftkitError as error:
            if vllm is None or isinstance(error, NonFiniteError):  # another engine would measure garbage
                raise
            why = error.problem if isinstance(error, UnsupportedTarget) else error
            warned.append(_warning("vllm-only", f"draftkit's own engine does not run this pair: {why}"))
        if vllm is not None:
            if vllm.url is not None and any(cell.engine == "vllm" for cell in cells):
                warned.append(_warning("server-resumed", "kept figures of a server, whose weights cannot be compared"))
            measured.append(_with_vllm(target, drafts, conversations, digests, sweep, vllm, done, on_progress))
        for cell, concerns in itertools.chain.from_iterable(measured):
            warned += [_warning("other-traffic", concern) for concern in concerns]
            if reason := replaced_by(cell, cells):
                warned.append(_warning("measured-again", f"{cell.name}: measured again, because {reason}"))
            cells.append(with_slices(cell, prompts.prompts, settings.slices))
            if saved is not None:
                saved.add(cells[-1])
        for cell in cells:
            spec = opened[cell.draft].spec if cell.draft in opened else None
            warned += findings(Evidence(cell=cell, settings=settings, spec=spec), "measurement")
        models: list[SpeedModel] = []
        if evaluation is not None:
            if predict:
                cells, missed = evaluation.with_predictions(cells)
                warned += missed
            if advise:
                models = [
                    evaluation.speed_model(source, [c for c in cells if (c.context or 0) == context], context)
                    for source in drafts
                    for context in sweep.context
                ]
        warnings = tuple(ResultWarning.of(finding) for finding in dict.fromkeys(warned))
        judged = tuple(_served(verdict, opened, target) for verdict in verdicts(cells))
        result = Result(tuple(cells), made, warnings, tuple(models), judged)
        if saved is not None:
            saved.write(result.to_dict())
        return result


def _made_for_others(target: str, drafts: Mapping[str, Draft]) -> Iterator[Finding]:
    """The drafts that say of themselves that they were made for another target."""
    located = locate(target, weights=False)
    facts = read_target_facts(located.path, located.name, located.revision)
    for name, draft in drafts.items():
        yield from findings(Evidence(draft=draft, draft_name=name, target=facts), "pair")


def _served(verdict: ResultVerdict, drafts: Mapping[str, Draft], target: str) -> ResultVerdict:
    """The verdict with the commands that serve what it says to use."""
    name, k = verdict.draft, verdict.num_speculative_tokens
    if verdict.kind != "use" or name is None or name not in drafts or name == OWN_HEAD:
        return verdict
    draft = drafts[name]
    if not draft.tensors or is_unified(locate(name, as_file=True).path):
        return replace(verdict, commands=serve_commands(draft, draft.path, target=target, k=k, local=True))
    folder = f"{name.rstrip('/').rpartition('/')[2].rpartition(':')[2]}-draftkit"
    convert = command("draftkit", "convert", name, folder, "--target", target)
    commands = serve_commands(draft, Path(folder), target=target, k=k, local=True)
    return replace(verdict, commands={engine: f"{convert}\n{serve}" for engine, serve in commands.items()})


def _warning(name: str, message: str) -> Finding:
    return Finding(name, "warning", message)


def _with_vllm(
    target: str,
    drafts: Sequence[str],
    conversations: Conversations,
    digests: _Digests,
    sweep: Sweep,
    vllm: VllmSettings,
    done: set[tuple[object, ...]],
    on_progress: Progress,
) -> Iterator[tuple[Cell, tuple[str, ...]]]:
    """The cells that vLLM measures, but for those that are done, and what may be wrong with each."""
    categories = [prompt.category for prompt in conversations.prompts]
    seen = digests.without_weights() if vllm.url else digests
    for group in sweep.groups:
        wanted = [
            (source, settings)
            for source in drafts
            for settings in group
            if seen.of(Heading.of(settings, engine="vllm", target=target, draft=source)).key not in done
        ]
        if not wanted:
            continue
        requests = Conversations(conversations.prompts, conversations.tokenizer, group[0]).first_requests
        with plain_lane(target, requests, _longest(group), vllm, on_progress) as plain:
            for source, settings in wanted:
                cell, concerns = measure_with_vllm(
                    target,
                    source,
                    requests,
                    settings,
                    vllm,
                    plain=plain,
                    categories=categories,
                    on_progress=on_progress,
                )
                yield seen.of(cell), concerns


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

    def of(self, record: T) -> T:
        """A cell, or the heading of one, that says what was measured."""
        return replace(
            record,
            target_sha256=self.target,
            draft_sha256=self.drafts.get(record.draft),
            prompts_sha256=self.prompts,
            template_sha256=self.template,
        )


def plan_evaluation(target: str, drafts: Sequence[str], settings: Settings | None = None) -> dict[str, MemoryPlan]:
    """What `evaluate_draft` would take of memory with each draft; no weights are loaded. Raises `DraftkitError`."""
    settings = settings or Settings()
    require_runtime(target, "vLLM plans its memory itself: run draftkit eval --engine vllm")
    with ExitStack() as stack:
        _, _, conversations = _prompts(target, settings)
        opened = {source: stack.enter_context(open_draft(source, target)) for source in drafts}
        return _plans(target, opened, conversations, settings)


def plan_rounds(
    target: str, drafts: Sequence[str], asked: Settings | Sweep | None = None
) -> dict[str, list[PlannedRound]]:
    """What a round of each draft would take, on the device at hand and on those of a small table; no weights are
    loaded. Sequences look back on their prompt and half of what follows, in the mean. Raises `DraftkitError`."""
    sweep = Sweep.of(asked or Settings())
    require_runtime(target, "rounds are planned for draftkit's own engine alone")
    device = device_named(sweep.first.device)
    dtype = dtype_named(sweep.first.dtype, device)
    asked_at = [_prompts(target, sweep.first.at(context=context))[2].extents for context in sweep.context]
    here = present_device(torch.device(device), dtype)
    with ExitStack() as stack:
        return plan_time(
            locate(target).path,
            {source: stack.enter_context(open_draft(source, target)) for source in drafts},
            devices=[here, *(listed for listed in DEVICES if listed is not here)],
            dtype=dtype,
            batches=sweep.concurrency,
            contexts=[round(mean(prompt + new / 2 for _, prompt, new in extents)) for extents in asked_at],
            ks=sweep.k,
        )


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
        sweep: Sweep,
        on_progress: Progress,
        records: Path | None,
    ):
        device = device_named(sweep.first.device)
        self.target = target
        self.model, _ = load_model(target, device=device, dtype=dtype_named(sweep.first.dtype, device))
        self.drafts = {source: _Loaded.of(draft, self.model, tokenizer) for source, draft in opened.items()}
        self.plans = plans
        self.digests = digests
        self.prompts = prompts
        self.tokenizer = tokenizer
        self.sweep = sweep
        self.on_progress = on_progress
        self.records = records
        tune_for_cpu(self.model)

    def cells(self, done: set[tuple[object, ...]]) -> Iterator[tuple[Cell, tuple[str, ...]]]:
        """All cells but those that are done; nothing is wrong with them that could be told already."""
        for group in self.sweep.groups:
            for cell in self._group(group, done):
                yield cell, ()

    def _group(self, group: Sequence[Settings], done: set[tuple[object, ...]]) -> Iterator[Cell]:
        """The cells of settings that share a run without a draft."""
        wanted = [
            (source, settings, heading)
            for source in self.drafts
            for settings in group
            if (heading := self._heading(source, settings)).key not in done
        ]
        if not wanted:
            return
        asked = self._asked(_longest(group))
        without = Lane(Target(self.model), None, asked, "no draft", self.on_progress)
        shared = all(plan.holds_twice("target cache", "target states") for plan in self.plans.values())
        before = None if shared and group[0].repeats else without.run(asked)
        if not shared:
            del without  # its memory is the draft's now
        for source, settings, heading in wanted:
            loaded, asked = self.drafts[source], self._asked(settings)
            name = f"{source}, K={settings.num_speculative_tokens}"
            lane = Lane(loaded.target, loaded.drafter, asked, name, self.on_progress)
            if before is None:
                passes, error = by_turns(asked.blocks, without.run, lane.run, settings.repeats)
                plain, run = (Run.joined(runs) for runs in sides(passes))
            else:
                passes, error, plain, run = [], math.inf, before, lane.run(asked)
            del lane
            if self.records is not None:
                append_rounds(self.records, heading, run.generations)
            ties = None
            if self.model.dtype == torch.float32 and settings.exact and settings.sampling.temperature == 0:
                ties = near_ties(self.model, run.generations, plain.generations, source)
            yield cell_of(
                heading,
                run,
                plain,
                settings,
                self.tokenizer,
                plan=self.plans[source],
                passes=len(passes) or None,
                pace_error=error,
                near_ties=ties,
            )

    def with_predictions(self, cells: Sequence[Cell]) -> tuple[list[Cell], list[Finding]]:
        """The cells, each draft's of the most draft tokens with what is predicted for other settings; and what was
        left out of it, because it misses what was measured by more than its interval."""
        found, missed = list(cells), []
        for source in self.drafts:
            at, cell = max(
                ((at, c) for at, c in enumerate(cells) if c.engine == "draftkit" and c.draft == source),
                key=lambda place: (-place[1].temperature, place[1].num_speculative_tokens),
            )
            predicted = self._predicted(cell)
            wrong = {
                (p.temperature, p.draft_sampling): (p, measured)
                for p in predicted
                for measured in cells
                if measured.measures(p, cell) and _misses(p, measured)
            }
            kept = tuple(p for p in predicted if (p.temperature, p.draft_sampling) not in wrong)
            found[at] = replace(cell, predicted=kept)
            missed += [_missed_prediction(*pair) for pair in wrong.values()]
        return found, missed

    def _predicted(self, cell: Cell) -> tuple[Predicted, ...]:
        loaded, asked = self.drafts[cell.draft], self.sweep.first.at(num_speculative_tokens=cell.num_speculative_tokens)
        predicted: list[Predicted] = []
        temperatures = sorted({*TEMPERATURES, *self.sweep.temperature} - {0.0})
        for done, temperature in enumerate(temperatures):
            self.on_progress(f"{cell.draft}, other temperatures", done, len(temperatures), _length(cell))
            predicted += forecast(loaded.target, loaded.drafter, self._asked(asked.at(temperature=temperature)))
        return tuple(predicted)

    def speed_model(self, source: str, cells: Sequence[Cell], context: int) -> SpeedModel:
        """What a draft's round times say about every K and batch size, in a context."""
        own = [cell for cell in cells if cell.engine == "draftkit"]
        mine = [cell for cell in own if cell.draft == source and cell.temperature == own[0].temperature]
        loaded, settings = (
            self.drafts[source],
            self.sweep.first.at(num_speculative_tokens=max(self.sweep.k), context=context),
        )
        batches = batches_up_to(max(cell.concurrency for cell in mine))
        self.on_progress(f"{source}, round times", 0, 1, _length(mine[0]))
        requests = self._asked(settings).first_requests
        times = measure_round_times(Target(self.model), loaded.target, loaded.drafter, requests, settings, batches)
        return replace(speed_model(source, mine, times), context=context or None)

    def _asked(self, settings: Settings) -> Conversations:
        return Conversations(self.prompts.prompts, self.tokenizer, settings)

    def _heading(self, source: str, settings: Settings) -> Heading:
        heading = Heading.of(
            settings,
            engine="draftkit",
            target=self.target,
            draft=source,
            method=self.drafts[source].method,
            dataset=self.prompts.name,
        )
        return self.digests.of(drawn_as(heading, source))


def _check_size(source: str, target: str, plan: MemoryPlan, draft: Draft) -> None:
    """Raise `TargetError` for a draft model that is larger than its target: it can only be slower."""
    own, of_target = plan.fixed.get(f"weights of {source}", 0), plan.fixed["target weights"]
    if draft.spec.architecture.own_model and own > of_target:
        raise TargetError(
            f"{source} is larger than its target {target}: {own / GIB:.3f} and {of_target / GIB:.3f} GiB of weights",
            hint=f"did you mean {command('--target', source, '--draft', target)}?",
        )


def _check_contexts(target: str, sweep: Sweep) -> None:
    """Raise `DraftkitError` for a context that the target has no positions for, before texts are put together."""
    for context in filter(None, sweep.context):
        positions = Positions.of(read_target_config(locate(target, weights=False).path))
        positions.check(f"of --context {context}", context, sweep.first.max_new_tokens)


def _longest(group: Sequence[Settings]) -> Settings:
    """The settings of the most draft tokens: what is run once for all of a group is sized for it."""
    return max(group, key=lambda settings: settings.num_speculative_tokens)


def _misses(predicted: Predicted, measured: Cell) -> bool:
    """Whether a prediction is farther from what was measured than its interval, and than rounding of figures."""
    length = measured.acceptance_length
    if length is None or length.bounds is None:
        return False
    low, high = length.bounds
    return not low * (1 - MISSED) <= predicted.acceptance_length <= high * (1 + MISSED)


def _missed_prediction(predicted: Predicted, measured: Cell) -> Finding:
    assert measured.acceptance_length is not None
    return _warning(
        "prediction-missed",
        f"{measured.name}, T={measured.temperature:g}: {predicted.acceptance_length:.2f} was predicted and "
        f"{measured.acceptance_length.mean:.2f} measured: no predictions are given there; measure other K themselves",
    )


def _length(cell: Cell) -> float:
    """As progress shows it."""
    return cell.acceptance_length.mean if cell.acceptance_length else math.nan


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
    prompts = load_prompt_set(settings.prompts, settings.limit, strict=settings.strict)
    tokenizer = load_target_tokenizer(target)
    return prompts, tokenizer, Conversations(prompts.prompts, tokenizer, settings)


def _plans(
    target: str, drafts: Mapping[str, Draft], conversations: Conversations, settings: Settings
) -> dict[str, MemoryPlan]:
    folder, device = locate(target).path, device_named(settings.device)
    positions = Positions.of(read_target_config(folder))
    for name, prompt, new in conversations.extents:
        positions.check(name, prompt, new)
    return plan_memory(
        folder,
        drafts,
        device=torch.device(device),
        dtype=dtype_named(settings.dtype, device),
        num_slots=min(settings.concurrency, len(conversations.prompts)),
        longest=conversations.longest,
        k=settings.num_speculative_tokens,
    )
