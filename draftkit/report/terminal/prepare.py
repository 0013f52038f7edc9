"""Transplants and vocabularies of drafts as terminal tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from draftkit.report.terminal.screen import named_table

if TYPE_CHECKING:
    from draftkit.data.vocabulary import Ceiling

MEANINGS = {
    "exact": "the same bytes, or special tokens of the same name: copied",
    "role": "special tokens for the same purpose: copied",
    "pieces": "several tokens of the donor, averaged",
    "average": "nothing corresponds: the average of the donor's rows, never the likeliest token",
    "unused": "rows without a token",
}


def show_transplant(console: Console, result: Mapping[str, Any]) -> None:
    """Print where the rows come from, by number and by their share of a text, and the special tokens matched by
    role."""
    coverage = result["coverage"]
    table = named_table("rows", "from", "number", *(["of the text"] if coverage else []))
    for kind, count in result["rows"].items():
        part = [f"{coverage['counts'][kind] / max(coverage['tokens'], 1):.2%}"] if coverage else []
        table.add_row(kind, MEANINGS[kind], f"{count:,}", *part)
    console.print(table)
    if coverage and coverage["examples"]:
        commonest = ", ".join(f"{text!r} {count:,}×" for text, count in coverage["examples"])
        console.print(f"commonest tokens that are no copies: {commonest}")
    for pair in result["roles"]:
        console.print(f"{pair['target']} ← {pair['donor']}")
    if beyond := result["tokens_without_a_row"]:
        console.print(f"{len(beyond):,} tokens have no row in the target, and none here: {', '.join(beyond[:5])}")


def vocabulary_table(ceilings: Sequence[Ceiling], k: int) -> Table:
    """A table of what draft vocabularies of several sizes allow."""
    table = named_table("draft vocabulary", "of the tokens in the loss mask", f"acceptance length at most, K={k}")
    for column in table.columns:
        column.justify = "right"
    for ceiling in ceilings:
        table.add_row(f"{ceiling.size:,}", f"{100 * ceiling.coverage:.2f} %", f"{ceiling.acceptance_length:.2f}")
    return table


def show_pruning(console: Console, result: Mapping[str, Any]) -> None:
    """Print what each size allows and saves, the tokens that are always kept, and what to know before serving."""
    table = named_table(
        "draft vocabulary",
        "of the tokens",
        f"acceptance length at most, K={result['num_speculative_tokens']}",
        "head, read each step",
        "saved",
        caption=f"of a draft without mistakes, on the {result['documents']:,} samples that tokens were counted in",
    )
    for column in table.columns:
        column.justify = "right"
    for row in result["sizes"]:
        table.add_row(
            f"{row['size']:,}",
            f"{row['coverage']:.2%}",
            f"{row['acceptance_length']:.2f}",
            _size(row["head_bytes"]),
            _size(row["saved_bytes"]) if row["saved_bytes"] else "",
            style="bold" if row["size"] == result["size"] else None,
        )
    console.print(table)
    console.print("kept: " + ", ".join(f"{token['token']} ({token['why']})" for token in result["kept"]))
    if result["absent"]:
        named = ", ".join(f"{token['token']} ({token['why']})" for token in result["absent"])
        console.print(f"the draft has never proposed: {named}")
    if result["refused_by_vllm"]:
        console.print(f"vLLM will refuse the folder: {result['refused_by_vllm']}")


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count / 1e3:,.1f} kB"
