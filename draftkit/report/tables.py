"""Results as terminal tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from draftkit.convert.api import Conversion
from draftkit.convert.detect import all_formats
from draftkit.layout.config import refusal_by_vllm
from draftkit.layout.folder import Draft
from draftkit.layout.provenance import FactOrigin


def evaluation_table(result: Mapping[str, Any]) -> Table:
    """One row per cell of an `eval` result."""
    cells = result["cells"]
    first = cells[0]
    table = Table(
        title=f"{first['target']} · T={first['temperature']:g} · up to {first['max_new_tokens']} tokens · "
        f"concurrency {first['concurrency']} · {result['provenance']['dtype']} on {result['provenance']['device']}",
        caption="acceptance length = 1 + accepted draft tokens / rounds, [95 % interval over prompts]; "
        "at each position: accepted / rounds",
    )
    for name in ("draft", "K", "prompts", "acceptance length", "accepted at 1…K", "tokens/s", "plain", "output"):
        table.add_column(name, justify="left" if name in ("draft", "accepted at 1…K", "output") else "right")
    for cell in cells:
        table.add_row(
            f"{cell['draft']} ({cell['method']})",
            str(cell["num_speculative_tokens"]),
            str(cell["num_prompts"]),
            "{mean:.2f} [{low:.2f}, {high:.2f}]".format(**cell["acceptance_length"]),
            " ".join(f"{n / max(cell['num_drafts'], 1):.2f}" for n in cell["num_accepted_tokens_per_pos"]),
            f"{cell['tokens_per_second']:.1f} ({cell['tokens_per_second'] / cell['baseline_tokens_per_second']:.2f}×)",
            f"{cell['baseline_tokens_per_second']:.1f}",
            _equality(cell),
        )
    return table


def _equality(cell: Mapping[str, Any]) -> str:
    if cell["matches_greedy"]:
        return "= greedy"
    return f"{cell['num_matching_prompts']} of {cell['num_prompts']} = greedy"


def show_conversion(console: Console, conversion: Conversion) -> None:
    """A plan: the facts with their origins, the tensors with their moves, and what was dropped or is missing."""
    plan, source = conversion.plan, conversion.checkpoint.source
    method = plan.spec.method if plan.spec else "not known yet"
    console.print(f"{source.name}: format {plan.format}, method {method}")
    console.print(facts_table(plan.facts))
    tensors = Table("tensor", "dtype", "shape", "becomes", title=f"{len(plan.moves)} tensors")
    for move in plan.moves:
        becomes = move.destination if move.destination is not None else f"dropped: {move.reason}"
        tensors.add_row(move.source, move.dtype, _shape(move.shape), becomes)
    console.print(tensors)
    if plan.dropped_keys:
        dropped = Table("config key", "why it is not in the spec", title="dropped config keys")
        for key, reason in sorted(plan.dropped_keys.items()):
            dropped.add_row(key, reason)
        console.print(dropped)
    for fact, hint in plan.missing:
        console.print(f"missing: {fact} ({hint})")


def show_draft(console: Console, draft: Draft) -> None:
    """A unified draft: where it came from, its facts and tensors."""
    console.print(f"{draft.path}: unified draft, method {draft.spec.method}")
    console.print(f"converted from {draft.provenance.source} ({draft.provenance.format})")
    if reason := refusal_by_vllm(draft.spec):
        console.print(f"marked so that vLLM refuses it: {reason}")
    console.print(facts_table(draft.provenance.facts))
    tensors = Table("tensor", "dtype", "shape", title=f"{len(draft.tensors)} tensors")
    for handle in draft.tensors.values():
        tensors.add_row(handle.name, handle.dtype, _shape(handle.shape))
    console.print(tensors)


def facts_table(facts: Iterable[FactOrigin], title: str = "facts") -> Table:
    table = Table("fact", "value", "origin", "note", title=title)
    for fact in facts:
        table.add_row(fact.name, fact.value, fact.origin, fact.note)
    return table


def formats_table() -> Table:
    table = Table("format", "what it is", title="formats that convert reads")
    for format in all_formats():
        table.add_row(format.NAME, format.TITLE)
    return table


def _shape(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
