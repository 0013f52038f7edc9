"""Trees in the terminal: what they would bring, and what SGLang's would."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from draftkit.report.trees import notation, of_lanes, pays_up_to, shown_static, tree_advice
from draftkit.results.cell import Cell
from draftkit.results.metrics import number
from draftkit.results.record import Result

NO_SERVER = "no server takes a list; in a file, --tree choices:FILE does"


def show_trees(console: Console, result: Result, *, details: bool) -> None:
    """The trees that were drafted, and the forecasts of others; `details`: what their rounds take, and every list."""
    for name in dict.fromkeys(cell.tree.name for cell in result.cells if cell.tree is not None):
        console.print(_drafted([cell for cell in result.cells if cell.tree_name == name]))
    for cell in result.cells:
        if cell.trees:
            console.print(tree_advice(cell))
            console.print(forecast_table(cell))
            if details:
                console.print(times_table(cell))
            show_statics(console, cell, details=details)


def _drafted(cells: list[Cell]) -> str:
    """A tree in words, and what it costs that SGLang's draft reads the keys of its lane."""
    tree = cells[0].tree
    assert tree is not None
    said = f"tree {tree.name}: {tree.depth} levels" + (f"; {tree.note}" if tree.note else "")
    for cell in cells:
        if cell.length_with_own_keys is not None and cell.acceptance_length is not None:
            gone = of_lanes(cell.acceptance_length.mean, cell.length_with_own_keys)
            said += (
                f"; at T = {cell.temperature:g} its draft reads the keys of its lane, as SGLang's does: {gone} tokens "
                "a round against those of a node's ancestors"
            )
    return said


def forecast_table(cell: Cell) -> Table:
    """What trees would bring instead of the cell's chain."""
    trees = cell.trees or ()
    batches = [str(speed.concurrency) for speed in trees[0].speeds]
    table = Table(
        "tree", "length", *batches, "pays up to",
        title=f"trees instead of {cell.draft} at K = {cell.num_speculative_tokens}, T = {cell.temperature:g}",
        caption="told along the target's own text, not run; at each batch, how many times as fast as the chain",
        box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), title_justify="left", caption_justify="left",
    )  # fmt: skip
    for one in trees:
        speeds = (number(speed.over_chain) for speed in one.speeds)
        table.add_row(one.tree.name, number(one.acceptance_length), *speeds, pays_up_to(one))
    return table


def times_table(cell: Cell) -> Table:
    """What rounds with the trees take."""
    trees = cell.trees or ()
    table = Table(
        "nodes", *(f"batch {speed.concurrency}" for speed in trees[0].speeds),
        title="ms of a round with these trees, and of the target's verification in it",
        box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), title_justify="left",
    )  # fmt: skip
    for one in trees:
        times = (f"{number(speed.round_ms, '.1f')}, {number(speed.verification_ms, '.1f')}" for speed in one.speeds)
        table.add_row(str(one.tree.nodes), *times)
    return table


def show_statics(console: Console, cell: Cell, *, details: bool) -> None:
    """The best static trees, the nearest of SGLang's, and the list of one; with `details` those of all."""
    statics = [tree.static for tree in cell.trees or () if tree.static is not None]
    if not statics:
        return
    table = Table(
        "nodes", "length", "nearest in SGLang: steps, topk, tokens", "length", "by its lanes",
        title="the best static trees for the ranks of the target's tokens among the draft's", caption=NO_SERVER,
        box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), title_justify="left", caption_justify="left",
    )  # fmt: skip
    for static in statics:
        near = "drafts none with it" if static.sglang is None else _numbers(static.sglang.name)
        by_lanes = of_lanes(static.sglang_length, static.sglang_length_with_own_keys)
        of_near = number(static.sglang_length)
        table.add_row(str(len(static.choices)), number(static.acceptance_length), near, of_near, by_lanes)
    console.print(table)
    shown = shown_static(cell)
    for static in statics:
        if details or static is shown:
            console.print(f"that of {len(static.choices)} nodes: {notation(static)}", soft_wrap=True, highlight=False)


def _numbers(name: str) -> str:
    """`sglang:steps=5,topk=4,tokens=8` → `5, 4, 8`."""
    return ", ".join(part.partition("=")[2] for part in name.partition(":")[2].split(","))
