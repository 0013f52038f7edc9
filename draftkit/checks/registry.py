"""Everything that can be wrong: a check says what it needs to look at, and yields what it finds.

Each file of this folder has the checks of one subject, functions marked with `@check`; to add one is to write it there.
`inspect`, cards, `doctor`, `data check` and `eval` are views: they gather evidence and show what the checks of their
subjects find in it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec

from draftkit.checks.evidence import Evidence
from draftkit.finding import Finding
from draftkit.layout.spec import DraftSpec

Find = Callable[..., Iterable[Finding]]


@dataclass(frozen=True)
class Check:
    """`find` is called with the evidence that its parameters name, and is not where one without a default is unknown.

    `unless`: findings that explain what it would find, after which it has nothing to add.
    """

    find: Find
    unless: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """The name of its function, with hyphens."""
        return self.find.__name__.replace("_", "-")

    @property
    def needs(self) -> frozenset[str]:
        """The evidence without which it is not run."""
        parameters = inspect.signature(self.find).parameters.values()
        return frozenset(parameter.name for parameter in parameters if parameter.default is parameter.empty)

    def run(self, evidence: Evidence) -> list[Finding]:
        """The findings of this check; none where the evidence lacks what the check needs."""
        looked_at = {name: getattr(evidence, name) for name in inspect.signature(self.find).parameters}
        return [] if any(looked_at[name] is None for name in self.needs) else list(self.find(**looked_at))


def check(find: Find) -> Check:
    """Make a function a check of its file's subject."""
    return Check(find)


def check_unless(*explained: str) -> Callable[[Find], Check]:
    """Make a function a check that is not run where these findings explain what it would find."""
    return lambda find: Check(find, frozenset(explained))


def checks_of(*subjects: str) -> list[Check]:
    """The checks in the files of these names, in their order there."""
    modules = [importlib.import_module(f"{__package__}.{subject}") for subject in subjects]
    return [value for module in modules for value in vars(module).values() if isinstance(value, Check)]


def checks_of_family(spec: DraftSpec) -> tuple[str, ...]:
    """The subject that only drafts of one family are, where it has a file here."""
    family = spec.architecture.family
    return (family,) if find_spec(f"{__package__}.{family}") is not None else ()


def run_checks(evidence: Evidence, *subjects: str) -> list[tuple[str, Finding]]:
    """The findings of all checks of these subjects, each beside the name of its check."""
    found: list[tuple[str, Finding]] = []
    for one in checks_of(*subjects):
        if one.unless.isdisjoint(finding.name for _, finding in found):
            found += [(one.name, finding) for finding in one.run(evidence)]
    return found


def findings(evidence: Evidence, *subjects: str) -> list[Finding]:
    """The findings of all checks of these subjects."""
    return [finding for _, finding in run_checks(evidence, *subjects)]
