"""What a change of a draft or a target costs in acceptance, prompt by prompt, beside what it was made from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from draftkit.errors import command
from draftkit.evaluate.job import Job
from draftkit.finding import Finding
from draftkit.results.cell import Cell
from draftkit.results.metrics import difference
from draftkit.results.statistics import gain

# What the speed of a draft that only computes as if it were quantized would be taken for.
UNTIMED: dict[str, Any] = dict.fromkeys(("tokens_per_second", "speedup", "speedup_interval", "passes", "pace_error"))
FEWEST = 20  # prompts with which a part is called free of loss: on a few, no draft may happen to differ
FREE = 0.01  # the share of the acceptance length up to which a loss is none to whoever serves


def beside_plain(cells: Sequence[Cell], job: Job) -> tuple[list[Cell], list[Finding]]:
    """The cells, those of quantized drafts with what they lose against the plain ones, and what to quantize."""
    made = {name: source for source in job.sources for name in job.quantized(source)}
    if not made:
        return list(cells), []
    plain = {(cell.draft, *_setting(cell)): cell for cell in cells}
    found = []
    for cell in cells:
        of = plain.get((made.get(cell.draft, ""), *_setting(cell)))
        sized = replace(cell, draft_bytes=job.drafts[cell.draft].nbytes, **(UNTIMED if cell.draft in made else {}))
        found.append(sized if of is None else compared(sized, of, of.draft, comparisons=len(made)))
    advice = [_advice(source, job.quantized(source), found, job) for source in job.sources]
    return found, [finding for each in advice for finding in each]


def compared(cell: Cell, of: Cell, name: str, comparisons: int = 1) -> Cell:
    """A cell beside that of the same prompts which it is compared with."""
    one, other = ({r.id: (r.accepted, r.rounds) for r in c.by_prompt or () if r.rounds} for c in (of, cell))
    both = [key for key in one if key in other]
    if not both:
        return cell
    grown = gain([one[key] for key in both], [other[key] for key in both], comparisons)
    return replace(cell, compared_with=name, longer_by=grown)


def _setting(cell: Cell) -> tuple[object, ...]:
    """All that tells a cell but its draft."""
    return (cell.engine, cell.target, *cell.pair[2:])


def _advice(source: str, formats: Mapping[str, dict[str, str]], cells: Sequence[Cell], job: Job) -> Iterator[Finding]:
    """Which parts lose nothing, surely, and which lose something, surely; the others take more prompts."""
    parts = {name: next(iter(chosen.items())) for name, chosen in formats.items() if len(chosen) == 1}
    mine = {name: [cell for cell in cells if cell.draft == name] for name in parts}
    free = {part: format for name, (part, format) in parts.items() if mine[name] and all(map(_is_free, mine[name]))}
    if free:
        said = ",".join(f"{part}:{format}" for part, format in free.items())
        saved = sum(job.drafts[source].nbytes - job.drafts[n].nbytes for n, (part, _) in parts.items() if part in free)
        yield Finding(
            "quantized-for-nothing",
            "note",
            f"{source} loses no more than {FREE:.0%} of its acceptance length with {said}, each alone, and is "
            f"{saved / 1e6:,.2f} MB of {job.drafts[source].nbytes / 1e6:,.2f} smaller with them: "
            + command("draftkit", "convert", source, "OUT", "--quantize", said),
        )
    for name, (part, format) in parts.items():
        losses = [loss for cell in mine[name] if (loss := cell.longer_by) is not None and loss.below(0)]
        if losses:
            worst = min(losses, key=lambda loss: loss.mean)
            yield Finding(
                "quantized-with-loss",
                "note",
                f"{part} of {source} in {format} changes the acceptance length by {difference(worst)}",
                extent=-worst.mean,
            )


def _is_free(cell: Cell) -> bool:
    length, grown = cell.acceptance_length, cell.longer_by
    if length is None or grown is None or grown.bounds is None or (grown.prompts or 0) < FEWEST:
        return False
    return grown.bounds[0] >= -FREE * length.mean
