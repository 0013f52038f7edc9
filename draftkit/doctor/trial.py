"""A trial: a draft with one thing changed, ready to be measured. An experiment: the trials of one suspicion."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from draftkit.doctor.patient import Patient, Setup, changed, keeps_tensors
from draftkit.layout.architecture import Architecture
from draftkit.layout.families.causal_lm import CausalLMSpec
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.families.medusa import MedusaSpec
from draftkit.layout.families.mlp_speculator import MlpSpeculatorSpec

ALL: tuple[type[Architecture], ...] = (EagleSpec, CausalLMSpec, MlpSpeculatorSpec, MedusaSpec)


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
    """What may be wrong (`name`), the kinds of drafts where it can be, and what a draft must have to be tried."""

    name: str
    kinds: tuple[type[Architecture], ...]
    needs: str
    trials: Callable[[Patient], Iterable[Trial]]

    def of(self, patient: Patient) -> list[Trial]:
        """The trials for this draft, none where the suspicion does not apply to it."""
        return list(self.trials(patient)) if isinstance(patient.architecture, self.kinds) else []


def with_facts(patient: Patient, architecture: Architecture, advice: str = "", **overrides: object) -> Trial:
    """The trial of other facts; `overrides` are those facts as the user sets them.

    Where the facts need other tensors, `--set` alone cannot make the change, and `advice` says what to do.
    """
    named = {name: as_override(value) for name, value in overrides.items()}
    return Trial(
        ", ".join(f"{name}={value}" for name, value in named.items()),
        lambda: patient.setup(changed(patient.draft, architecture)),
        named if keeps_tensors(patient.draft, architecture) else {},
        advice,
    )


def with_eagle_facts(patient: Patient, advice: str = "", **facts: Any) -> Trial:
    """The trial of other facts of an `EagleSpec`, under their own names."""
    assert isinstance(patient.architecture, EagleSpec)
    return with_facts(patient, replace(patient.architecture, **facts), advice, **facts)


def with_tensors(patient: Patient, change: str, tensors: Callable[[], Mapping[str, Tensor]], advice: str) -> Trial:
    """The trial of other weights, made when it is measured."""
    return Trial(change, lambda: patient.setup(changed(patient.draft, tensors=tensors())), {}, advice)


def as_override(value: object) -> str:
    """A fact as the text that `--set NAME=` takes."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)
