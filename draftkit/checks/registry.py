"""Everything that can be wrong: a check says what it needs to look at, and yields what it finds.

Each file of this folder has the checks of one subject, functions marked with `@check`; to add one is to write it there.
`inspect`, cards, `doctor`, `data check`, `eval` and the gap report of training are views: they gather evidence and show
what the checks of their subjects find in it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from draftkit.finding import Finding
from draftkit.layout.facts import facts_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from draftkit.checks.gap import GapReplay
    from draftkit.checks.measurement import Asked
    from draftkit.checks.mtp_heads import Stored
    from draftkit.checks.training_data import Data
    from draftkit.convert.formats.mtp.heads import TargetHeads
    from draftkit.io.handles import TensorHandle
    from draftkit.layout.architecture import Architecture
    from draftkit.layout.folder import Draft
    from draftkit.layout.provenance import FactOrigin
    from draftkit.layout.spec import DraftSpec
    from draftkit.layout.target import TargetFacts
    from draftkit.results.record import Cell
    from draftkit.results.settings import Settings

Find = Callable[..., Iterable[Finding]]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What checks may look at; None where it is not known.

    Of a checkpoint: `contradictions` that its reading met, its `format` and `config`, and what it is in the layout –
    `spec`, the `origins` of its facts by name, `tensors`; `draft` where it is a folder of the layout, `draft_name` what
    the user calls it. `target`: what the target's config says, `target_config` as transformers reads it, `tokenizer`
    its tokenizer, `model` its weights, `refusal` why draftkit's own runtime does not run them, `heads` the multi-token
    prediction heads of its checkpoint, `stored` what there is to be read of it. `data`: what is to be trained on. Of a
    measurement: `asked` are its prompts, `cell` is one cell of its result. Of a training run: the `replay` of its
    answers.
    """

    contradictions: Sequence[Finding] | None = None
    format: str | None = None
    config: Mapping[str, object] | None = None
    spec: DraftSpec | None = None
    origins: Mapping[str, FactOrigin] | None = None
    tensors: Mapping[str, TensorHandle] | None = None
    draft: Draft | None = None
    draft_name: str = ""
    target: TargetFacts | None = None
    target_config: PretrainedConfig | None = field(default=None, repr=False)
    tokenizer: PreTrainedTokenizerBase | None = field(default=None, repr=False)
    model: PreTrainedModel | None = field(default=None, repr=False)
    refusal: str | None = None
    heads: TargetHeads | None = None
    stored: Stored | None = None
    data: Data | None = None
    asked: Asked | None = None
    settings: Settings | None = None
    cell: Cell | None = field(default=None, repr=False)
    replay: GapReplay | None = field(default=None, repr=False)

    @classmethod
    def of_draft(cls, draft: Draft, **others: Any) -> Evidence:
        """A draft of the layout, whose `config` is what has no place in it, and whatever else is known."""
        provenance = draft.provenance
        return cls(
            format=provenance.format,
            config=provenance.dropped_config,
            spec=draft.spec,
            origins={fact.name: fact for fact in provenance.facts},
            tensors=draft.tensors,
            draft=draft,
            **others,
        )

    @property
    def architecture(self) -> Architecture | None:
        return None if self.spec is None else self.spec.architecture

    @property
    def facts(self) -> Mapping[str, object] | None:
        """Every fact of the draft by name, as `--set` names it."""
        return None if self.spec is None else facts_of(self.spec.architecture)


@dataclass(frozen=True)
class Check:
    """`find` is called with the evidence that its parameters name, and is not where one without a default is unknown.

    `unless`: findings that explain what it would find, after which it has nothing to add.
    """

    find: Find
    unless: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """That of its function, with hyphens."""
        return self.find.__name__.replace("_", "-")

    @property
    def needs(self) -> frozenset[str]:
        """The evidence without which it is not run."""
        parameters = inspect.signature(self.find).parameters.values()
        return frozenset(parameter.name for parameter in parameters if parameter.default is parameter.empty)

    def run(self, evidence: Evidence) -> list[Finding]:
        """What it finds; nothing where it lacks what it needs."""
        looked_at = {name: getattr(evidence, name) for name in inspect.signature(self.find).parameters}
        return [] if any(looked_at[name] is None for name in self.needs) else list(self.find(**looked_at))


def check(find: Find) -> Check:
    """Make a function a check of its file's subject."""
    return Check(find)


def check_unless(*explained: str) -> Callable[[Find], Check]:
    """The same, for what these findings explain."""
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
    """What the checks of these subjects find, each beside the name of its check."""
    found: list[tuple[str, Finding]] = []
    for one in checks_of(*subjects):
        if one.unless.isdisjoint(finding.name for _, finding in found):
            found += [(one.name, finding) for finding in one.run(evidence)]
    return found


def findings(evidence: Evidence, *subjects: str) -> list[Finding]:
    """What the checks of these subjects find."""
    return [finding for _, finding in run_checks(evidence, *subjects)]
