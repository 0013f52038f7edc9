"""A dynamic tree as engines are told of one, each in its own counting."""

from __future__ import annotations

from typing import NamedTuple


class DynamicTree(NamedTuple):
    """EAGLE-2's tree: the best `width` nodes of each of `depth` levels have their `width` likeliest children scored,
    and the best `nodes` of all are verified; the root is not counted."""

    width: int
    depth: int
    nodes: int
