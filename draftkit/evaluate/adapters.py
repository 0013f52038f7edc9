"""The same drafts under each adapter of a target: which of those who share a draft need their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from draftkit.errors import DraftkitError, command
from draftkit.evaluate.evaluate import evaluate_draft
from draftkit.evaluate.measure import PromptProgress
from draftkit.finding import Finding
from draftkit.layout.target import ADAPTED, adapted_name
from draftkit.results.cell import Cell
from draftkit.results.metrics import difference
from draftkit.results.record import Result, ResultWarning
from draftkit.results.saved import ResultFile
from draftkit.results.settings import Settings, Sweep
from draftkit.results.statistics import gain
from draftkit.results.verdict import verdicts


def evaluate_adapters(
    target: str,
    drafts: str | Sequence[str],
    adapters: Sequence[str],
    asked: Settings | Sweep | None = None,
    on_progress: PromptProgress | None = None,
    *,
    saved: ResultFile | None = None,
    **more: Any,
) -> Result:
    """Measure drafts against a target, and against the same with each adapter merged into it: the cells of all, those
    with an adapter beside those without, prompt by prompt.

    The prompts are the same, the answers are each target's own. `saved` is written at the end; `more` goes to
    `evaluate_draft`. Raises `DraftkitError`.
    """
    if len(set(adapters)) < len(adapters):
        raise DraftkitError("an adapter is given twice", hint="give each once")
    names = [adapted_name(target, adapter) for adapter in (None, *adapters)]
    _check(names)
    plain, *adapted = [evaluate_draft(name, drafts, asked, on_progress, **more) for name in names]
    alone = {cell.pair[1:]: cell for cell in plain.cells}
    cells = [_compared(cell, alone[cell.pair[1:]], target, len(adapters)) for one in adapted for cell in one.cells]
    warned = [warning for one in (plain, *adapted) for warning in one.warnings]
    told = [ResultWarning.of(finding) for cell in cells if (finding := _needs_its_own(cell, target)) is not None]
    every = (*plain.cells, *cells)
    served = [one.commands for one in plain.verdicts]  # engines are told of adapters by the requests
    judged = verdicts(every)
    served += [{}] * (len(judged) - len(served))
    result = Result(
        every,
        plain.provenance | {"adapters": list(adapters)},
        tuple(dict.fromkeys([*warned, *told])),
        tuple(model for one in (plain, *adapted) for model in one.speed_models),
        tuple(replace(one, commands=commands) for one, commands in zip(judged, served, strict=True)),
    )
    if saved is not None:
        saved.write(result.to_dict())
    return result


def _compared(cell: Cell, of: Cell, name: str, comparisons: int) -> Cell:
    """A cell beside that of the same prompts which it is compared with."""
    one, other = ({r.id: (r.accepted, r.rounds) for r in c.by_prompt or () if r.rounds} for c in (of, cell))
    both = [key for key in one if key in other]
    if not both:
        return cell
    grown = gain([one[key] for key in both], [other[key] for key in both], comparisons)
    return replace(cell, compared_with=name, longer_by=grown)


def _check(names: Sequence[str]) -> None:
    """Raise `DraftkitError` for an adapter that does not fit, before anything is measured."""
    from draftkit.loading import open_target  # needs torch

    for name in names:
        open_target(name)


def _needs_its_own(cell: Cell, target: str) -> Finding | None:
    """Whether a draft loses under an adapter, surely."""
    if cell.longer_by is None or not cell.longer_by.below(0):
        return None
    adapter = cell.target.partition(ADAPTED)[2]
    adapting = command("draftkit", "adapt", "--target", target, "--target-adapter", adapter, "--draft", cell.draft)
    return Finding(
        "adapter-shortens",
        "note",
        f"{cell.draft}: under {adapter} the acceptance length is another by {difference(cell.longer_by)} than "
        f"without: {adapting} … adapts it",
        extent=-cell.longer_by.mean,
    )
