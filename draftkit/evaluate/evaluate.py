"""Measuring drafts: the same prompts without a draft and with each, on draftkit's own runtime and on other engines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from draftkit.checks.evidence import Asked, Evidence
from draftkit.checks.registry import findings
from draftkit.engines import sglang
from draftkit.engines.known import measured_by
from draftkit.engines.serving import serve_commands, serve_trees
from draftkit.errors import DraftkitError, SettingError, command
from draftkit.evaluate.cell import cell_of, labels_of, with_slices
from draftkit.evaluate.contexts import REFERENCE
from draftkit.evaluate.engine import BaseEngine, able
from draftkit.evaluate.job import Job, seen_by
from draftkit.evaluate.job import asked as asked_of
from draftkit.evaluate.measure import Conversations, PromptProgress, Run, interleaved, sides
from draftkit.evaluate.notebook import notebook_progress
from draftkit.evaluate.progress import WholeRun
from draftkit.finding import Finding
from draftkit.hub.locate import Located
from draftkit.io.lock import sole_writer
from draftkit.layout.folder import Draft, is_unified, read_draft
from draftkit.requests import Request
from draftkit.results.cell import Cell, Heading
from draftkit.results.contexts import falls, with_shifts
from draftkit.results.record import Result, ResultWarning, SpeedModel
from draftkit.results.recorded import append_rounds, check_records
from draftkit.results.saved import ResultFile, replaced_by
from draftkit.results.settings import Settings, Sweep
from draftkit.results.verdict import ResultVerdict, verdicts
from draftkit.runtime.tree_kinds import read_tree

if TYPE_CHECKING:
    from draftkit.loading import OpenedTarget

Hold = Callable[[Conversations], Run]  # a lane that is asked conversations


def evaluate_draft(
    target: str | OpenedTarget | None,
    drafts: str | Sequence[str],
    asked: Settings | Sweep | None = None,
    on_progress: PromptProgress | None = None,
    *,
    engines: Sequence[BaseEngine] = (),
    advise: bool = False,
    saved: ResultFile | None = None,
    records: Path | None = None,
    weigh: bool = False,
) -> Result:
    """Measure drafts against their target.

    `target` and `drafts` are paths, Hub ids or `zoo:NAME`; a target may be opened already, and drafts may be foreign,
    `ngram[:MIN-MAX]` and `suffix`.
    One draft may be given by itself. `asked`: how, at one setting or at those of a sweep. `on_progress` None: bars in a
    notebook, nothing elsewhere.

    `engines` run the prompts one after another: draftkit's own where none is given, or vLLM where that does not run the
    target and this environment has vLLM. Where one of several does not run the pair, the others do. A server has its
    own target and draft: `target` gives the tokenizer, and None sends messages; a draft is only named, or none is. One
    that is named by its unified folder is held against the release that the server says it is.

    `advise` times rounds and says which K would be fastest at which batch size. Cells that `saved`
    holds are not measured again, and each that is measured is written there at once, with the digest of the target's
    weights, which `weigh` takes without it. `records`: a file to which the raw record of every round is appended.

    Returns a cell for each engine, draft and setting, with provenance, warnings and speed models: `Result.to_dict` is
    what `eval --json` prints. Raises `DraftkitError`.
    """
    drafts = [drafts] if isinstance(drafts, str) else drafts
    on_progress = on_progress or notebook_progress()
    sweep = Sweep.of(asked or Settings())
    if sweep.trees and advise:
        raise SettingError("advice is given from a chain's run", "tree", hint="leave out --tree, or --advise")
    with ExitStack() as stack:
        # Everything that can be wrong with the input shows before the first long computation.
        if records is not None:
            stack.enter_context(sole_writer(records))
            check_records(records)
        resumes = saved is not None or weigh
        job = Job(
            target, drafts, sweep, stack, resumes=resumes, records=records is not None,
        )  # fmt: skip
        warned: list[Finding] = []
        prepared = engines or _default_engines(job)
        job.takes = frozenset.intersection(*(engine.takes for engine in prepared))

        def skipped(why: str) -> None:
            warned.append(Finding(f"{prepared[-1].name}-only", "warning", why))

        running = able(prepared, lambda engine: engine.check(job), skipped)
        wanted = {"--advise": advise, "--records": records}
        _require_rounds(running, [name for name, value in wanted.items() if value])
        warned = [*_of_prompts(job), *warned]
        made = _provenance(running[0], job)
        if any(engine.sees_weights for engine in running) and (sources := _sources(job)):
            made |= {"sources": sources}
        if saved is not None:
            saved.begin(made, [*([] if target is None else [job.opened_target.name]), *drafts])
        cells = [] if saved is None else list(saved.cells)
        kept = tuple(cells)
        opened = job.drafts if any(engine.sees_weights for engine in running) else {}
        if target is not None:
            warned += _made_for_others(job.opened_target, opened)
        running = able(running, lambda engine: engine.open(on_progress), skipped)
        for engine in running:
            warned += _of_engine(engine, cells)
            label = f", {engine.name}" if len(running) > 1 else ""
            for cell, run in _Measurement(engine, job, on_progress, label, records).cells(kept):
                warned += [Finding("other-traffic", "warning", concern) for concern in run.concerns]
                if reason := replaced_by(cell, cells):
                    warned += [Finding("measured-again", "warning", f"{cell.name}: measured again, because {reason}")]
                cells.append(cell)
                if saved is not None:
                    saved.add(cell)
        warned += _of_cells(cells, opened, sweep.first, drafts)
        cells = with_shifts(cells)
        warned += [*falls(cells), *_borrowed(job)]
        models: list[SpeedModel] = []
        for engine in running:
            if advise:
                models += engine.speed_models(cells)
        warnings = tuple(ResultWarning.of(finding) for finding in dict.fromkeys(warned))
        judged = tuple(_served(verdict, job) if verdict.draft in opened else verdict for verdict in verdicts(cells))
        result = Result(tuple(cells), made, warnings, tuple(models), judged)
        if saved is not None:
            saved.write(result.to_dict())
        return result


def _default_engines(job: Job) -> Sequence[BaseEngine]:
    """draftkit's own, and vLLM where that does not run the target and vLLM is here."""
    from draftkit.evaluate.engines.own import OwnEngine  # needs torch, as what it names does
    from draftkit.evaluate.engines.vllm import vllm_here

    refused = job.target is not None and job.opened_target.refusal is not None
    return [OwnEngine(), *([here] if refused and (here := vllm_here()) is not None else [])]


def _require_rounds(engines: Sequence[BaseEngine], wanted: Sequence[str]) -> None:
    """Raise `DraftkitError` where options are wanted that need the record of each round, which no engine keeps."""
    if wanted and not any(engine.keeps_rounds for engine in engines):
        raise DraftkitError(f"{engines[-1].name} keeps no record of each round", hint=f"leave out {', '.join(wanted)}")


def _of_engine(engine: BaseEngine, kept: Sequence[Cell]) -> Iterator[Finding]:
    """The findings about an engine that goes on with the cells that are kept."""
    for what in engine.untold:
        yield Finding("not-told", "note", f"{engine.name} does not tell {what}")
    if not engine.sees_weights and any(cell.engine == engine.name for cell in kept):
        yield Finding("server-resumed", "warning", "kept figures of a server, whose weights cannot be compared")


def _of_prompts(job: Job) -> list[Finding]:
    """The findings about the prompts, and about how the target sees them."""
    prompts, tokenizer = job.prompts, job.tokenizer
    first = job.conversations(job.sweep.first).first_requests[0].prompt
    begins = None if tokenizer is None else tokenizer.bos_token_id
    turns = [len(prompt.turns) for prompt in prompts.prompts]
    seen = Asked(prompts.source, turns, prompts.masked, first, begins, prompts.left_out)
    return list(findings(Evidence(asked=seen, settings=job.sweep.first), "measurement"))


def _borrowed(job: Job) -> Iterator[Finding]:
    """A note where the set had too little text to fill its contexts."""
    if job.sweep.largest.context and job.filler is not None and job.filler.borrowed:
        said = (
            f"of up to {job.filler.borrowed:,} tokens of context are {REFERENCE}: the set has no more text of its own"
        )
        yield Finding("borrowed-context", "note", said)


def _provenance(engine: BaseEngine, job: Job) -> dict[str, object]:
    """The provenance of the cells: where they are measured, and of what."""
    found = engine.provenance | asked_of(job.prompts, job.sweep.first)
    if job.tokenizer is not None:
        found |= seen_by(job.tokenizer, job.conversations(job.sweep.first).first_requests[0].prompt)
    return found


def _sources(job: Job) -> dict[str, str]:
    """What the target and drafts are called on the Hub, with the commit, where they are, or are from, there."""
    found = {}
    for name, located in {job.opened_target.name: job.opened_target.located, **_places(job)}.items():
        block = located.config.get("draftkit") if located.is_unified else None
        made = block.get("provenance") if isinstance(block, dict) else None
        if located.repo is not None:
            found[name] = located.at_commit
        elif isinstance(made, dict) and made.get("source_revision"):
            found[name] = f"{made.get('source')}@{made['source_revision']}"
    return found


def _places(job: Job) -> dict[str, Located]:
    """Where the checkpoints of the drafts lie."""
    return {name: opened.located for name, opened in job.opened.items() if opened.located is not None}


def _of_cells(
    cells: Iterable[Cell], opened: Mapping[str, Draft], settings: Settings, named: Sequence[str]
) -> Iterator[Finding]:
    """The findings about cells, by what is known of their drafts. `named`: what the user calls the drafts."""
    for cell in cells:
        if (draft := opened.get(cell.draft)) is None:
            yield from _of_a_server(cell, settings, named)
            continue
        origins = {fact.name: fact for fact in draft.provenance.facts}
        yield from findings(Evidence(cell=cell, settings=settings, spec=draft.spec, origins=origins), "measurement")


def _of_a_server(cell: Cell, settings: Settings, drafts: Sequence[str]) -> list[Finding]:
    """The findings about a cell whose draft was not opened. Where the user named the draft by its unified folder on
    this machine, the release that has run says whether it serves such a draft."""
    spec = None
    with suppress(DraftkitError, OSError):  # a name is all that a server's draft needs
        if cell.draft in drafts and is_unified(Path(cell.draft)):
            spec = read_draft(Path(cell.draft)).spec
    with measured_by(cell.engine, cell.engine_version):
        return list(findings(Evidence(cell=cell, settings=settings, spec=spec), "measurement"))


def _made_for_others(target: OpenedTarget, drafts: Mapping[str, Draft]) -> Iterator[Finding]:
    """The drafts that say of themselves that they were made for another target."""
    for name, draft in drafts.items():
        yield from findings(Evidence(draft=draft, draft_name=name, target=target.facts), "pair")


def _served(verdict: ResultVerdict, job: Job) -> ResultVerdict:
    """The verdict on a draft of the job, with the commands that serve it where it says to use it."""
    from draftkit.loading import OWN_HEAD

    name, k = verdict.draft, verdict.num_speculative_tokens
    if verdict.kind != "use" or name is None or name == OWN_HEAD:
        return verdict
    draft, target = job.drafts[name], job.opened_target.name
    if verdict.tree is not None:
        return replace(verdict, commands=_tree_commands(verdict, draft, job))
    if not job.opened[name].is_foreign:
        return replace(verdict, commands=serve_commands(draft, draft.path, target=target, k=k, local=True))
    folder = f"{name.rstrip('/').rpartition('/')[2].rpartition(':')[2]}-draftkit"
    convert = command("draftkit", "convert", name, folder, "--target", target)
    commands = serve_commands(draft, Path(folder), target=target, k=k, local=True)
    return replace(verdict, commands={engine: f"{convert}\n{serve}" for engine, serve in commands.items()})


def _tree_commands(verdict: ResultVerdict, draft: Draft, job: Job) -> dict[str, str]:
    """The commands of the engines that draft a verdict's tree with such a draft, from the layout that they read."""
    assert verdict.draft is not None
    assert verdict.tree is not None
    tree, target = read_tree(verdict.tree).dynamic, job.opened_target.name
    if tree is None:
        return {}
    layout = sglang.layout_of(draft.spec)
    folder = f"{verdict.draft.rstrip('/').rpartition('/')[2].rpartition(':')[2]}-{layout}"
    whole = draft.spec.architecture.own_model  # which any engine reads as it lies
    convert = command("draftkit", "convert", verdict.draft, folder, "--to", layout, "--target", target)
    served = serve_trees(draft, draft.path if whole else folder, tree, target=target, local=True)
    return {engine: line if whole else f"{convert}\n{line}" for engine, line in served.items()}


@dataclass(frozen=True)
class _Measurement:
    """What one engine measures of a job. `label`: what progress adds to the name of a draft."""

    engine: BaseEngine
    job: Job
    on_progress: PromptProgress
    label: str
    records: Path | None

    def cells(self, kept: Sequence[Cell]) -> Iterator[tuple[Cell, Run]]:
        """All cells but those that were measured before, each with its run."""
        groups = [(group, self._wanted(group, kept)) for group in self.job.sweep.groups]
        whole = WholeRun(self.on_progress, sum(len(wanted) for _, wanted in groups))
        for group, wanted in groups:
            if not wanted:
                continue
            with self._plain(group, whole) as plain:
                for heading, settings in wanted:
                    yield self._cell(heading, settings, plain, whole)
                    whole.end()

    def _wanted(self, group: Sequence[Settings], kept: Sequence[Cell]) -> list[tuple[Heading, Settings]]:
        headings = [(self.engine.heading(source, at), at) for source in self.engine.sources for at in group]
        return [one for one in headings if not any(self.engine.matches(one[0], cell) for cell in kept)]

    @contextmanager
    def _plain(self, group: Sequence[Settings], whole: WholeRun) -> Iterator[Hold | None]:
        """What settings run without a draft: by turns with each draft, where the engine has room for both, else once,
        before all drafts."""
        if self.engine.without_plain is not None:
            yield None
            return
        # What is run once for all of a group is sized for the most draft tokens.
        asked = self.job.conversations(max(group, key=lambda settings: settings.num_speculative_tokens))
        with self._lane(None, asked, whole) as hold:
            if self._repeats(group[0]):
                yield hold
                return
            whole.begin(f"no draft{self.label}", asked.settings, asked.size)
            run = hold(asked)
        del hold  # its memory is the draft's now
        yield lambda _: run

    def _repeats(self, settings: Settings) -> int:
        return 0 if self.engine.alone(settings) is not None else settings.repeats

    def _cell(self, heading: Heading, settings: Settings, plain: Hold | None, whole: WholeRun) -> tuple[Cell, Run]:
        asked = self.job.conversations(settings)
        whole.begin(f"{heading.draft}, {heading.drafted}{self.label}", settings, asked.size)
        passes, error, without = 0, math.inf, None
        with self._lane(heading.draft, asked, whole) as hold:
            if plain is not None and (repeats := self._repeats(settings)):
                turns, error = interleaved(asked.blocks, plain, hold, repeats)
                (without, run), passes = (Run.joined(runs) for runs in sides(turns)), len(turns)
            else:
                without, run = None if plain is None else plain(asked), hold(asked)
        tokenizer = self.job.tokenizer
        cell = cell_of(
            heading, run, without, settings, tokenizer,
            passes=passes or None, pace_error=error, blocks=len(asked.blocks),
        )  # fmt: skip
        cell = self.engine.told(cell, run, without)
        prompts = self.job.prompts.prompts
        if self.records is not None and run.generations:
            labels = labels_of(cell, prompts, tuple({*settings.slices, "category"}))
            append_rounds(self.records, heading, run.generations, labels)
        return with_slices(cell, prompts, settings.slices), run

    @contextmanager
    def _lane(self, source: str | None, asked: Conversations, whole: WholeRun) -> Iterator[Hold]:
        """A lane that is ready for these conversations, and for blocks of them."""

        def report(done: int, length: float) -> None:
            whole.say(done, math.nan if source is None else length)

        with self.engine.lane(source, asked, report) as lane:

            def counting(requests: Sequence[Request]) -> Run:
                run = lane(requests)
                whole.add(len(requests))
                return run

            yield partial(Conversations.hold, lane=counting)
