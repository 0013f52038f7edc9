"""Two results of the same prompts, before and after a change: what was gained at each setting, prompt by prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from draftkit.results.cell import Cell, Interval, PromptRecord
from draftkit.results.record import Result
from draftkit.results.statistics import gain, ratio_over_prompts


@dataclass(frozen=True)
class ComparedCells:
    """One setting before and after. `gained`: acceptance length, after − before; `faster`: output speed, after /
    before. Both over the same prompts; without bounds where the files do not hold those."""

    before: Cell
    after: Cell
    gained: Interval | None
    faster: Interval | None


def compare(before: Result, after: Result) -> tuple[ComparedCells, ...]:
    """The settings that both results have. Drafts go by their names, unless each result has but one."""
    single = all(len({cell.draft for cell in result.cells}) == 1 for result in (before, after))

    def setting(cell: Cell) -> tuple[object, ...]:
        name = "" if single else cell.draft
        asked = (cell.num_speculative_tokens, cell.tree_name, cell.temperature, cell.concurrency, cell.context)
        return name, cell.engine, *asked, cell.min_confidence, cell.dataset

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
        gained = gain([(b.accepted, b.rounds) for b, _ in pairs], [(a.accepted, a.rounds) for _, a in pairs])
    speeds = (before.tokens_per_second, after.tokens_per_second)
    faster = Interval(speeds[1] / speeds[0], None, None) if speeds[0] and speeds[1] else None
    timed = [(a.seconds, a.tokens, b.seconds, b.tokens) for b, a in pairs if a.seconds and b.seconds]
    if len(timed) == len(pairs) > 1:
        faster = ratio_over_prompts(timed)
    return ComparedCells(before, after, gained, faster)


def _pairs(before: Cell, after: Cell) -> Iterator[tuple[PromptRecord, PromptRecord]]:
    """The sums of each prompt before and after; empty where the prompts were not the same."""
    one, other = ({p.id: p for p in cell.by_prompt or ()} for cell in (before, after))
    if one.keys() == other.keys() and before.prompts_sha256 == after.prompts_sha256:
        yield from ((one[id], other[id]) for id in one if one[id].rounds and other[id].rounds)
