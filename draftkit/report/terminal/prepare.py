"""Transplants and candidates as terminal tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

MEANINGS = {
    "exact": "the same bytes, or special tokens of the same name: copied",
    "role": "special tokens for the same purpose: copied",
    "pieces": "several tokens of the donor, averaged",
    "average": "nothing corresponds: the average of the donor's rows, never the likeliest token",
    "unused": "rows without a token",
}


def show_transplant(console: Console, result: Mapping[str, Any]) -> None:
    """Where the rows come from, by number and by their part of a text, and the special tokens that go by role."""
    coverage = result["coverage"]
    table = Table("rows", "from", "number", *(["of the text"] if coverage else []))
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


def survey_table(result: Mapping[str, Any]) -> Table:
    """One row for each candidate."""
    table = Table(
        "model", "parameters", "tokenizer", "overlap", "cost", "K", "speed-up", "next",
        title=f"drafts for {result['target']} ({_count(result['parameters'])} parameters)",
        caption=f"speed-up AL / (1 + cost·K) at the best K, if {result['acceptance']:.0%} of the drafts are accepted: "
        "a bound for small batches; cost: weights read for a token over those of the target",
    )  # fmt: skip
    for column in (1, 3, 4, 5, 6):
        table.columns[column].justify = "right"
    for found in result["candidates"]:
        table.add_row(
            found["name"],
            _count(found["parameters"]),
            found["tokenizer"],
            f"{found['overlap']:.1%}",
            f"{found['cost']:.3f}",
            str(found["num_speculative_tokens"]),
            f"{found['speedup']:.2f}×",
            "eval" if found["tokenizer"] == "same" else "prepare transplant",
        )
    return table


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"
