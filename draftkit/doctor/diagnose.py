"""Finding out why a draft accepts little."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import Literal

from draftkit.checks.evidence import Evidence
from draftkit.checks.registry import checks_of_family, findings
from draftkit.convert.api import Reading
from draftkit.convert.quantization import plain_draft
from draftkit.doctor.experiments import all_experiments
from draftkit.doctor.lengths import AtContext, LengthPlan, compare_at_contexts, length_trials
from draftkit.doctor.measure import TEMPERATURE, TrialProgress, Tried, compare
from draftkit.doctor.patient import Patient, runnable
from draftkit.engines.vllm.accepts import refusal_by_vllm
from draftkit.errors import DraftkitError, require_count
from draftkit.evaluate.contexts import Filler
from draftkit.evaluate.engines.own import BY_VLLM
from draftkit.evaluate.measure import Conversations
from draftkit.evaluate.notebook import notebook_trials
from draftkit.evaluate.prompts import encode_prompt, load_prompt_set, load_prompts
from draftkit.finding import SEVERITIES, Finding
from draftkit.io.shown import Rows, Shown
from draftkit.layout.target import TargetFacts
from draftkit.loading import OpenedDraft, OpenedTarget, open_target
from draftkit.requests import Request, SamplingParameters
from draftkit.results import metrics
from draftkit.results.cell import Interval
from draftkit.results.settings import Settings
from draftkit.results.statistics import expected_acceptance_length, expected_sums, gain
from draftkit.runtime.drafters import refusal_to_run
from draftkit.runtime.engine import check_draft_tokens
from draftkit.runtime.records import Generation, Round
from draftkit.targets.devices import device_named, dtype_named, tune_for_cpu
from draftkit.targets.rope import Positions

SHOWN_ALIKE = 5  # changes that help as much as the one that is recommended
NO_REMEDY = "ask its author what it was trained with; more prompts (--limit) tell smaller gains from chance"
USUAL_TOKENS = 4  # of a round, where the weights are made for no number


@dataclass(frozen=True)
class Diagnosis(Shown):
    """`length`: acceptance of the draft as it is, at the temperature in `settings`; None, as `decay`, where draftkit's
    own runtime does not run the draft or its target, of which one of the `findings` tells.

    `findings`: known defects and faulty tensors, the worst first. `tried`: every change that was measured, the most
    helpful first. `not_applicable`: experiment → what it needs. `by_context`: the length at each context, where the
    changes that were tried are of these.
    """

    target: str
    draft: str
    method: str
    length: Interval | None
    decay: Decay | None
    findings: tuple[Finding, ...]
    tensors: tuple[Audited, ...]
    tried: tuple[Tried, ...]
    not_applicable: Mapping[str, str]
    settings: Mapping[str, object]
    by_context: tuple[AtContext, ...] = ()

    @property
    def recommended(self) -> tuple[Tried, ...]:
        """The change to make of each experiment in which one helps; the most helpful first."""
        return tuple(tried for tried in self.tried if tried.recommended)

    @property
    def causes(self) -> tuple[Finding, ...]:
        """Errors, then what was measured to help, then warnings and notes; what is mended in one way is said once.

        A remedy that was measured and did not help is not recommended: its finding says what it gained.
        """
        measured = [self._remedy_of(tried) for tried in self.recommended]
        errors = [finding for finding in self.findings if finding.severity == "error"]
        others = [self._weighed(finding) for finding in self.findings if finding.severity != "error"]
        known: list[Finding] = []
        for cause in (*errors, *measured, *others):
            if not any(cause.fix and before.fix.endswith(cause.fix) for before in known):
                known.append(cause)
        return tuple(known)

    def _remedy_of(self, tried: Tried) -> Finding:
        """A change that helps, as a finding that also names the changes that measured alike."""
        also = ""
        if tried.alike:
            shown, more = "; ".join(tried.alike[:SHOWN_ALIKE]), len(tried.alike) - SHOWN_ALIKE
            rest = f"; {more} more" if more > 0 else ""
            ask = "Take" if tried.by_context else "Ask its author, or take"  # no author has said what holds at length
            also = f" (as good within noise: {shown}{rest}. {ask} more prompts to tell them apart)"
        if tried.by_context:
            at = next(at for at in tried.by_context if at.gain == tried.gain)
            also = f" {at.name}, and {tried.elsewhere}{also}" if tried.elsewhere else f" {at.name}{also}"
        return Finding(tried.experiment, "warning", tried.change + also, fix=tried.command or tried.advice)

    def _weighed(self, finding: Finding) -> Finding:
        """A finding, and where its remedy was measured and does not help, that instead of the remedy."""
        for tried in self.tried:
            if finding.fix and tried.command and tried.command.endswith(finding.fix) and not tried.helps:
                said = f"measured, {tried.change} does not help ({tried.before:.2f} → {tried.after:.2f})"
                return replace(finding, message=f"{finding.message}; {said}", fix=NO_REMEDY)
        return finding

    def _gain(self, cause: Finding) -> dict[str, object] | None:
        """What the remedy of a cause was measured to gain; None where it was not."""
        for tried in self.recommended:
            if tried.experiment == cause.name and cause.message.startswith(tried.change):
                return asdict(tried.gain)
        return None

    def to_dict(self) -> dict[str, object]:
        """The diagnosis as `doctor --json` prints it."""
        causes = [
            {"name": cause.name, "what": cause.message, "remedy": cause.fix, "gain": self._gain(cause)}
            for cause in self.causes
        ]
        return {"schema": 1} | asdict(self) | {"causes": causes}

    def shown(self) -> Iterator[str | Rows]:
        """What mends it, what it is, and what every change gained."""
        if not self.causes:
            yield "Nothing found: no change helps."
        yield Rows(("found", "what", "next"), [(cause.name, cause.message, cause.fix) for cause in self.causes])
        length = "not measured" if self.length is None else f"acceptance length {metrics.length(self.length)}"
        yield f"{self.draft} ({self.method}) with {self.target}: {length}"
        changes = [(t.change, metrics.length(t.gain, signed=True), "yes" if t.helps else "") for t in self.tried]
        yield Rows(("change", "gain", "helps"), changes)


def diagnose_draft(
    target: str | OpenedTarget,
    draft: str,
    *,
    prompts: str = "zoo",
    limit: int | None = 48,
    num_speculative_tokens: int | None = None,
    max_new_tokens: int = 48,
    contexts: Sequence[int] = (),
    device: str | None = None,
    dtype: str | None = None,
    on_plan: Callable[[LengthPlan], None] = lambda _: None,
    on_progress: TrialProgress | None = None,
) -> Diagnosis:
    """Look for known defects of a draft, and measure what single changes would make of its acceptance.

    `target` and `draft` are paths, Hub ids or `zoo:NAME`; the draft may be a foreign checkpoint.
    `num_speculative_tokens`: of a round; None for those that its weights are made for, or else 4. A quarter of the
    prompts are decoded with the draft as it is and with each change; the few changes that look helpful are measured
    on the other prompts too, and help where the acceptance length grows there by a margin, and by more than chance.
    With `contexts`, what may mend acceptance at length is tried instead, at the prompts as they are and behind so many
    tokens of other text; `on_plan` is told first what that takes.
    With a draft or a target that draftkit's own runtime does not run, nothing is decoded. `on_progress` None: a bar in
    a notebook, nothing elsewhere. Raises `DraftkitError`.
    """
    require_count("max_new_tokens", max_new_tokens, least=2)
    for name, count in (("limit", limit), ("num_speculative_tokens", num_speculative_tokens)):
        if count is not None:
            require_count(name, count)
    on_progress = on_progress or notebook_trials()
    device = device_named(device)
    target = open_target(target)
    with ExitStack() as stack:
        opened = OpenedDraft(draft, target, stack)
        unified = plain_draft(opened.draft)  # single changes are made to plain weights
        if not unified.spec.architecture.has_checkpoint:
            raise DraftkitError(f"{draft} has no checkpoint to examine", hint="draftkit eval measures it")
        refusal = target.refusal
        unable = refusal_to_run(unified.spec) if refusal is None else refusal.problem
        tokenizer = target.tokenizer  # without one, nothing large is read
        load = target.load if unable is None else target.load_embeddings
        model = load(device=device, dtype=dtype_named(dtype, device))
        tune_for_cpu(model)
        asked = load_prompts(prompts, limit)
        requests = [
            Request(p.id, encode_prompt(p, tokenizer), max_new_tokens, SamplingParameters(TEMPERATURE, seed=number))
            for number, p in enumerate(asked)
        ]
        architecture = unified.spec.architecture
        most = architecture.most_draft_tokens
        wanted = num_speculative_tokens or architecture.draft_tokens or USUAL_TOKENS
        k = wanted if most is None else min(wanted, most)
        check_draft_tokens(k, most, draft)
        patient = Patient(draft, unified, runnable(unified), target.name, model, tokenizer, asked, requests, k)
        settings = {
            "prompts": prompts,
            "num_prompts": len(requests),
            "num_speculative_tokens": k,
            "max_new_tokens": max_new_tokens,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": device,
            "temperature": TEMPERATURE,
        }
        reading = opened.plan().reading if opened.is_foreign else None
        if unable is not None:
            return _look_at(patient, target.facts, reading, settings, unable)
        if contexts:
            behind = _behind(patient, target, prompts, contexts)
            return _examine_lengths(patient, target.facts, reading, settings, behind, on_plan, on_progress)
        return _examine(patient, target.facts, reading, settings, on_progress)


def _seen(patient: Patient, target: TargetFacts) -> list[Finding]:
    """The findings that need no run of the draft, the worst first."""
    evidence = Evidence.of_draft(patient.original, target=target, tokenizer=patient.tokenizer, model=patient.model)
    found = findings(evidence, "checkpoint", "served", "pair", "tensors", *checks_of_family(patient.original.spec))
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def _look_at(
    patient: Patient, target: TargetFacts, reading: Reading | None, settings: dict[str, object], unable: str
) -> Diagnosis:
    """Diagnose a draft that draftkit's own runtime does not run, or whose target it does not run."""
    found = _seen(patient, target)
    fix = "" if refusal_by_vllm(patient.draft.spec) else f"draftkit eval with {BY_VLLM}, the draft as it is"
    unmeasured = Finding("not-measured", "note", f"no change was tried: {unable}", fix=fix, source="draftkit")
    return Diagnosis(
        target=patient.target_source,
        draft=patient.source,
        method=patient.draft.spec.method,
        length=None,
        decay=None,
        findings=(*found, unmeasured),
        tensors=audit(patient, reading, found),
        tried=(),
        not_applicable={},
        settings=settings,
    )


def _examine(
    patient: Patient,
    target: TargetFacts,
    reading: Reading | None,
    settings: dict[str, object],
    on_progress: TrialProgress,
) -> Diagnosis:
    experiments = all_experiments()
    trials = [(experiment.name, trial) for experiment in experiments for trial in experiment.trials(patient)]
    found = _seen(patient, target)
    generations, tried = compare(patient, trials, on_progress)
    lacking = {e.name: e.needs for e in experiments if e.name not in {name for name, _ in trials}}
    diagnosis = _measured(patient, reading, found, generations, tried, settings)
    return replace(diagnosis, not_applicable=lacking)


def _measured(
    patient: Patient,
    reading: Reading | None,
    found: Sequence[Finding],
    generations: Sequence[Generation],
    tried: tuple[Tried, ...],
    settings: dict[str, object],
) -> Diagnosis:
    """What is known of a draft after the changes that were tried on it."""
    return Diagnosis(
        target=patient.target_source,
        draft=patient.source,
        method=patient.draft.spec.method,
        length=expected_acceptance_length(generations),
        decay=classify(generations, max(r.drafted for g in generations for r in g.rounds)),
        findings=tuple(found),
        tensors=audit(patient, reading, found),
        tried=tried,
        not_applicable={},
        settings=settings,
    )


def _behind(
    patient: Patient, target: OpenedTarget, prompts: str, contexts: Sequence[int]
) -> dict[int, Sequence[Request]]:
    """Context → the patient's requests behind so many tokens of other text, 0 for what they are. Raises `DraftkitError`
    for more than the target has positions for."""
    filler = Filler(load_prompt_set(prompts).conversations, patient.tokenizer)
    found: dict[int, Sequence[Request]] = {0: patient.requests}
    for context in sorted({*contexts}):
        beyond = patient.requests[0].max_new_tokens + patient.k + 1
        Positions.of(patient.model.config).check(f"of --context {context}", context, beyond)
        asked = Conversations(patient.prompts, patient.tokenizer, Settings(context=context), filler=filler)
        texts = [request.prompt for request in asked.first_requests]
        found[context] = [replace(r, prompt=ids) for r, ids in zip(patient.requests, texts, strict=True)]
    return found


def _examine_lengths(
    patient: Patient,
    target: TargetFacts,
    reading: Reading | None,
    settings: dict[str, object],
    requests: Mapping[int, Sequence[Request]],
    on_plan: Callable[[LengthPlan], None],
    on_progress: TrialProgress,
) -> Diagnosis:
    """Diagnose what length does to a draft."""
    trials = length_trials(patient, max(requests))
    found = _seen(patient, target)
    if not trials:
        raise DraftkitError(
            f"{patient.source} ({patient.draft.spec.method}) has no attention and no positions of its own",
            hint="leave out --context: the other changes do not depend on the length",
        )
    generations, lengths, tried = compare_at_contexts(patient, trials, requests, on_plan, on_progress)
    return replace(_measured(patient, reading, found, generations, tried, settings), by_context=lengths)


Use = Literal["once", "shared", "ignored"]


@dataclass(frozen=True)
class Audited:
    """One tensor. `remark` says where it comes from, why it is ignored, or what is wrong with it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    use: Use
    finite: bool
    plausible: bool
    remark: str

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def audit(patient: Patient, reading: Reading | None, findings: Sequence[Finding]) -> tuple[Audited, ...]:
    """Look at every tensor of a draft, beside what was found of it, and at those that its conversion left out."""
    audited = []
    for name, handle in patient.original.tensors.items():
        faults = [finding for finding in findings if finding.where == name]
        use, remark = _use(patient, name)
        remark = "; ".join(fault.message.removeprefix(f"{name}: ") for fault in faults) or remark
        finite = all(fault.name != "not-finite" for fault in faults)
        audited.append(Audited(name, handle.dtype, handle.shape, use, finite, not faults, remark))
    return (*audited, *_borrowed(patient), *_ignored(reading))


def _use(patient: Patient, name: str) -> tuple[Use, str]:
    if patient.facts.get("tied"):
        return "shared", "by the steps"
    if name == "model.embed_tokens.weight" and "lm_head.weight" not in patient.draft.tensors:
        return "shared", "embedding and head"
    if name in ("embed_tokens.weight", "lm_head.weight") and _is_targets(patient, name.removesuffix(".weight")):
        return "once", "the same as the target's"
    return "once", ""


def _is_targets(patient: Patient, table: str) -> bool:
    theirs = patient.table(table)
    handle = patient.original.tensors[f"{table}.weight"]
    return handle.shape == tuple(theirs.shape) and bool((handle.load().float() - theirs).abs().max() < 1e-2)


def _borrowed(patient: Patient) -> Iterator[Audited]:
    for table in ("embed_tokens", "lm_head"):
        if patient.facts.get(table) == "target":
            dtype = str(patient.model.dtype).removeprefix("torch.")
            yield Audited(f"{table}.weight", dtype, tuple(patient.table(table).shape), "shared", True, True, "target's")


def _ignored(reading: Reading | None) -> Iterator[Audited]:
    for move in reading.plan.moves if reading is not None else ():
        if move.operation == "drop":
            yield Audited(", ".join(move.sources), move.dtype, move.shape, "ignored", True, True, move.reason)


FIRST_LOW = 0.35  # of first draft tokens accepted; sound drafts of any kind have more on text of their kind
COLLAPSE = 0.5  # conditional rate of the second against the first
MARGIN = 0.15  # tokens a round, by which acceptance must fall to be called falling
MIN_ROUNDS = 20  # that a share must be of


@dataclass(frozen=True)
class Decay:
    """`rates[i]`: of the rounds that accepted the first i drafts, the share that accepted the next, and of how many.

    `over_context`: by how much the acceptance length of long prompts exceeds that of short ones, from the first half
    of each answer; `over_answer`: that of the second half of answers that of the first. `patterns`: what that says.
    """

    rates: tuple[float, ...]
    rounds: tuple[int, ...]
    over_context: Interval | None
    over_answer: Interval | None
    patterns: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def classify(generations: Sequence[Generation], k: int) -> Decay:
    """Name the ways in which acceptance falls."""
    stood = [[r.expected[i] for g in generations for r in g.rounds if r.accepted >= i] for i in range(k)]
    before = tuple(map(len, stood))
    rates = tuple(fmean(expected) if expected else 0.0 for expected in stood)
    answers = [g for g in generations if len(g.rounds) >= 2]
    halves = [(g.rounds[: len(g.rounds) // 2], g.rounds[len(g.rounds) // 2 :]) for g in answers]
    first, second = [a for a, _ in halves], [b for _, b in halves]
    over_answer = gain(expected_sums(first), expected_sums(second), 1) if halves else None
    over_context = _over_context(answers, first)
    return Decay(rates, before, over_context, over_answer, tuple(_patterns(rates, before, over_context, over_answer)))


def _patterns(
    rates: Sequence[float], rounds: Sequence[int], over_context: Interval | None, over_answer: Interval | None
) -> Iterator[str]:
    if rates[0] < FIRST_LOW:
        yield f"the first token is accepted in {rates[0]:.0%} of rounds: inputs (features, layers, norms) or weights"
    if len(rates) > 1 and rounds[1] >= MIN_ROUNDS and rates[1] < COLLAPSE * rates[0]:
        yield f"the second token collapses, {rates[0]:.0%} to {rates[1]:.0%}: feedback, rope, or the masks"
    if _falls(over_context):
        yield "acceptance falls with the length of the prompt: rope, or max_position_embeddings"
    if _falls(over_answer):
        yield "acceptance falls over an answer: the draft's cache, or text unlike that of training"


def _falls(difference: Interval | None) -> bool:
    return difference is not None and difference.mean < -MARGIN and difference.below(0)


def _over_context(answers: Sequence[Generation], early: Sequence[Sequence[Round]]) -> Interval | None:
    """Long prompts against short ones: every prompt is in one of the two."""
    if not answers:
        return None
    middle = median(len(g.request.prompt) for g in answers)
    short = [rounds if len(g.request.prompt) <= middle else [] for g, rounds in zip(answers, early, strict=True)]
    long = [rounds if len(g.request.prompt) > middle else [] for g, rounds in zip(answers, early, strict=True)]
    if not any(long):
        return None
    return gain(expected_sums(short), expected_sums(long), 1)
