"""The draft as it is against each changed one, prompt by prompt: on few prompts, then the promising ones on others.

Among many changes that do nothing, the best looks helpful by chance. It is therefore measured again on prompts that had
no part in choosing it, where only the few chosen ones compete. With it go its rivals, the changes of the same
experiment that did as well as far as the first prompts tell: of those that then gain the same but for a margin, the
experiment says which is likely, and those that chance may have put behind it are named beside it.

Verification is coupled: the target writes the same text whatever the draft does, so that two setups are compared on the
same tokens. At a temperature above 0 a draft token counts with the mass Σ_v min(p_v, q_v) that the two distributions
share, where greedy decoding only says whether it stood: on the zoo, a quarter of the prompts show the same small
difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from draftkit.doctor.patient import Patient, Setup
from draftkit.doctor.trial import Trial
from draftkit.errors import command
from draftkit.requests import DraftSampling
from draftkit.results.cell import Interval
from draftkit.results.metrics import gained
from draftkit.results.statistics import Sums, expected_sums, gain, mean_length
from draftkit.runtime.engine import Engine
from draftkit.runtime.records import Generation

TEMPERATURE = 0.5  # the text stays close to the greedy one, and probabilities are still soft
TrialProgress = Callable[[str, int, int], None]  # what is measured now, measurements done, measurements in all
MAX_CONFIRMED = 4
MAX_RIVALS = 3  # of each of these, that are measured on
SCREENED = 4  # one prompt in so many is for the first look
MARGIN = 0.04  # tokens a round: less is not worth a new checkpoint
TEXT_MARGIN = 0.25  # where the text is another, its own predictability moves the length too
MAX_SLOTS = 16  # sequences decoded together; more cost memory, and save nothing on a CPU


@dataclass(frozen=True)
class Tried:
    """A change of the draft that was measured.

    `confirmed`: it looked helpful on the first prompts and was measured again on the others, which these figures are
    of; the interval of `gain` holds for one change of each experiment together. `recommended`: of its experiment, it
    is the change to make, if any is; `alike`: others that help as much, as far as these prompts tell. `command` makes
    the change; where there is none, `advice` says what to do. `too_few`: of so few prompts, one that does nothing could
    gain on each by chance, so that no interval is to be believed. `by_context`: what it gained at each, where several
    were looked at; all else is then of the longest at which it helps, or that there is.
    """

    experiment: str
    change: str
    before: float
    after: float
    gain: Interval
    confirmed: bool
    helps: bool
    command: str | None
    advice: str
    recommended: bool = False
    alike: tuple[str, ...] = ()
    too_few: bool = False
    by_context: tuple[GainAt, ...] = ()

    @property
    def elsewhere(self) -> str:
        """What the change gained at the contexts that the other figures are not of."""
        others = [at for at in self.by_context if at.gain != self.gain]
        return ", ".join(f"{at.name} {gained(at.gain, look=not at.confirmed)}" for at in others)


@dataclass(frozen=True)
class GainAt:
    """What a change gained at one context; `confirmed` and `helps` as of `Tried`."""

    context: int
    gain: Interval
    confirmed: bool
    helps: bool

    @property
    def name(self) -> str:
        """The context in words."""
        return in_words(self.context)


def in_words(context: int) -> str:
    """A context in words; 0 is that of the prompts as they are."""
    return f"at {context:,}" if context else "as they are"


@dataclass(frozen=True)
class Compared:
    """`tried`: in the order of the trials. `groups`: the best change of each experiment, and its rivals. `sums`: of the
    changes that were measured again, by their numbers."""

    generations: list[Generation]
    tried: list[Tried]
    groups: list[tuple[int, list[int]]]
    sums: dict[int, Sums]

    def recommend(self) -> None:
        """Mark the change to make of each experiment in which one helps."""
        for best, rivals in self.groups:
            _recommend([best, *rivals[:MAX_RIVALS]], rivals[MAX_RIVALS:], self.tried, self.sums)


def compare(
    patient: Patient, trials: Sequence[tuple[str, Trial]], on_progress: TrialProgress = lambda *_: None
) -> tuple[list[Generation], tuple[Tried, ...]]:
    """The generations of the draft as it is, and every trial (name of its experiment, change), the most helpful first.

    `on_progress` is told what is measured, how many measurements are done, and how many there will be.
    """
    found = measure(patient, trials, lambda setup, numbers: run(setup, patient.k, numbers), on_progress)
    found.recommend()
    return found.generations, most_helpful_first(found.tried)


def most_helpful_first(tried: Iterable[Tried]) -> tuple[Tried, ...]:
    """Those that help before the others, and of each kind those that gain more."""
    return tuple(sorted(tried, key=lambda t: (not t.helps, -t.gain.mean)))


def measure(
    patient: Patient,
    trials: Sequence[tuple[str, Trial]],
    run: Callable[[Setup, Sequence[int]], list[Generation]],
    on_progress: TrialProgress,
    *,
    again: Iterable[int] = (),
    times: int = 1,
) -> Compared:
    """Try every change on the first prompts, and on the others those that look helpful and those that are named
    `again`. `run` decodes the requests with some numbers; `times`: how often all this is done, each with its share of
    the chance to err."""
    numbers = range(len(patient.requests))
    screened, others = [*numbers[::SCREENED]], [i for i in numbers if i % SCREENED] or [*numbers]
    on_progress("as it is", 0, len(trials) + 1)
    generations = run(patient.setup(), numbers)
    before = expected_sums([generations[i].rounds for i in screened])
    first: list[Sums] = []
    for done, (_, trial) in enumerate(trials, start=1):
        on_progress(trial.change, done, len(trials) + 1)
        first.append(expected_sums([g.rounds for g in run(trial.setup(), screened)]))
    tried = [
        _tried(patient, experiment, trial, before, after, len(trials) * times, confirmed=False)
        for (experiment, trial), after in zip(trials, first, strict=True)
    ]
    groups = [(best, _rivals(best, tried, first)) for best in _promising(tried)]
    chosen = [index for best, rivals in groups for index in (best, *rivals[:MAX_RIVALS])]
    chosen += [index for index in again if index not in chosen]
    total = len(trials) + 1 + len(chosen)
    before = expected_sums([generations[i].rounds for i in others])
    sums: dict[int, Sums] = {}
    for done, index in enumerate(chosen, start=len(trials) + 1):
        experiment, trial = trials[index]
        on_progress(f"{trial.change}, again", done, total)
        sums[index] = expected_sums([g.rounds for g in run(trial.setup(), others)])
        compared = max(len(groups), 1) * times
        tried[index] = _tried(patient, experiment, trial, before, sums[index], compared, confirmed=True)
    on_progress("done", total, total)
    return Compared(generations, tried, groups, sums)


def _promising(tried: Sequence[Tried]) -> list[int]:
    """The best change of each experiment that may help: at most four, by what they gained."""
    best: dict[str, int] = {}
    for index in sorted(range(len(tried)), key=lambda i: -tried[i].gain.mean):
        if tried[index].gain.mean >= MARGIN / 2:
            best.setdefault(tried[index].experiment, index)
    return [*best.values()][:MAX_CONFIRMED]


def _rivals(best: int, tried: Sequence[Tried], sums: Sequence[Sums]) -> list[int]:
    """The other changes of its experiment that may help, and of which these prompts do not tell that it is better."""
    same = [i for i, t in enumerate(tried) if t.experiment == tried[best].experiment and i != best]
    return [i for i in same if tried[i].gain.mean >= MARGIN / 2 and not _beats(sums[best], sums[i], len(same))]


def _beats(one: Sums, other: Sums, comparisons: int) -> bool:
    """Whether one change is better than another by a margin, and by more than chance."""
    difference = gain(other, one, comparisons)
    return difference.mean >= MARGIN and difference.above(0)


def _recommend(
    measured: Sequence[int], unmeasured: Sequence[int], tried: list[Tried], sums: Mapping[int, Sums]
) -> None:
    """Of the changes of an experiment that help, recommend the likeliest of those that gain as much as the best but for
    less than a margin; `alike` are those that chance may have put behind it.

    Experiments yield likely changes first. `unmeasured` were no worse as far as the first prompts tell.
    """
    helping = [index for index in measured if tried[index].helps]
    if not helping:
        return
    best = max(helping, key=lambda i: tried[i].gain.mean)
    alike = sorted(i for i in helping if i == best or not _beats(sums[best], sums[i], len(helping) - 1))
    chosen = next(i for i in alike if tried[best].gain.mean - tried[i].gain.mean < MARGIN)
    others = [*(i for i in alike if i != chosen), *unmeasured]
    tried[chosen] = replace(tried[chosen], recommended=True, alike=tuple(tried[i].change for i in others))


def _tried(
    patient: Patient,
    experiment: str,
    trial: Trial,
    before: Sums,
    after: Sums,
    comparisons: int,
    *,
    confirmed: bool,
) -> Tried:
    difference = gain(before, after, comparisons)
    margin = TEXT_MARGIN if trial.own_text else MARGIN
    too_few = comparisons * 0.5 ** len(before) > 0.025
    return Tried(
        experiment=experiment,
        change=trial.change,
        before=mean_length(before),
        after=mean_length(after),
        gain=difference,
        confirmed=confirmed,
        helps=confirmed and not too_few and difference.mean >= margin and difference.above(0),
        command=_command(patient, trial),
        advice=trial.advice,
        too_few=too_few,
    )


def _command(patient: Patient, trial: Trial) -> str | None:
    if not trial.overrides:
        return None
    sets = (word for name, value in trial.overrides.items() for word in ("--set", f"{name}={value}"))
    return command("draftkit", "convert", patient.source, "OUT", "--target", patient.target_source, *sets)


def run(setup: Setup, k: int, numbers: Sequence[int]) -> list[Generation]:
    """The generations of the requests with these numbers, with at most `k` draft tokens a round."""
    requests = [setup.requests[number] for number in numbers]
    most = setup.drafter.max_tokens
    engine = Engine(
        setup.target,
        setup.drafter,
        num_speculative_tokens=k if most is None else min(k, most),
        num_slots=min(MAX_SLOTS, len(requests)),
        verification="coupled",
        draft_sampling=DraftSampling("probabilistic"),
        eager=True,  # each setup runs once: capturing its graphs would cost more than it saves
    )
    return engine.generate(requests)
