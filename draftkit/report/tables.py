"""Measurements as terminal tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from draftkit.report.certificate import certificate
from draftkit.report.engines import engines_table
from draftkit.report.memory_cost import cost_of

if TYPE_CHECKING:
    from draftkit.runtime.memory import MemoryPlan

GIB = 1 << 30

CAPTION = (
    "acceptance length = 1 + accepted draft tokens / rounds, [95 % interval over prompts]; expected: from the "
    "probabilities of the same forwards; at each position: accepted / rounds; times are medians"
)
# What a sweep varies: in the title where all cells have the same, else a column.
VARIED = {"K": "num_speculative_tokens", "T": "temperature", "concurrency": "concurrency"}


def show_evaluation(console: Console, result: Mapping[str, Any]) -> None:
    """An `eval` result: the cells, acceptance by category, advice, predictions and warnings."""
    console.print(evaluation_table(result))
    ids = result["provenance"].get("first_prompt_ids")
    if ids:
        console.print(f"the first prompt begins with the ids {' '.join(map(str, ids[:8]))}")
    if len(result["cells"]) > 1 or len(next(iter(result["cells"]))["by_category"]) > 1:
        console.print(category_table(result))
    if any(cell.get("engine") == "vllm" for cell in result["cells"]):
        console.print(engines_table(result["cells"]))
    for model in result.get("speed_models", ()):
        show_speed_model(console, model)
    for cell in result["cells"]:
        if cell.get("predicted"):
            console.print(prediction_table(cell))
    for certified in result.get("certificates", ()):
        console.print(certificate(certified))
    for warning in result.get("warnings", ()):
        console.print(f"warning: {warning['message']} [{warning['name']}]")


def evaluation_table(result: Mapping[str, Any]) -> Table:
    """One row per cell of an `eval` result."""
    cells = result["cells"]
    first, provenance = cells[0], result["provenance"]
    varied = {name for name, key in VARIED.items() if len({cell[key] for cell in cells}) > 1} | {"K"}
    fixed = [f"{name}={first[key]:g}" for name, key in VARIED.items() if name not in varied]
    title = [first["target"], *fixed, f"up to {first['max_new_tokens']} tokens"]
    table = Table(title=" · ".join([*title, f"{provenance['dtype']} on {provenance['device']}"]), caption=CAPTION)
    table.add_column("draft")
    for name in (*(name for name in VARIED if name in varied), "prompts", "acceptance length", "expected"):
        table.add_column(name, justify="right")
    table.add_column("accepted at 1…K")
    for name in ("tokens/s", "plain", "TTFT / TPOT / ITL ms"):
        table.add_column(name, justify="right")
    table.add_column("output")
    for cell in cells:
        engine = "" if cell.get("engine", "draftkit") == "draftkit" else f" in {cell['engine']}"
        table.add_row(
            f"{cell['draft']} ({cell['method']}){engine}",
            *(f"{cell[key]:g}" for name, key in VARIED.items() if name in varied),
            str(cell["num_prompts"]),
            _interval(cell["acceptance_length"]),
            _number((cell["expected_acceptance_length"] or {}).get("mean")),
            " ".join(f"{n / max(cell['num_drafts'], 1):.2f}" for n in cell["num_accepted_tokens_per_pos"]),
            _speed(cell),
            _number(cell["baseline_tokens_per_second"], 1),
            " / ".join(_milliseconds(cell[name]) for name in ("ttft_ms", "tpot_ms", "itl_ms")),
            _equality(cell),
        )
    return table


def category_table(result: Mapping[str, Any]) -> Table:
    """Acceptance length by category, a column for each draft at its most draft tokens."""
    widest = {cell["draft"]: cell for cell in sorted(result["cells"], key=lambda c: c["num_speculative_tokens"])}
    headings = [f"{draft}, K={cell['num_speculative_tokens']}" for draft, cell in widest.items()]
    table = Table("category", *headings, title="acceptance length by category, and as other tools count it")
    for category in next(iter(widest.values()))["by_category"]:
        table.add_row(category, *(_interval(cell["by_category"].get(category)) for cell in widest.values()))
    table.add_section()
    for convention in next(iter(widest.values())).get("acceptance_length_by_convention", {}):
        lengths = (cell["acceptance_length_by_convention"].get(convention) for cell in widest.values())
        table.add_row(convention, *map(_number, lengths))
    return table


def show_speed_model(console: Console, model: Mapping[str, Any]) -> None:
    """Which K is fastest at which batch size, what it would bring, and how far such predictions were off."""
    batches = sorted({p["concurrency"] for p in model["predicted"]})
    ks = sorted({p["num_speculative_tokens"] for p in model["predicted"]})
    speeds = {(p["concurrency"], p["num_speculative_tokens"]): p for p in model["predicted"]}
    rounds = {(r["concurrency"], r["num_speculative_tokens"]): r["ms"] for r in model["rounds_ms"]}
    table = Table(
        "batch",
        "plain step ms",
        *(f"K={k}" for k in ks),
        title=f"{model['draft']}: predicted speed-up (and with all drafts accepted)",
    )
    for batch in batches:
        cells = (f"{speeds[batch, k]['speedup']:.2f} ({speeds[batch, k]['ideal_speedup']:.2f})" for k in ks)
        table.add_row(str(batch), f"{rounds[batch, 0]:.2f}", *cells)
    console.print(table)
    if model["mean_error"] is not None:
        errors = ", ".join(
            f"batch {m['concurrency']} K={m['num_speculative_tokens']}: {m['predicted']:.2f} against {m['speedup']:.2f}"
            for m in model["measured"]
        )
        console.print(f"predicted against measured: {errors}; off by {100 * model['mean_error']:.0f} % on average")
    console.print(_advice(model))
    schedule = str(model["schedule"]).replace(" ", "")
    console.print(f'vLLM: "num_speculative_tokens_per_batch_size": {schedule}', soft_wrap=True)


def _advice(model: Mapping[str, Any]) -> str:
    if model["best_k"] == 0:
        return f"{model['draft']}: no K is faster than plain decoding on this machine"
    if model["stop_above"] is not None:
        until = f"stop drafting above batch {model['stop_above']}"
    else:
        until = f"drafting pays at every batch up to {model['largest_batch']}, the largest that was timed"
    return f"{model['draft']}: K={model['best_k']} at the smallest batch; {until}"


def prediction_table(cell: Mapping[str, Any]) -> Table:
    """Predicted acceptance length by temperature, way of drafting and K."""
    predicted = cell["predicted"]
    ks = sorted({p["num_speculative_tokens"] for p in predicted})
    table = Table(
        "T",
        "drafts",
        *(f"K={k}" for k in ks),
        title=f"{cell['draft']}: acceptance length, predicted from the run at T=0 (* beyond the K it drafted)",
        caption="for text like this run's; where text drawn at T is harder to foresee, less is accepted",
    )
    rows = sorted({(p["temperature"], p["draft_sampling"]) for p in predicted})
    values = {(p["temperature"], p["draft_sampling"], p["num_speculative_tokens"]): p for p in predicted}
    for temperature, mode in rows:
        found = (values[temperature, mode, k] for k in ks)
        lengths = (f"{p['acceptance_length']:.2f}" + ("*" if p["extrapolated"] else "") for p in found)
        table.add_row(f"{temperature:g}", mode, *lengths)
    return table


def _interval(interval: Mapping[str, float | None] | None) -> str:
    if interval is None or interval["mean"] is None:
        return "–"
    mean, low, high = (_number(interval[name]) for name in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]" if low != "–" else mean


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _speed(cell: Mapping[str, Any]) -> str:
    plain = cell["baseline_tokens_per_second"]
    speed = _number(cell["tokens_per_second"], 1)
    return speed if not plain else f"{speed} ({cell['tokens_per_second'] / plain:.2f}×)"


def _milliseconds(times: Mapping[str, float] | None) -> str:
    return "–" if times is None else f"{times['p50']:.1f}"


def _equality(cell: Mapping[str, Any]) -> str:
    if cell["num_matching_prompts"] is None:
        return f"{cell['verification']}, drafts {cell['draft_sampling']}"
    plain = "greedy" if cell["matches_greedy"] is not None else "plain"
    if cell["num_matching_prompts"] == cell["num_prompts"]:
        return f"= {plain}"
    ties = ", the others at near-ties" if cell.get("near_ties") else ""
    return f"{cell['num_matching_prompts']} of {cell['num_prompts']} = {plain}{ties}"


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
