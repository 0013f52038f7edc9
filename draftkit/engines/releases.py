"""What a release of an engine has, row by row with its evidence, and what a draft lacks in it.

An engine's own rows are in `engines/NAME/releases.py`. They name no family of drafts: a family says what it needs by
the names of capabilities (`layout/architecture.py`). What no row tells, draftkit does not know.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from draftkit.layout.spec import DraftSpec


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Whether a release has something, and the evidence for it.

    - `read_in`: the file of its package that says so; None where it was run.
    - `code`: what stands there, as `ast.unparse` writes it; `no_code`: what does not.
      `python -m scripts.check.releases` looks for both.
    - `layout`: the only layout, as `--to` names it, for whose folders this holds; None where it holds for all.
    - `runner`: the only one of its model runners that has it, as V2; None for all.
    - `when`: what it needs besides, or does otherwise than one would think, in words.
    - `thread`: where a fault is discussed.
    """

    there: bool = True
    read_in: str | None
    code: str = ""
    no_code: str = ""
    layout: str | None = None
    runner: str | None = None
    when: str = ""
    thread: str = ""


def has(read_in: str, code: str = "", *, runner: str | None = None, layout: str | None = None, when: str = "") -> Entry:
    """A row that is there, read in a file."""
    return Entry(read_in=read_in, code=code, runner=runner, layout=layout, when=when)


def lacks(read_in: str, code: str = "", *, no_code: str = "", thread: str = "") -> Entry:
    """A row that is not there, read in a file."""
    return Entry(there=False, read_in=read_in, code=code, no_code=no_code, thread=thread)


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
    that ends before its target is given the target's positions; None for all.
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
    raised_ropes: frozenset[str] | None = None

    def __str__(self) -> str:
        return f"{self.engine} {self.number}"


def runs_in(row: Entry | None, layout: str) -> bool:
    """Whether a row says that something is there, for a folder in a layout."""
    return row is not None and row.there and row.layout in (None, layout)


def refusal(releases: Sequence[Release], spec: DraftSpec, layout: str, architecture: str | None) -> str | None:
    """The first thing that a draft has and the first release of `releases` has not, or is not known to have; or None.

    `layout`: that of the draft's folder. `architecture`: the class that the folder names, None where it names none of a
    draft's. Later releases are told of where they have what is lacking.
    """
    release, *later = releases
    engine, draft = release.engine, spec.architecture
    for capability in draft.needs(layout):
        row = release.capabilities.get(capability.name)
        if row is None:
            return f"draftkit does not know whether {engine} runs {capability.what}"
        if not runs_in(row, layout):
            news = _news(((other.number, other.capabilities.get(capability.name)) for other in later), capability.what)
            return f"{engine} {capability.without.format(draft=draft)}{news}"
    method = draft.SERVED_AS.get(engine.lower(), {}).get(spec.method)
    if method is None or method not in release.methods:
        return f"draftkit does not know how {engine} runs {spec.method} drafts"
    if not release.methods[method].there:
        return f"{engine} has no proposer for {spec.method} drafts"
    if architecture is not None and not runs_in(release.architectures.get(architecture), layout):
        return f"{engine} has no class {architecture}"
    unknown = [name for name in draft.engine_settings.get(engine.lower(), {}) if name not in release.config_keys]
    return f"{engine} has no setting {unknown[0]}" if unknown else None


def _news(rows: Iterable[tuple[str, Entry | None]], what: str) -> str:
    """Which later release has what is lacking, and in which layout; nothing where none has."""
    for number, row in rows:
        if row is not None and row.there:
            where = "" if row.layout is None else f", in the layout that convert --to {row.layout} writes"
            return f"; its release {number} runs {what}{where}"
    return ""
