"""The raw record of rounds in a file, a line for each: written as they are measured, and read back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from draftkit.errors import DraftkitError, FormatError
from draftkit.hub.local_paths import names_of_paths
from draftkit.io.atomic import check_writable
from draftkit.io.jsonfile import finite, parse
from draftkit.io.records import read_record
from draftkit.results.cell import Heading

if TYPE_CHECKING:  # it needs torch
    from draftkit.runtime.records import Generation, Round

# What a line says of how its round was asked for.
HEADING = (
    "num_speculative_tokens", "temperature", "concurrency", "draft_sampling", "min_confidence", "verification"
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RecordedRound:
    """A round of a file, as `draftkit.runtime.records.Round` has it, with how it was asked for. `slices`: what its
    prompt is, as `category=code`. `tree`: where one was drafted; `drafted` are then its nodes, and `expected` is of
    levels. What a draft does not say is empty."""

    draft: str
    num_speculative_tokens: int
    temperature: float
    concurrency: int
    request: str
    drafted: int
    accepted: int
    expected: tuple[float, ...] = ()
    beyond: bool = False
    draft_sampling: str | None = None
    min_confidence: float | None = None
    verification: str | None = None
    slices: tuple[str, ...] = ()
    tree: str | None = None
    confidences: tuple[float, ...] = ()
    probabilities: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        k, levels = self.num_speculative_tokens, self.drafted if self.tree is None else self.num_speculative_tokens
        if not 0 <= self.accepted <= min(self.drafted, k) or (self.tree is None and self.drafted > k):
            raise ValueError(f"{self.accepted} of {self.drafted} drafts, at K = {k}")
        for name in ("expected", "confidences", "probabilities"):
            numbers = getattr(self, name)
            if len(numbers) not in (0, levels) or not all(0 <= number <= 1.0001 for number in numbers):
                raise ValueError(f"{name} is not a chance for each of {levels} drafts")


def check_records(path: Path) -> None:
    """Raise `DraftkitError` where rounds cannot be appended to a file; leaves no trace."""
    check_writable(path)
    if path.exists():
        _append(path, [])


def append_rounds(
    path: Path, heading: Heading, generations: Sequence[Generation], slices: Mapping[str, Sequence[str]]
) -> None:
    """Append the raw record of a run: a line for each round, from which every statistic can be had again. The draft is
    called as in a result, by its name; `slices`: what the prompt of each request is, as `category=code`.

    Raises `DraftkitError` where the file cannot be written.
    """
    setting = {name: getattr(heading, name) for name in HEADING}
    draft = names_of_paths([heading.draft]).get(heading.draft, heading.draft)
    lines = []
    for g in generations:
        asked = {"draft": draft} | setting | {"request": g.request.id, "slices": list(slices.get(g.request.id, ()))}
        for number, r in enumerate(g.rounds):
            ended = g.finished if number == len(g.rounds) - 1 else None
            lines.append(json.dumps(finite(asked | _drafted(r, heading) | {"finished": ended})))
    _append(path, lines)


def _drafted(round: Round, heading: Heading) -> dict[str, object]:
    """A round as a line has it. Of a tree, `paths` are the tokens from the root to each of its leaves."""
    said = asdict(round)
    parents = said.pop("parents")
    if heading.tree is None:
        return said
    said.pop("proposal")
    return said | {"tree": heading.tree.name, "paths": paths_of(round.proposal, parents)}


def paths_of(tokens: Sequence[int], parents: Sequence[int]) -> list[list[int]]:
    """The tokens from a tree's root to each of its leaves; `parents` as a `Round` has them."""
    paths: list[list[int]] = [[]]
    for token, parent in zip(tokens, parents, strict=True):
        paths.append([*paths[parent], token])
    inner = set(parents)
    return [path for row, path in enumerate(paths) if row and row not in inner]


def read_rounds(paths: Sequence[Path]) -> list[RecordedRound]:
    """The rounds of all files, in their order. A run that was recorded twice counts once: the same request has a round
    at each position of its text. Raises `SourceError` for a file that cannot be read, `FormatError` for another."""
    lines = {line: place for path in paths for place, line in _lines(path)}
    return [_round(line, place) for line, place in lines.items()]


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Each line of a file, with its place."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DraftkitError(f"the records cannot be read: {error.strerror}", where=path) from error
    except UnicodeDecodeError as error:
        raise FormatError("not text", where=path, expected=EXPECTED) from error
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield f"{path}, line {number}", line


EXPECTED = "a file that draftkit eval --records wrote"


def _round(line: str, place: str) -> RecordedRound:
    try:
        value = parse(line)
    except ValueError as error:
        raise FormatError(f"not a whole record of a round: {error}", where=place, expected=EXPECTED) from error
    found, problems = read_record(RecordedRound, value, lenient=True)
    if found is None:
        raise FormatError("not the record of a round: " + "; ".join(problems), where=place, expected=EXPECTED)
    return found


def _append(path: Path, lines: Sequence[str]) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines)
    except OSError as error:
        raise DraftkitError(f"the records cannot be written: {error.strerror}", where=path) from error
