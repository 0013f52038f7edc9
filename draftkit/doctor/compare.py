"""The draft as it is against each changed one: first on few prompts, then the promising ones on others.

Among many changes that do nothing, the best looks helpful by chance. It is therefore measured again on prompts that had
no part in choosing it, where only the few chosen ones compete.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence

from draftkit.doctor.diagnosis import MARGIN, TEXT_MARGIN, Tried
from draftkit.doctor.measure import Sums, gain, run
from draftkit.doctor.patient import Patient
from draftkit.doctor.trial import Trial
from draftkit.runtime.records import Generation

Progress = Callable[[str, int, int], None]  # what is measured now, measurements done, measurements in all
MAX_CONFIRMED = 4
SCREENED = 4  # one prompt in so many is for the first look


def compare(
    patient: Patient, trials: Sequence[tuple[str, Trial]], k: int, on_progress: Progress = lambda *_: None
) -> tuple[list[Generation], tuple[Tried, ...]]:
    """The generations of the draft as it is, and every trial (name of its experiment, change), the most helpful first.

    `on_progress` is told what is measured, how many measurements are done, and how many there will be.
    """
    numbers = range(len(patient.requests))
    screened, others = [*numbers[::SCREENED]], [i for i in numbers if i % SCREENED] or [*numbers]
    on_progress("as it is", 0, len(trials) + 1)
    generations = run(patient.setup(), k, numbers)
    before = Sums.of([generations[i] for i in screened])
    first: list[Tried] = []
    for done, (experiment, trial) in enumerate(trials, start=1):
        on_progress(trial.change, done, len(trials) + 1)
        after = Sums.of(run(trial.setup(), k, screened))
        first.append(_tried(patient, experiment, trial, before, after, len(trials), confirmed=False))
    chosen = _promising(first)
    total = len(trials) + 1 + len(chosen)
    before = Sums.of([generations[i] for i in others])
    for done, index in enumerate(chosen, start=len(trials) + 1):
        experiment, trial = trials[index]
        on_progress(f"{trial.change}, again", done, total)
        after = Sums.of(run(trial.setup(), k, others))
        first[index] = _tried(patient, experiment, trial, before, after, len(chosen), confirmed=True)
    on_progress("done", total, total)
    return generations, tuple(sorted(first, key=lambda t: (not t.helps, -t.gain.mean)))


def _promising(tried: Sequence[Tried]) -> list[int]:
    """The best change of each experiment that may help: at most four, by what they gained."""
    best: dict[str, int] = {}
    for index in sorted(range(len(tried)), key=lambda i: -tried[i].gain.mean):
        if tried[index].gain.mean >= MARGIN / 2:
            best.setdefault(tried[index].experiment, index)
    return [*best.values()][:MAX_CONFIRMED]


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
    return Tried(
        experiment=experiment,
        change=trial.change,
        before=before.length,
        after=after.length,
        gain=difference,
        confirmed=confirmed,
        helps=confirmed and difference.mean >= margin and difference.low > 0,
        command=_command(patient, trial),
        advice=trial.advice,
    )


def _command(patient: Patient, trial: Trial) -> str | None:
    if not trial.overrides:
        return None
    sets = " ".join(f"--set {shlex.quote(f'{name}={value}')}" for name, value in trial.overrides.items())
    return f"draftkit convert {shlex.quote(patient.source)} OUT --target {shlex.quote(patient.target_source)} {sets}"
