"""A trial: a draft with one thing changed, ready to be measured. An experiment: the trials of one suspicion."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from draftkit.doctor.patient import Patient, Setup, changed, keeps_tensors
from draftkit.layout import facts as layout_facts

Trials = Callable[[Patient], Iterable["Trial"]]


@dataclass(frozen=True)
class Trial:
    """One change. `overrides`: what `convert --set` takes to make it; where it takes nothing, `advice` says what to do.

    `own_text`: the change gives the target another text to write, so that other lengths are no proof by themselves.
    """

    change: str
    setup: Callable[[], Setup]
    overrides: Mapping[str, str]
    advice: str
    own_text: bool = False


@dataclass(frozen=True)
class Experiment:
    """What may be wrong (`name`), and what a draft must have to be tried; `trials` are none where it has not.

    They come with the likeliest first, which is recommended of those that measure alike.
    """

    name: str
    needs: str
    trials: Trials


def experiment(name: str, needs: str) -> Callable[[Trials], Experiment]:
    """Make a function that yields the trials of a patient an experiment of the doctor."""
    return lambda trials: Experiment(name, needs, trials)


def with_facts(patient: Patient, advice: str = "", **facts: object) -> Trial:
    """The trial of other facts, under the names that `--set` takes.

    Where they need other tensors, `--set` alone cannot make the change, and `advice` says what to do: by default, to
    remove those that the draft then has too many.
    """
    architecture = layout_facts.with_facts(patient.architecture, **facts)
    tried = changed(patient.draft, architecture)
    named = {name: as_override(value) for name, value in facts.items()}
    surplus = [name for name in patient.draft.tensors if name not in tried.tensors]
    if surplus and not advice:
        advice = f"remove {', '.join(surplus)} from the checkpoint and convert it again"
    return Trial(
        ", ".join(f"{name}={value}" for name, value in named.items()),
        lambda: patient.setup(tried),
        named if keeps_tensors(patient.draft, architecture) else {},
        advice,
    )


def with_tensors(patient: Patient, change: str, tensors: Callable[[], Mapping[str, Tensor]], advice: str) -> Trial:
    """The trial of other weights, made when it is measured."""
    return Trial(change, lambda: patient.setup(changed(patient.draft, tensors=tensors())), {}, advice)


def as_override(value: object) -> str:
    """A fact as the text that `--set NAME=` takes."""
    if isinstance(value, tuple | list):
        return ",".join(map(str, value)) or "[]"
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)
