"""Measurements as terminal tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from draftkit.report.certificate import certificate
from draftkit.report.engines import engines_table
from draftkit.report.format import latencies, length, mean, number, speed
from draftkit.report.memory_cost import cost_of
from draftkit.results.record import Cell, Predicted, Result, SpeedModel

if TYPE_CHECKING:
    from draftkit.evaluate.certificate.result import Certificate
    from draftkit.runtime.memory_plan import MemoryPlan

GIB = 1 << 30

CAPTION = (
    "acceptance length = 1 + accepted draft tokens / rounds, [95 % interval over prompts]; expected: from the "
    "probabilities of the same forwards; at each position: accepted / rounds; times are medians"
)
# What a sweep varies: in the title where all cells have the same, else a column.
VARIED: dict[str, Callable[[Cell], float]] = {
    "K": lambda cell: cell.num_speculative_tokens,
    "T": lambda cell: cell.temperature,
    "concurrency": lambda cell: cell.concurrency,
}


def show_evaluation(console: Console, result: Result, certificates: Sequence[Certificate] = ()) -> None:
    """A measurement: the cells, acceptance by category, advice, predictions, certificates and warnings."""
    console.print(evaluation_table(result))
    ids = result.provenance.get("first_prompt_ids")
    if isinstance(ids, list) and ids:
        console.print(f"the first prompt begins with the ids {' '.join(map(str, ids[:8]))}")
    if len(result.cells) > 1 or len(result.cells[0].by_category) > 1:
        console.print(category_table(result.cells))
    if any(cell.engine == "vllm" for cell in result.cells):
        console.print(engines_table(result.cells))
    for model in result.speed_models:
        show_speed_model(console, model)
    for cell in result.cells:
        if cell.predicted:
            console.print(prediction_table(cell.draft, cell.predicted))
    for certified in certificates:
        console.print(certificate(certified))
    for warning in result.warnings:
        console.print(f"warning: {warning.message} [{warning.name}]")


def evaluation_table(result: Result) -> Table:
    """One row per cell of a measurement."""
    cells, provenance = result.cells, result.provenance
    first = cells[0]
    varied = {name for name, values in VARIED.items() if len(set(map(values, cells))) > 1} | {"K"}
    fixed = [f"{name}={value(first):g}" for name, value in VARIED.items() if name not in varied]
    title = [first.target, *fixed, f"up to {first.max_new_tokens} tokens"]
    table = Table(title=" · ".join([*title, f"{provenance['dtype']} on {provenance['device']}"]), caption=CAPTION)
    table.add_column("draft")
    for name in (*(name for name in VARIED if name in varied), "prompts", "acceptance length", "expected"):
        table.add_column(name, justify="right")
    table.add_column("accepted at 1…K")
    for name in ("tokens/s", "plain", "TTFT / TPOT / ITL ms"):
        table.add_column(name, justify="right")
    table.add_column("output")
    for cell in cells:
        engine = "" if cell.engine == "draftkit" else f" in {cell.engine}"
        table.add_row(
            f"{cell.draft} ({cell.method}){engine}",
            *(f"{value(cell):g}" for name, value in VARIED.items() if name in varied),
            str(cell.num_prompts),
            length(cell.acceptance_length),
            mean(cell.expected_acceptance_length),
            " ".join(f"{rate:.2f}" for rate in cell.accepted_at),
            speed(cell),
            number(cell.baseline_tokens_per_second, ".1f"),
            latencies(cell),
            _equality(cell),
        )
    return table


def category_table(cells: Sequence[Cell]) -> Table:
    """Acceptance length by category, a column for each draft at its most draft tokens."""
    widest = {cell.draft: cell for cell in sorted(cells, key=lambda cell: cell.num_speculative_tokens)}
    headings = [f"{draft}, K={cell.num_speculative_tokens}" for draft, cell in widest.items()]
    table = Table("category", *headings, title="acceptance length by category, and as other tools count it")
    first = next(iter(widest.values()))
    for category in first.by_category:
        table.add_row(category, *(length(cell.by_category.get(category)) for cell in widest.values()))
    table.add_section()
    for convention in first.acceptance_length_by_convention:
        lengths = (cell.acceptance_length_by_convention.get(convention) for cell in widest.values())
        table.add_row(convention, *map(number, lengths))
    return table


def show_speed_model(console: Console, model: SpeedModel) -> None:
    """Which K is fastest at which batch size, what it would bring, and how far such predictions were off."""
    batches = sorted({p.concurrency for p in model.predicted})
    ks = sorted({p.num_speculative_tokens for p in model.predicted})
    speeds = {(p.concurrency, p.num_speculative_tokens): p for p in model.predicted}
    rounds = {(r.concurrency, r.num_speculative_tokens): r.ms for r in model.rounds_ms}
    table = Table(
        "batch",
        "plain step ms",
        *(f"K={k}" for k in ks),
        title=f"{model.draft}: predicted speed-up (and with all drafts accepted)",
    )
    for batch in batches:
        cells = (f"{number(speeds[batch, k].speedup)} ({number(speeds[batch, k].ideal_speedup)})" for k in ks)
        table.add_row(str(batch), number(rounds[batch, 0]), *cells)
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


def _advice(model: SpeedModel) -> str:
    if model.best_k == 0:
        return f"{model.draft}: no K is faster than plain decoding on this machine"
    if model.stop_above is not None:
        until = f"stop drafting above batch {model.stop_above}"
    else:
        until = f"drafting pays at every batch up to {model.largest_batch}, the largest that was timed"
    return f"{model.draft}: K={model.best_k} at the smallest batch; {until}"


def prediction_table(draft: str, predicted: Sequence[Predicted]) -> Table:
    """Predicted acceptance length by temperature, way of drafting and K."""
    ks = sorted({p.num_speculative_tokens for p in predicted})
    table = Table(
        "T",
        "drafts",
        *(f"K={k}" for k in ks),
        title=f"{draft}: acceptance length, predicted from the run at T=0 (* beyond the K it drafted)",
        caption="for text like this run's; where text drawn at T is harder to foresee, less is accepted",
    )
    values = {(p.temperature, p.draft_sampling, p.num_speculative_tokens): p for p in predicted}
    for temperature, mode in sorted({(p.temperature, p.draft_sampling) for p in predicted}):
        found = (values[temperature, mode, k] for k in ks)
        lengths = (number(p.acceptance_length) + ("*" if p.extrapolated else "") for p in found)
        table.add_row(f"{temperature:g}", mode, *lengths)
    return table


def _equality(cell: Cell) -> str:
    if cell.num_matching_prompts is None:
        return f"{cell.verification}, drafts {cell.draft_sampling}"
    plain = "greedy" if cell.matches_greedy is not None else "plain"
    if cell.num_matching_prompts == cell.num_prompts:
        return f"= {plain}"
    ties = ", the others at near-ties" if cell.near_ties else ""
    return f"{cell.num_matching_prompts} of {cell.num_prompts} = {plain}{ties}"


def memory_table(draft: str, plan: MemoryPlan, k: int) -> Table:
    """What a run of `k` draft tokens a round takes of memory, part by part, and what the draft costs in batch size."""
    table = Table("memory", "GiB", title=f"{draft}: {plan.num_slots} sequences together", title_justify="left")
    table.columns[1].justify = "right"
    for name, size in plan.fixed.items():
        table.add_row(name, f"{size / GIB:.3f}")
    for name, size in plan.per_slot.items():
        table.add_row(name, f"{size * plan.num_slots / GIB:.3f}")
    table.add_section()
    table.add_row("all", f"{plan.total / GIB:.3f}")
    table.add_row("free", f"{plan.available / GIB:.3f}")
    table.add_row("largest batch that fits", str(plan.largest_batch))
    cost = cost_of(plan, draft, k)
    table.add_row("without the draft", str(cost.plain_batch))
    table.add_row("KV of a token, target + draft, KiB", _kilobytes(cost.target_kv, cost.draft_kv, plan.capacity))
    table.add_row("KV of a sequence, target + draft, KiB", _kilobytes(cost.target_kv, cost.draft_kv, 1))
    return table


def _kilobytes(target: int, draft: int, parts: int) -> str:
    return f"{target / parts / 1024:,.1f} + {draft / parts / 1024:,.1f}"
