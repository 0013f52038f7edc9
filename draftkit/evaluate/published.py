"""Published acceptance lengths and speeds, beside what is measured: `published.json`, a row for each figure.

What a source does not say is null, and shown as "not stated". A row belongs to a measured pair whose target and draft
it names: by Hub id, and revision where both say one, else by name; one that names a kind of draft and no checkpoint
belongs to every draft of that kind, and says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from types import MappingProxyType

from draftkit.results.cell import Cell
from draftkit.results.record import Result

NOT_STATED = "not stated"
CONVENTION = "1 + accepted / rounds"
MOST_SHOWN = 3  # of the rows of a pair, beside a measurement


@dataclass(frozen=True)
class PublishedRow:
    """A figure as published; None where the source does not say. `speed` is in its words. `source` is what
    `link` is called; `note`: what else it says of the setting."""

    target: str
    target_id: str | None
    target_revision: str | None
    draft: str
    draft_id: str | None
    draft_revision: str | None
    method: str | None
    set: str | None
    num_speculative_tokens: int | None
    temperature: float | None
    draft_sampling: str | None
    verification: str | None
    thinking: bool | None
    engine: str | None
    convention: str | None
    device: str | None
    acceptance_length: float | None
    speed: str | None
    acceptance_per_pos: list[float] | None
    note: str | None
    source: str
    link: str

    @property
    def names_checkpoint(self) -> bool:
        """Whether it says which checkpoint the draft is."""
        return self.draft_id is not None

    @property
    def figure(self) -> str:
        """The published figure, in words."""
        length = [] if self.acceptance_length is None else [f"{self.acceptance_length:g}"]
        return "; ".join([*length, *([self.speed] if self.speed else [])])

    @property
    def setting(self) -> dict[str, object]:
        """How it was measured, as far as the source says."""
        return {
            "set": self.set, "K": self.num_speculative_tokens, "T": self.temperature, "drafts": self.draft_sampling,
            "verification": self.verification, "thinking": _on(self.thinking), "engine": self.engine,
            "device": self.device, "convention": self.convention,
        }  # fmt: skip


@cache
def published_rows() -> tuple[PublishedRow, ...]:
    """All of them, in the order of the file."""
    text = resources.files("draftkit.evaluate").joinpath("published.json").read_text(encoding="utf-8")
    names = [field.name for field in fields(PublishedRow)]
    return tuple(PublishedRow(**{name: row[name] for name in names}) for row in json.loads(text))


def rows_of(words: str) -> list[PublishedRow]:
    """The rows whose target, draft, method or set has all of some words in it."""
    wanted = [_plain(word) for word in words.split()]

    def said(row: PublishedRow) -> str:
        parts = (row.target, row.target_id, row.draft, row.draft_id, row.method, row.set, row.source)
        return " ".join(_plain(part) for part in parts if part)

    return [row for row in published_rows() if all(word in said(row) for word in wanted)]


@dataclass(frozen=True)
class Beside:
    """A published figure beside a measured cell. `differing`: each setting that both say and that differs, as
    "K 7, here 4"; `unstated`: those that the source does not say."""

    row: PublishedRow
    cell: Cell
    differing: tuple[str, ...]
    unstated: tuple[str, ...]

    @property
    def sentence(self) -> str:
        checkpoint = "" if self.row.names_checkpoint else ", which checkpoint is not stated"
        text = f"published {self.row.figure} for {self.row.draft} with {self.row.target}{checkpoint} ({self.row.link})"
        length = self.cell.acceptance_length
        measured = "its length not measured here" if length is None else f"{length.mean:.2f} measured here"
        differing = f"differing in {'; '.join(self.differing)}" if self.differing else "with no setting known to differ"
        unstated = f"; {NOT_STATED}: {', '.join(self.unstated)}" if self.unstated else ""
        note = f"; it says: {self.row.note}" if self.row.note else ""
        return f"{text}: {measured}, {differing}{unstated}{note}"


def published_beside(result: Result, sources: Mapping[str, str] = MappingProxyType({})) -> list[Beside]:
    """The published figures of the pairs that were measured, each beside the cell whose settings are the most alike; of
    each pair those that differ least. `sources`: what a target or a draft is called on the Hub, beside what the result
    says."""
    found: list[Beside] = []
    for draft in dict.fromkeys((cell.target, cell.draft) for cell in result.cells):
        cells = [cell for cell in result.cells if (cell.target, cell.draft) == draft]
        beside = [
            min((_beside(row, cell, result) for cell in cells), key=lambda one: len(one.differing))
            for row in published_rows()
            if cells and _is_of(row, cells[0], _part(result, "sources") | {**sources})
        ]
        beside.sort(key=lambda one: (not one.row.names_checkpoint, len(one.differing) + len(one.unstated) / 10))
        found += beside[:MOST_SHOWN]
    return found


def _part(result: Result, name: str) -> dict[str, object]:
    part = result.provenance.get(name)
    return part if isinstance(part, dict) else {}


def _is_of(row: PublishedRow, cell: Cell, sources: Mapping[str, object]) -> bool:
    """Whether a row is of the pair of a cell."""
    target, draft = (str(sources.get(name, name)) for name in (cell.target, cell.draft))
    if not _same(target, row.target, row.target_id, row.target_revision):
        return False
    if row.draft_id is not None or _short(draft) == _short(row.draft):
        return _same(draft, row.draft, row.draft_id, row.draft_revision)
    return row.method is not None and row.method == cell.method


def _same(source: str, name: str, repo: str | None, revision: str | None) -> bool:
    """Whether a source, `org/name[@revision]` or a folder's name, is what a row names."""
    own, _, commit = source.partition("@")
    if revision is not None and commit and revision != commit:
        return False
    return own == repo if repo is not None and "/" in own else _short(own) == _short(name)


def _short(source: str) -> str:
    """A model's name without its owner, revision and what instruct variants are called."""
    name = source.partition("@")[0].rpartition("/")[2]
    return _plain(re.sub(r"-(instruct|it|chat)$", "", name.lower()))


def _plain(text: object) -> str:
    return re.sub(r"[^a-z0-9.]", "", str(text).lower())


def _beside(row: PublishedRow, cell: Cell, result: Result) -> Beside:
    thinking = _part(result, "dataset").get("thinking")
    here: dict[str, object] = {
        "set": cell.dataset, "K": cell.num_speculative_tokens, "T": cell.temperature, "drafts": cell.draft_sampling,
        "verification": cell.verification, "thinking": _on(thinking) or "as the template has it", "engine": cell.engine,
        "device": result.provenance.get("hardware"), "convention": CONVENTION,
    }  # fmt: skip
    stated = {name: value for name, value in row.setting.items() if value is not None}
    unlike = {name: value for name, value in stated.items() if _differ(value, here[name])}
    differing = [f"{name} {_said(value)}, here {_said(here[name])}" for name, value in unlike.items()]
    wanted = ("set", "K", "T", "thinking", "engine", "device", "convention")
    return Beside(row, cell, tuple(differing), tuple(name for name in wanted if name not in stated))


def _differ(value: object, here: object) -> bool:
    if isinstance(value, int | float):
        return value != here
    one, other = _plain(value), _plain(here)
    return here is not None and one != other and one not in other and other not in one


def _said(value: object) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _on(thinking: object) -> str | None:
    return ("on" if thinking else "off") if isinstance(thinking, bool) else None
