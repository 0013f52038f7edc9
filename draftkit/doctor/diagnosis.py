"""What the doctor found, ranked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from draftkit.checks.checkpoint import Finding
from draftkit.doctor.audit import Audited
from draftkit.doctor.decay import Decay
from draftkit.results.statistics import Interval

MARGIN = 0.04  # tokens a round: less is not worth a new checkpoint
TEXT_MARGIN = 0.25  # where the text is another, its own predictability moves the length too
SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True)
class Tried:
    """One measured change.

    `confirmed`: it looked helpful on the first prompts and was measured again on the others, which these figures are
    of; the interval of `gain` holds for all confirmed changes together. `command` makes the change; where there is
    none, `advice` says what to do.
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


@dataclass(frozen=True)
class Cause:
    """Why acceptance may be low: a known defect, or a change that helps."""

    name: str
    what: str
    remedy: str


@dataclass(frozen=True)
class Diagnosis:
    """`length`: acceptance of the draft as it is, at the temperature in `settings`.

    `findings`: known defects and faulty tensors, the worst first. `tried`: every change that was measured, the most
    helpful first. `not_applicable`: experiment → what it needs.
    """

    target: str
    draft: str
    method: str
    length: Interval
    decay: Decay
    findings: tuple[Finding, ...]
    tensors: tuple[Audited, ...]
    tried: tuple[Tried, ...]
    not_applicable: Mapping[str, str]
    settings: Mapping[str, object]

    @property
    def recommended(self) -> tuple[Tried, ...]:
        """Of each experiment, the change that helps most, if one does."""
        best: dict[str, Tried] = {}
        for tried in self.tried:
            if tried.helps:
                best.setdefault(tried.experiment, tried)
        return tuple(best.values())

    @property
    def causes(self) -> tuple[Cause, ...]:
        """Errors, then what was measured to help, then warnings and notes."""
        known = {severity: [f for f in self.findings if f.severity == severity] for severity in SEVERITIES}
        measured = [Cause(t.experiment, t.change, t.command or t.advice) for t in self.recommended]
        errors, *others = ([Cause(f.name, f.message, f.fix) for f in known[severity]] for severity in SEVERITIES)
        return (*errors, *measured, *(cause for causes in others for cause in causes))

    def to_dict(self) -> dict[str, object]:
        """As `doctor --json` prints it."""
        return {"schema": 1} | asdict(self) | {"causes": [asdict(cause) for cause in self.causes]}
