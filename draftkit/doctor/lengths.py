"""Why acceptance falls with the context, and what brings it back without training: changes of where the draft looks and
of its positions, each alone, at every context.

A window is that of training: rows of the prompt see no further either, and positions stay absolute. SGLang's window on
a chain of EAGLE-1 or on a target's own head shortens only what the steps of a round see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from draftkit.doctor.measure import (
    SCREENED,
    Compared,
    GainAt,
    TrialProgress,
    Tried,
    in_words,
    measure,
    most_helpful_first,
)
from draftkit.doctor.patient import Patient, Setup
from draftkit.doctor.replay import record, replay, seconds_of
from draftkit.doctor.trial import Trial, with_facts
from draftkit.layout.facts import fact_of, has
from draftkit.layout.provenance import trained_tokens
from draftkit.requests import Request
from draftkit.results.cell import Interval
from draftkit.results.statistics import expected_acceptance_length
from draftkit.runtime.records import Generation
from draftkit.targets.rope import target_rope

WINDOWS = tuple(1 << power for power in range(15, 5, -1))  # tokens: the widest first, which changes least
SINKS = 4  # first tokens, as many as StreamingLLM keeps (arXiv 2309.17453)
UNKNOWN = 4  # how many times as long as its samples a draft is served, where nothing says how long they were
CLIPPED = "no engine clips positions: train the draft on samples as long as what it serves"


@dataclass(frozen=True)
class AtContext:
    """The draft as it is at one context, 0 for the prompts as they are, of `tokens` on average."""

    context: int
    tokens: int
    length: Interval


def length_trials(patient: Patient, longest: int) -> list[tuple[str, Trial]]:
    """Every change that may help at contexts of up to `longest` tokens, with the name of its experiment."""
    experiments = {
        "window": windows, "rope-scaling-at-length": scalings, "positions": clipped, "own-limit": own_limit,
    }  # fmt: skip
    return [(name, trial) for name, trials in experiments.items() for trial in trials(patient, longest)]


def windows(patient: Patient, longest: int) -> Iterator[Trial]:
    """Windows narrower than the context and than the draft's own, without the first tokens and with them."""
    if not (has(patient.architecture, "sliding_window") and has(patient.architecture, "sink_tokens")):
        return
    own = fact_of(patient.architecture, "sliding_window")
    for sinks in (0, SINKS):
        for window in WINDOWS:
            if window < longest and (not isinstance(own, int) or window < own):
                trial = with_facts(patient, sliding_window=window, sink_tokens=sinks)
                yield replace(trial, change=f"a window of {window:,}" + f" and the first {sinks}" * (sinks > 0))


def scalings(patient: Patient, longest: int) -> Iterator[Trial]:
    """Other rotary scaling: the target's, none, and what stretches the trained length to the one that is served."""
    rope = patient.architecture.rope
    if rope is None or not has(patient.architecture, "rope_scaling"):
        return
    trained = trained_length(patient, longest)
    factor = longest / trained
    tried: dict[str, dict[str, object] | None] = {
        "the target's rope scaling": target_rope(patient.model.config)[1], "no rope scaling": None,
    }  # fmt: skip
    if factor > 1:
        yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": trained}
        tried |= {f"linear rope × {factor:g}": {"rope_type": "linear", "factor": factor}, f"YaRN × {factor:g}": yarn}
    seen = [rope.scaling]
    for change, scaling in tried.items():
        if scaling not in seen:
            seen.append(scaling)
            yield replace(with_facts(patient, rope_scaling=scaling), change=change)
    width = fact_of(patient.architecture, "head_dim")
    if factor > 1 and isinstance(width, int) and width > 2:  # of the base alone, so that every engine takes it
        base = round(rope.base * factor ** (width / (width - 2)), 1)
        yield replace(with_facts(patient, rope_theta=base), change=f"NTK-aware rope × {factor:g}")


def clipped(patient: Patient, longest: int) -> Iterator[Trial]:
    """No position beyond those of the trained length: whatever lies further is where the last of them is."""
    trained = trained_length(patient, longest)
    if trained < longest and any(_rotaries(patient.drafter().module)):
        yield Trial(f"positions clipped at {trained:,}", partial(_clipped, patient, trained), {}, CLIPPED)


def own_limit(patient: Patient, longest: int) -> Iterator[Trial]:
    """The draft's own number of positions raised to what is served."""
    own = fact_of(patient.architecture, "max_position_embeddings")
    if isinstance(own, int) and own < longest + patient.requests[0].max_new_tokens + patient.k:
        trial = with_facts(patient, max_position_embeddings=2 * longest)
        yield replace(trial, change=f"a limit of {2 * longest:,} positions")


def trained_length(patient: Patient, longest: int) -> int:
    """The tokens up to which the draft is taken to be trained: those that its training has noted, else its positions
    where it is served beyond them, else a part of what it is served."""
    noted = trained_tokens(patient.draft.provenance.facts)
    if noted is not None:
        return noted
    own = fact_of(patient.architecture, "max_position_embeddings")
    return own if isinstance(own, int) and own < longest else max(longest // UNKNOWN, 1)


def _rotaries(module: nn.Module | None) -> Iterator[Any]:
    """The rotary embeddings of a draft's own layers."""
    return (part for part in (() if module is None else module.modules()) if hasattr(part, "rope_type"))


def _clipped(patient: Patient, most: int) -> Setup:
    setup = patient.setup()
    for rotary in _rotaries(setup.drafter.module):
        rotary.forward = partial(_at_most, rotary.forward, most - 1)
    return setup


def _at_most(forward: Callable[..., Any], most: int, x: Tensor, position_ids: Tensor, *rest: Any, **named: Any) -> Any:
    """The rotations of positions up to `most`; transformers' own models name the positions so."""
    return forward(x, position_ids.clamp(max=most), *rest, **named)


@dataclass(frozen=True)
class LengthPlan:
    """What is going to be computed: `seconds` by what the shortest prompts took."""

    prompts: int
    contexts: tuple[int, ...]
    trials: int
    tokens: int
    seconds: float

    def __str__(self) -> str:
        contexts = ", ".join(map(in_words, self.contexts))
        return (
            f"plan: {self.prompts} prompts {contexts}; {self.tokens:,} tokens of the target, once for all "
            f"of {self.trials} changes: up to {max(self.seconds / 60, 0.1):.1f} min"
        )


def compare_at_contexts(
    patient: Patient,
    trials: Sequence[tuple[str, Trial]],
    requests: Mapping[int, Sequence[Request]],
    on_plan: Callable[[LengthPlan], None],
    on_progress: TrialProgress,
) -> tuple[list[Generation], tuple[AtContext, ...], tuple[Tried, ...]]:
    """The generations of the draft as it is at the shortest context, its length at each, and every change, the most
    helpful first. `requests`: context → those of the same prompts behind so much text."""
    on_plan(_plan(patient, trials, requests))
    compared: dict[int, Compared] = {}
    for done, context in enumerate(sorted(requests, reverse=True)):
        asked = replace(patient, requests=requests[context])
        said = partial(_say, on_progress, in_words(context), done, len(requests))
        helping = {i for found in compared.values() for i in found.sums if found.tried[i].helps}
        compared[context] = _at_context(asked, trials, said, sorted(helping), len(requests))
        compared[context].recommend()
    shortest = compared[min(compared)].generations
    lengths = tuple(
        AtContext(context, _mean_tokens(requests[context]), expected_acceptance_length(compared[context].generations))
        for context in sorted(compared)
    )
    return shortest, lengths, most_helpful_first(_over_contexts(compared))


def _at_context(
    patient: Patient, trials: Sequence[tuple[str, Trial]], said: TrialProgress, again: Sequence[int], times: int
) -> Compared:
    said("the target's states", 0, 1)
    drafter = patient.drafter()
    recordings = record(patient.model, drafter.aux_layers, patient.requests, patient.k)

    def run(setup: Setup, numbers: Sequence[int]) -> list[Generation]:
        return replay(patient.model, setup.drafter, patient.k, [recordings[number] for number in numbers])

    return measure(patient, trials, run, said, again=again, times=times)


def _say(on_progress: TrialProgress, context: str, done: int, contexts: int, what: str, part: int, whole: int) -> None:
    on_progress(f"{context}: {what}", done * whole + part, contexts * whole)


def _over_contexts(compared: Mapping[int, Compared]) -> Iterator[Tried]:
    """Each change once: as it was at the longest context at which it helps, or that there is. Of an experiment, what is
    recommended at the longest context at which any of its changes helps."""
    contexts = sorted(compared, reverse=True)
    decides: dict[str, int] = {}  # experiment → that context
    for context in contexts:
        for one in compared[context].tried:
            if one.helps:
                decides.setdefault(one.experiment, context)
    for tried in zip(*(compared[context].tried for context in contexts), strict=True):
        at = next((at for at, one in enumerate(tried) if one.helps), 0)
        gains = [GainAt(context, t.gain, t.confirmed, t.helps) for context, t in zip(contexts, tried, strict=True)]
        chosen = tried[at].recommended and decides[tried[at].experiment] == contexts[at]
        yield replace(tried[at], by_context=tuple(reversed(gains)), recommended=chosen)


def _plan(
    patient: Patient, trials: Sequence[tuple[str, Trial]], requests: Mapping[int, Sequence[Request]]
) -> LengthPlan:
    """Told from the longest of the shortest prompts, with the target and with the draft."""
    one = max(requests[min(requests)], key=lambda request: len(request.prompt))
    drafter = patient.drafter()
    (recording,) = record(patient.model, drafter.aux_layers, [one], patient.k)
    (drafted,) = replay(patient.model, drafter, patient.k, [recording])
    times = 1 + len(trials) / SCREENED  # that the draft runs, beside the target's once
    prompt, after = (
        of_target + times * own for of_target, own in zip(recording.seconds, seconds_of(drafted), strict=True)
    )
    sizes = [len(request.prompt) for asked in requests.values() for request in asked]
    seconds = prompt * sum(sizes) / len(one.prompt) + after * len(sizes)
    return LengthPlan(len(patient.requests), tuple(sorted(requests)), len(trials), sum(sizes), seconds)


def _mean_tokens(requests: Sequence[Request]) -> int:
    return round(sum(len(request.prompt) for request in requests) / len(requests))
