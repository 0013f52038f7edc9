"""Draft vocabularies as terminal tables: what each size allows a new draft, and a draft that is pruned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from draftkit.data.vocabulary import Ceiling


def vocabulary_table(ceilings: Sequence[Ceiling], k: int) -> Table:
    """What draft vocabularies of several sizes allow."""
    table = Table("draft vocabulary", "of the tokens in the loss mask", f"acceptance length at most, K={k}")
    for column in table.columns:
        column.justify = "right"
    for ceiling in ceilings:
        table.add_row(f"{ceiling.size:,}", f"{100 * ceiling.coverage:.2f} %", f"{ceiling.acceptance_length:.2f}")
    return table


def show_pruning(console: Console, result: Mapping[str, Any]) -> None:
    """What each size allows and saves, the tokens that are always kept, and what to know before serving."""
    table = Table(
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
