"""Two results of the same prompts, before and after a change: what was gained at each setting, prompt by prompt."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from draftkit.results.cell import Cell, Interval, PromptRecord
from draftkit.results.record import Result
from draftkit.results.statistics import RESAMPLES

Pairs = Sequence[tuple[PromptRecord, PromptRecord]]


@dataclass(frozen=True)
class ComparedCells:
    """One setting before and after. `gained`: acceptance length, after − before; `faster`: output speed, after /
    before. Both over the same prompts (a paired bootstrap); without bounds where the files do not hold those."""

    before: Cell
    after: Cell
    gained: Interval | None
    faster: Interval | None


def compare(before: Result, after: Result) -> tuple[ComparedCells, ...]:
    """The settings that both results have. Drafts go by their names, unless each result has but one."""
    single = all(len({cell.draft for cell in result.cells}) == 1 for result in (before, after))

    def setting(cell: Cell) -> tuple[object, ...]:
        name = "" if single else cell.draft
        asked = (cell.num_speculative_tokens, cell.temperature, cell.concurrency, cell.context)
        return name, cell.engine, *asked, cell.dataset

    later = {setting(cell): cell for cell in after.cells}
    return tuple(_compared(cell, later[setting(cell)]) for cell in before.cells if setting(cell) in later)


def summary(compared: Sequence[ComparedCells]) -> str:
    """The comparison in one sentence."""
    if not compared:
        return "the two results have no setting in common: nothing can be compared"
    counts = {
        "longer": sum(c.gained is not None and c.gained.above(0) for c in compared),
        "shorter": sum(c.gained is not None and c.gained.below(0) for c in compared),
    }
    told = [f"{word} at {count}" for word, count in counts.items() if count]
    what = " and ".join(told) if told else "no longer and no shorter, as far as these prompts tell, at any"
    return f"acceptance lengths are {what} of {len(compared)} settings"


def _compared(before: Cell, after: Cell) -> ComparedCells:
    pairs = tuple(_pairs(before, after))
    one, other = before.acceptance_length, after.acceptance_length
    gained = None if one is None or other is None else Interval(other.mean - one.mean, None, None)
    if pairs:
        gained = _paired(pairs, lambda rows: _length(a for _, a in rows) - _length(b for b, _ in rows))
    speeds = (before.tokens_per_second, after.tokens_per_second)
    faster = Interval(speeds[1] / speeds[0], None, None) if speeds[0] and speeds[1] else None
    if pairs and all(b.seconds and a.seconds for b, a in pairs):
        faster = _paired(pairs, lambda rows: _speed(a for _, a in rows) / _speed(b for b, _ in rows))
    return ComparedCells(before, after, gained, faster)


def _pairs(before: Cell, after: Cell) -> Iterator[tuple[PromptRecord, PromptRecord]]:
    """What became of each prompt; nothing where they were not the same ones."""
    one, other = ({p.id: p for p in cell.by_prompt or ()} for cell in (before, after))
    if one.keys() == other.keys() and before.prompts_sha256 == after.prompts_sha256:
        yield from ((one[id], other[id]) for id in one if one[id].rounds and other[id].rounds)


def _paired(pairs: Pairs, statistic: Callable[[Pairs], float]) -> Interval:
    """The statistic with its interval over prompts, the same ones on both sides."""
    if len(pairs) < 2:
        return Interval(statistic(pairs), None, None, len(pairs))
    generator = random.Random(0)
    found = sorted(statistic(generator.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    return Interval(statistic(pairs), found[RESAMPLES * 25 // 1000], found[RESAMPLES * 975 // 1000], len(pairs))


def _length(prompts: Iterator[PromptRecord]) -> float:
    rows = list(prompts)
    return 1 + sum(p.accepted for p in rows) / sum(p.rounds for p in rows)


def _speed(prompts: Iterator[PromptRecord]) -> float:
    rows = list(prompts)
    return sum(p.tokens for p in rows) / sum(p.seconds or 0.0 for p in rows)
