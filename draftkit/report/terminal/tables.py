"""Measurements as terminal tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import PurePath
from textwrap import indent
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftkit.report.terminal.engines import engine_pairs, engines_table
from draftkit.report.terminal.screen import columns as lines
from draftkit.report.terminal.screen import named_table, severity
from draftkit.results.cell import Cell, Interval
from draftkit.results.metrics import METRICS, length, metrics_of, number
from draftkit.results.record import Result, SpeedModel
from draftkit.runtime.memory_plan import GIB

if TYPE_CHECKING:
    from draftkit.evaluate.round_cost import PlannedRound
    from draftkit.runtime.memory_plan import MemoryPlan
import csv
import io
import math

from draftkit.hub.local_paths import names_of_paths
from draftkit.results.cell import Times
from draftkit.results.metrics import kind_at, value_at

CAPTION = (
    "acceptance length = 1 + accepted draft tokens / rounds; in brackets 95 % intervals over prompts; speed-up: over "
    "plain decoding on the same engine; output: that of plain decoding, or for how many prompts; of drafts: over the "
    "rounds that had one"
)
DETAILS = (
    "expected: from the probabilities of the same forwards; drafted: over the rounds that drafted; at each position: "
    "accepted / rounds; times are medians"
)
VERDICT_STYLES = {"use": "bold green", "none": "bold red", "unclear": "bold yellow", "unmeasured": "bold"}
NAME_WIDTH = 16  # of a draft in the table that fits a terminal of 80 columns


def show_evaluation(
    console: Console,
    result: Result,
    *,
    details: bool = False,
) -> None:
    """A measurement: the verdict, the cells, what was asked for beside them, and warnings; all else with `details`."""
    show_verdicts(console, result)
    console.print(evaluation_table(result))
    if details:
        console.print(details_table(result))
        ids = result.provenance.get("first_prompt_ids")
        if isinstance(ids, list) and ids:
            console.print(f"the first prompt begins with the ids {' '.join(map(str, ids[:8]))}")
        console.print(category_table(result.cells))
    if any(ours and theirs for ours, theirs in engine_pairs(result.cells)):
        console.print(engines_table(result.cells))
    if any(cell.slices for cell in result.cells):
        console.print(slices_table(result.cells))
    if any(cell.over_context for cell in result.cells):
        console.print(contexts_table(result.cells))
    for model in result.speed_models:
        show_speed_model(console, model)
    for tree in dict.fromkeys(cell.tree for cell in result.cells if cell.tree is not None):
        console.print(f"tree {tree.name}: {tree.depth} levels" + (f"; {tree.note}" if tree.note else ""))
    for warning, kind in result.warned:
        console.print(severity(warning.severity).append(f": {warning.message} [{kind}]", "default"))


def show_verdicts(console: Console, result: Result) -> None:
    """Print each verdict, which says what to do, with the commands for it."""
    for verdict in result.judged:
        console.print(verdict.sentence, style=VERDICT_STYLES[verdict.kind])
        for command in verdict.commands.values():
            console.print(indent(command, "  "), soft_wrap=True, markup=False)


def evaluation_table(result: Result) -> Table:
    """One row per cell of a measurement, in 80 columns."""
    cells, provenance = result.cells, result.provenance
    shown = metrics_of("table", cells)
    first, varied = cells[0], {metric.name for metric in shown}
    fixed = {m.name: m for m in METRICS if "table" in m.sparing and m.unlike is None and m.name not in varied}
    prompts, _ = fixed.pop("num_prompts", None), fixed.pop("target", None)
    where = f"{provenance.get('dtype')} on {provenance.get('device')}"
    if "server" in provenance:
        where = "a server" if first.engine == "server" else f"a server of {first.engine}"
    told = [f"{metric.title}={metric.text(first)}" for metric in fixed.values() if metric.value(first) is not None]
    title = [first.target, *told, where]
    if prompts is not None:
        title.append(f"{prompts.text(first)} prompts")
    gap = 0 if "length_of_drafts" in varied else 1  # beside that of the box
    table = Table(title=" · ".join(title), caption=CAPTION, box=SIMPLE_HEAD, show_edge=False, padding=(0, gap, 0, 0))
    table.title_justify = table.caption_justify = "left"
    labels = _labels(cells)
    table.add_column("draft", width=min(max(map(len, ("draft", *labels.values()))), NAME_WIDTH), overflow="fold")
    for metric in shown:
        table.add_column(metric.heading, justify="left" if metric.left else "right")
    before = None
    for cell in cells:
        draft = labels[_draft(cell)] if _draft(cell) != before else ""
        table.add_row(draft, *(metric.text(cell) for metric in shown))
        before = _draft(cell)
    return table


def details_table(result: Result) -> Table:
    """Of `--details`, everything else that each cell measured: a line for each figure, as no terminal has so many
    columns."""
    shown = metrics_of("details", result.cells)
    rows = lines()
    rows.caption, rows.caption_justify = DETAILS, "left"
    for cell in result.cells:
        rows.add_row("draft", Text(_draft(cell), style="bold"))
        for metric in shown:
            rows.add_row(metric.title, metric.text(cell))
        rows.add_row()
    return rows


def _draft(cell: Cell) -> str:
    return f"{cell.draft_in_engine}, estimated" if cell.estimated else cell.draft_in_engine


def _labels(cells: Sequence[Cell]) -> dict[str, str]:
    """The drafts' names for a narrow column. Of a folder the end of its path, of several that which differs."""
    names = list(dict.fromkeys(map(_draft, cells)))
    folders = {name: PurePath(name).parts for name in names if PurePath(name).is_absolute()}
    if len(folders) < 2:
        return {name: _end(name) if name in folders else name for name in names}
    alike = _alike(folders.values())
    ends = -_alike(parts[::-1] for parts in folders.values()) or None
    own = {name: parts[alike:ends] for name, parts in folders.items()}
    return {name: str(PurePath(*own[name])) if own.get(name) else name for name in names}


def _end(path: str) -> str:
    """Show as many whole parts of a path's end as fit the column, at least the last."""
    parts = PurePath(path).parts
    ends = [str(PurePath(*parts[begin:])) for begin in range(1, len(parts))]
    return next((end for end in (path, *ends) if len(end) <= NAME_WIDTH), ends[-1])


def _alike(paths: Iterable[tuple[str, ...]]) -> int:
    """How many leading parts all paths have in common."""
    return len(list(takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))))


def category_table(cells: Sequence[Cell]) -> Table:
    """Acceptance length by category, a column for each draft at its most draft tokens."""
    widest = {cell.draft: cell for cell in sorted(cells, key=lambda cell: cell.num_speculative_tokens)}
    labels = _labels(cells)
    headings = [f"{labels[_draft(cell)]}, {cell.drafted}" for cell in widest.values()]
    title = "acceptance length by category (prompts), and as other tools count it"
    table = named_table("category", *headings, title=title)
    first = next(iter(widest.values()))
    for category in first.by_category:
        table.add_row(category, *(length(cell.by_category.get(category), count=True) for cell in widest.values()))
    table.add_section()
    for convention in first.acceptance_length_by_convention:
        lengths = (cell.acceptance_length_by_convention.get(convention) for cell in widest.values())
        table.add_row(convention, *map(number, lengths))
    return table


def slices_table(cells: Sequence[Cell]) -> Table:
    """How far each slice of the prompts is from the rest, in each cell that was sliced."""
    table = Table(
        "slice", "prompts", "acceptance length", "against the others", "",
        title="acceptance length by slice", box=SIMPLE_HEAD, title_justify="left", caption_justify="left",
        caption="shorter, longer: than that of the other prompts, beyond chance",
    )  # fmt: skip
    sliced = [cell for cell in cells if cell.slices]
    for cell in sliced:
        if len(sliced) > 1:
            table.add_row(f"{_draft(cell)}: {cell.name.partition(', ')[2]}, T={cell.temperature:g}")
        for found in cell.slices or ():
            shift = "" if found.shift is None else length(found.shift, signed=True)
            row = (found.name, str(found.prompts), length(found.acceptance_length), shift, _shift(found.shift))
            table.add_row(*row)
        table.add_section()
    return table


def contexts_table(cells: Sequence[Cell]) -> Table:
    """The acceptance length by context, how far it is from that of the same prompts at the shortest, and the K that was
    the fastest there. Batches that accept the same are told once."""
    headings = ("draft", "context", "prompts", "acceptance length", "against the shortest", "best K")
    table = named_table(*headings, title="acceptance length by context")
    table.caption = "best K: the fastest of those measured, 0 where none is faster than plain decoding; batch: K"
    labels, rows = _labels(cells), dict[tuple[str, ...], None]()
    for cell in sorted(
        cells, key=lambda cell: (cell.draft, cell.num_speculative_tokens, cell.drafted, cell.context or 0)
    ):
        shift = "" if cell.over_context is None else length(cell.over_context, signed=True)
        name = f"{labels[_draft(cell)]}: {cell.drafted}, T={cell.temperature:g}"
        context = "as it is" if cell.context is None else f"{cell.context:,}"
        rows[name, context, str(cell.num_prompts), length(cell.acceptance_length), shift, _best_k(cell, cells)] = None
    for row in rows:
        table.add_row(*row)
    return table


def _best_k(cell: Cell, cells: Sequence[Cell]) -> str:
    """The K, or tree, with which a cell's draft was the fastest at the cell's temperature and context: one for all
    batches, or one for each."""

    def place(one: Cell) -> tuple[object, ...]:
        return one.target, one.draft, one.engine, one.temperature, one.context

    timed = [one for one in cells if one.times_faster is not None and place(one) == place(cell)]
    best = {one.concurrency: one for one in sorted(timed, key=lambda one: one.times_faster or 0.0)}
    told = {batch: one.drafts_a_round if (one.times_faster or 0.0) > 1 else "0" for batch, one in sorted(best.items())}
    if len(set(told.values())) < 2:
        return next(iter(told.values()), "–")
    return ", ".join(f"{batch}: {k}" for batch, k in told.items())


def _shift(shift: Interval | None) -> str:
    if shift is None:
        return ""
    return "shorter" if shift.below(0) else "longer" if shift.above(0) else ""


def show_speed_model(console: Console, model: SpeedModel) -> None:
    """Print which K is fastest at which batch size, what it would bring, and how far such predictions were off.

    Where they were too far off, only that, and what to measure instead.
    """
    if model.withheld is not None:
        console.print(f"{model.draft}{_context(model)}: no advice, {model.withheld}")
        return
    batches = sorted({p.concurrency for p in model.predicted})
    ks = sorted({p.num_speculative_tokens for p in model.predicted})
    speeds = {(p.concurrency, p.num_speculative_tokens): p for p in model.predicted}
    rounds = {(r.concurrency, r.num_speculative_tokens): r.ms for r in model.rounds_ms}
    table = Table(
        "batch",
        "plain step ms",
        *(f"K={k}{'*' if model.drafted is not None and k > model.drafted else ''}" for k in ks),
        title=f"{model.draft}: predicted speed-up{_context(model)}",
        caption="* beyond the K that was drafted: extrapolated, and not advised",
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
    )
    for batch in batches:
        cells = (number(speeds[batch, k].speedup) for k in ks)
        table.add_row(str(batch), number(rounds.get((batch, 0))), *cells)
    console.print(table)
    if model.mean_error is not None:
        errors = ", ".join(
            f"batch {m.concurrency} K={m.num_speculative_tokens}: {number(m.predicted)} against {number(m.speedup)}"
            for m in model.measured
        )
        console.print(f"predicted against measured: {errors}; off by {100 * model.mean_error:.0f} % on average")
    console.print(_advice(model))
    schedule = json.dumps(model.schedule, separators=(",", ":"))
    console.print(f'vLLM: "num_speculative_tokens_per_batch_size": {schedule}', soft_wrap=True)


def _context(model: SpeedModel) -> str:
    return "" if model.context is None else f", context {model.context}"


def _advice(model: SpeedModel) -> str:
    if model.best_k == 0:
        return f"{model.draft}: no K is faster than plain decoding on this machine"
    if model.stop_above is not None:
        until = f"stop drafting above batch {model.stop_above}"
    else:
        until = f"drafting pays at every batch up to {model.largest_batch}, the largest that was timed"
    return f"{model.draft}: by these, K={model.best_k} at the smallest batch; {until}"


def plan_answer(draft: str, plan: MemoryPlan, rounds: Sequence[PlannedRound]) -> str:
    """Whether a run fits, and from which acceptance length on the draft makes decoding faster here."""
    sequences = "one sequence" if plan.num_slots == 1 else f"{plan.num_slots} sequences together"
    fits = f"{sequences} {'would need' if plan.total > plan.available else 'take'} {plan.total / GIB:.2f} GiB"
    here = [one for one in rounds if one.device == rounds[0].device]
    pays = "; ".join(_pays(batch, context, same) for (_, batch, context), same in _by_setting(here))
    return (
        f"{draft}: {fits}, {plan.available / GIB:.2f} are free; the largest batch that fits is {plan.largest_batch:,}. "
        f"By arithmetic it pays on this {here[0].device} above these acceptance lengths: {pays}."
    )


def _pays(batch: int, context: int, same: Sequence[PlannedRound]) -> str:
    """From where on the draft pays at a setting. A round gives its drafts and one token more at most."""
    possible = [one for one in same if one.pays_from < one.num_speculative_tokens + 1]
    least = min(possible, key=lambda one: one.pays_from, default=None)
    found = "none" if least is None else f"{least.pays_from:.2f} with K = {least.num_speculative_tokens}"
    return f"{found} at batch {batch}, context {context}"


def plan_table(draft: str, plan: MemoryPlan, rounds: Sequence[PlannedRound]) -> Table:
    """The memory of each batch, and from where on each K pays there, on this device and on others."""
    ks = sorted({one.num_speculative_tokens for one in rounds})
    table = named_table(
        "device", "batch", "context", "GiB", "plain, ms", *(f"K = {k}" for k in ks),
        title=f"{draft}: the acceptance length above which it pays, by arithmetic",
    )  # fmt: skip
    for (device, batch, context), same in _by_setting(rounds):
        found = {one.num_speculative_tokens: f"{one.pays_from:.2f}" for one in same}
        told = (device, str(batch), str(context), f"{plan.of(batch) / GIB:.2f}", f"{same[0].plain_ms:.3g}")
        table.add_row(*told, *(found[k] for k in ks))
    for column in table.columns[1:]:
        column.justify = "right"
    table.caption = (
        "GiB: with the longest context and the most draft tokens; plain: a round without the draft; one with K takes "
        "as many times as long as its column says; --json has each part"
    )
    return table


def _by_setting(rounds: Sequence[PlannedRound]) -> list[tuple[tuple[str, int, int], list[PlannedRound]]]:
    """Rounds that differ by K alone, together."""
    found: dict[tuple[str, int, int], list[PlannedRound]] = {}
    for one in rounds:
        found.setdefault((one.device, one.batch, one.context), []).append(one)
    return list(found.items())


# The columns of a metric that is a record: what comes after its name, and where in the record the value lies.
COLUMN_PARTS: dict[type, dict[str, str]] = {
    Interval: {"": ".mean", "_low": ".low", "_high": ".high"},
    Times: {"_mean": ".mean", "_p50": ".p50", "_p99": ".p99"},
}
PROVENANCE = ("date", "hardware", "device", "dtype", "draftkit", "torch", "transformers")
# Text that begins so is a formula to spreadsheets; after an apostrophe it is text.
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def cells_csv(result: Result) -> str:
    """A header and one row for each cell of a result.

    A value that the cell lacks, or that is NaN or infinite, is empty. Text that a spreadsheet would run begins with an
    apostrophe. Numbers for each position stand in one column, separated by spaces. Target, draft and prompts have names
    instead of paths.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    places = columns()
    writer.writerow([*places, *PROVENANCE])
    provenance = [_csv_value(result.provenance.get(name)) for name in PROVENANCE]
    names = names_of_paths([[cell.target, cell.draft, cell.dataset] for cell in result.cells])
    for cell in result.cells:
        found = [_csv_value(value_at(cell, path)) for path in places.values()]
        writer.writerow([names.get(str(value), value) for value in found] + provenance)
    return text.getvalue()


def columns() -> dict[str, str]:
    """The columns of the CSV: for each, where its value lies in a cell."""
    return {
        metric.name + ending: metric.path + part
        for metric in metrics_of("csv", ())
        for ending, part in COLUMN_PARTS.get(kind_at(metric.path), {"": ""}).items()
    }


def _csv_value(value: object) -> object:
    """What the writer turns into text: nothing for what is no number, a list as its items with spaces between, truth
    values as in JSON, and no text that a spreadsheet would run."""
    match value:
        case list() | tuple():
            return " ".join("" if item is None else str(item) for item in map(_csv_value, value))
        case bool():
            return str(value).lower()
        case float() if not math.isfinite(value):
            return None
        case str() if value.startswith(FORMULA):
            return f"'{value}"
        case _:
            return value
