"""What a release of an engine has, row by row with its evidence, and what a draft lacks in it.

An engine's own rows are in `engines/NAME/releases.py`. They name no family of drafts: a family says what it needs by
the names of capabilities (`layout/architecture.py`). What no row tells, draftkit does not know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

from draftkit.layout.architecture import Architecture, Capability
from draftkit.layout.spec import DraftSpec


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Whether a release has something, and the evidence for it.

    - `read_in`: the file of its package that says so; None where it was run.
    - `code`: what stands there, as `ast.unparse` writes it; `no_code`: what does not.
      `python -m scripts.check.releases` looks for both.
    - `methods`: the only methods for which it has it, by the engine's names; None for all.
    - `runner`: the only one of its model runners that has it, as V2; None for all.
    - `when`: what it needs besides, or does otherwise than one would think, in words.
    - `lossy`: of a way to accept draft tokens: its output is not drawn as the target's is.
    - `refuses`: of what is not there: whether the release says so by itself, instead of running a draft wrongly.
    - `instead`: of what is not there: what to do.
    - `called`: its name in this release, where that is another than the row's.
    - `thread`: where a fault is discussed.
    """

    there: bool = True
    read_in: str | None
    code: str = ""
    no_code: str = ""
    methods: tuple[str, ...] | None = None
    runner: str | None = None
    when: str = ""
    lossy: bool = False
    refuses: bool = False
    instead: str = ""
    called: str = ""
    thread: str = ""


def has(read_in: str, code: str = "", **others: Any) -> Entry:
    """A row that is there, read in a file; `others`: further fields of `Entry`."""
    return Entry(read_in=read_in, code=code, **others)


def lacks(read_in: str, code: str = "", **others: Any) -> Entry:
    """A row that is not there, read in a file; `others`: further fields of `Entry`."""
    return Entry(there=False, read_in=read_in, code=code, **others)


def ran(*, runner: str | None = None) -> Entry:
    """A row that was run."""
    return Entry(read_in=None, runner=runner)


def each(row: Entry, names: str) -> dict[str, Entry]:
    """The same row under every name of a text."""
    return dict.fromkeys(names.split(), row)


@dataclass(frozen=True, kw_only=True)
class Release:
    """One release of an engine, each of its tables name → row.

    `methods`: what its option for the kind of draft takes. `config_keys`: the settings of speculative decoding.
    `architectures`: the classes of drafts, as a `config.json` names them. `capabilities`: by `Capability.name`.
    `verifications`: the ways to accept draft tokens. `metrics`: what it counts of them. `rules`: what it does with
    lengths, memory and quantized drafts, by a name of draftkit's. `raised_ropes`: the kinds of rope with which a draft
    that ends before its target is given the target's positions; None for all. `slots`: by method, as `dflash in
    parallel` where all tokens are drafted at once, what drafting takes of a batch's tokens besides (`when`).
    `plain_parts`: the parts of drafts (`convert/quantize.py`) whose weights it does not read quantized; further rows of
    a part have a word more. `quantizations`: the algorithms of drafts' weights that it reads, by ModelOpt's names, and
    `compressed-tensors`.
    """

    engine: str
    number: str
    methods: Mapping[str, Entry]
    config_keys: Mapping[str, Entry] = field(default_factory=dict)
    architectures: Mapping[str, Entry] = field(default_factory=dict)
    capabilities: Mapping[str, Entry] = field(default_factory=dict)
    verifications: Mapping[str, Entry] = field(default_factory=dict)
    metrics: Mapping[str, Entry] = field(default_factory=dict)
    rules: Mapping[str, Entry] = field(default_factory=dict)
    quantizations: Mapping[str, Entry] = field(default_factory=dict)
    plain_parts: Mapping[str, Entry] = field(default_factory=dict)
    slots: Mapping[str, Entry] = field(default_factory=dict)
    raised_ropes: frozenset[str] | None = None

    def __str__(self) -> str:
        return f"{self.engine} {self.number}"


def is_there(row: Entry | None) -> bool:
    """Whether a row says that something is there."""
    return row is not None and row.there


@dataclass(frozen=True)
class Verdict:
    """What a release does with a draft's folder.

    `outcome`: it runs the draft rightly; it refuses by itself; it would run it wrongly, or stop somewhere on the way;
    or nobody has looked. `reason`: why it does not run it, from the verb on. `instead`: what to do then, if there is
    anything.
    """

    release: Release
    outcome: Literal["runs", "refuses", "wrong", "unknown"]
    reason: str = ""
    instead: str = ""

    @property
    def runs(self) -> bool:
        return self.outcome == "runs"

    @property
    def answer(self) -> str:
        """Whether it runs the draft, in words."""
        if self.runs:
            return "yes"
        return f"not known, {self.reason}" if self.outcome == "unknown" else f"no, it {self.reason}"

    @property
    def sentence(self) -> str:
        """Why it does not run the draft, without the number of the release."""
        engine = self.release.engine
        return f"draftkit does not know {self.reason}" if self.outcome == "unknown" else f"{engine} {self.reason}"


def verdict(release: Release, spec: DraftSpec, layout: str, architecture: str | None) -> Verdict:
    """What a release does with a draft from a folder in a layout, as `--to` names it.

    `architecture`: the class that the folder names, None where it names none of a draft's.
    """
    draft, engine = spec.architecture, release.engine
    method = draft.SERVED_AS.get(engine.lower(), {}).get(spec.method)
    row = None if method is None else release.methods.get(method)
    if row is not None and not row.there:
        return Verdict(release, "refuses", f"has no proposer for {spec.method} drafts", row.instead)
    for capability in draft.needs(layout):
        if (lacking := _lacking(release, capability, draft)) is not None:
            return lacking
    if row is None:
        return Verdict(release, "unknown", f"how {engine} runs {spec.method} drafts")
    if architecture is not None and not is_there(release.architectures.get(architecture)):
        return Verdict(release, "refuses", f"has no class {architecture}")
    unknown = [name for name in draft.engine_settings.get(engine.lower(), {}) if not has_setting(release, name)]
    return Verdict(release, "refuses", f"has no setting {unknown[0]}") if unknown else Verdict(release, "runs")


def has_setting(release: Release, name: str) -> bool:
    """Whether a release takes a setting, under whatever name."""
    return is_there(release.config_keys.get(name))


def _lacking(release: Release, capability: Capability, draft: Architecture) -> Verdict | None:
    """What a release does without something that the draft needs; None where it has it."""
    row = release.capabilities.get(capability.name)
    if row is None:
        return Verdict(release, "unknown", f"whether {release.engine} runs {capability.what}")
    if not row.there:
        reason = capability.without.format(draft=draft)
        return Verdict(release, "refuses" if row.refuses else "wrong", reason, row.instead)
    return None


def told(verdicts: Sequence[Verdict]) -> str:
    """What releases of one engine do with a draft, in one line, as `vLLM 0.33: yes; 0.32: no, it has no class
    NAME`; those that do the same stand together."""
    groups = [(answer, list(same)) for answer, same in groupby(verdicts, key=lambda one: one.answer)]
    parts = [f"{', '.join(one.release.number for one in same)}: {answer}" for answer, same in groups]
    return f"{verdicts[0].release.engine} {'; '.join(parts)}"


def against(verdicts: Sequence[Verdict]) -> str | None:
    """Why no release may load a draft as it lies: some would run it wrongly without a word, or none runs it at all.

    None where all that do not run it refuse it by themselves, and some do.
    """
    doubtful = [one for one in verdicts if one.outcome in ("wrong", "unknown")]
    if not doubtful and any(one.runs for one in verdicts):
        return None
    same = len({one.answer for one in verdicts}) == 1
    return verdicts[0].sentence if same else told(verdicts)
