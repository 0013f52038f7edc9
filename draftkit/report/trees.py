"""What a forecast of trees comes to, in the words of every view."""

from __future__ import annotations

from draftkit.results.cell import Cell, ForecastTree, StaticTree
from draftkit.results.metrics import number


def tree_advice(cell: Cell) -> str:
    """Whether a tree would pay, which and up to which batch, against the chain of a cell; empty without a forecast."""
    trees = [tree for tree in cell.trees or () if tree.speeds]
    if not trees:
        return ""
    best = max(trees, key=lambda tree: (tree.pays_up_to is not None, tree.speeds[0].over_chain))
    speed = best.speeds[0]
    than = f"the chain of K = {cell.num_speculative_tokens} at batch {speed.concurrency}"
    if best.pays_up_to is None:
        plain = " and plain decoding" if speed.over_chain > 1 else ""
        return (
            f"No tree would be faster than the chain{plain}, at no batch that was timed: the best, {best.tree.name}, "
            f"would decode {speed.over_chain:.2f} × as fast as {than}."
        )
    return (
        f"The tree {best.tree.name} would decode {speed.over_chain:.2f} × as fast as {than}, "
        f"and would be the faster up to batch {best.pays_up_to}."
    )


def pays_up_to(tree: ForecastTree) -> str:
    """The batch up to which a tree pays."""
    return "never" if tree.pays_up_to is None else f"batch {tree.pays_up_to}"


def notation(static: StaticTree) -> str:
    """A static tree as a file of `--tree choices:FILE` has it, and Medusa's lists."""
    return str([list(path) for path in static.choices])


def shown_static(cell: Cell) -> StaticTree | None:
    """The static tree to print the list of: of as many nodes as the tree that would be the fastest at the smallest
    batch."""
    trees = [tree for tree in cell.trees or () if tree.static is not None]
    return max(trees, key=lambda tree: tree.speeds[0].over_chain).static if trees else None


def of_lanes(length: float | None, with_own_keys: float | None) -> str:
    """What it costs a tree that SGLang's draft reads the keys of its lane."""
    if length is None or with_own_keys is None:
        return "–"
    return number(length - with_own_keys, "+.2f")
