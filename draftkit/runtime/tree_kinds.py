"""Kinds of draft trees, as `--tree` names them, and the shape that each comes to.

There is one counting: nodes never count the root, which is the newest token, and the depth is that of the deepest node.
A further kind is one more function here. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from draftkit.engines.trees import DynamicTree
from draftkit.errors import SettingError

MOST_NODES = 63  # with the root, the rows that the attention kernel takes of a sequence
MOST_DEPTH = 16  # the most tokens that draftkit's runtime drafts one after another
BLOCK_DEPTH = 7  # of best-first trees where none is asked for: the drafts of a block of eight


@dataclass(frozen=True)
class Beam:
    """Level by level, each node of a frontier has its likeliest tokens scored, `children` of them, and the best `width`
    of all these are the next frontier; of all that were scored, the best `nodes` are the tree.

    The score of a node is the probability of its path, as a sum of logarithms.
    """

    width: int
    children: int
    depth: int
    nodes: int

    @property
    def scored(self) -> int:
        """How many nodes are scored, at most."""
        total, width = 0, 1
        for _ in range(self.depth):
            total += width * self.children
            width = min(self.width, width * self.children)
        return total

    @property
    def drafted_rows(self) -> int:
        """How many rows a draft runs that reads its own tokens: all frontiers but the last."""
        total, width = 0, 1
        for _ in range(self.depth - 1):
            width = min(self.width, width * self.children)
            total += width
        return total


@dataclass(frozen=True)
class DraftTree:
    """A tree that is drafted each round. `name`: as `--tree` takes it, with what was left to defaults; `note`: the same
    in the counting of the program that the kind comes from, where that differs."""

    kind: str
    name: str
    shape: Beam
    note: str = field(default="", compare=False)

    @property
    def depth(self) -> int:
        return self.shape.depth

    @property
    def nodes(self) -> int:
        return self.shape.nodes

    @property
    def dynamic(self) -> DynamicTree | None:
        """The tree as servers draft it; None for those that none drafts."""
        return DynamicTree(self.shape.width, self.depth, self.nodes) if self.kind == "eagle" else None

    @property
    def span(self) -> int:
        """Cache entries beyond the newest token that a round takes, at most, of the target's or of the draft's."""
        return max(self.nodes, self.shape.drafted_rows + 1, self.depth)


def read_tree(text: str) -> DraftTree:
    """The tree that `--tree` names, as `eagle:topk=10,depth=6,nodes=60`. Raises `SettingError`."""
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise SettingError(f"tree is {text}", "tree", expected="; ".join(EXAMPLES))
    return KINDS[kind](rest)


def eagle(text: str) -> DraftTree:
    """EAGLE-2's dynamic tree, of EAGLE-2, EAGLE-3 and HASS (arXiv 2406.16858)."""
    k, depth, nodes = _numbers("eagle", text, topk=10, depth=8, nodes=59)
    note = f"EAGLE's top_k={k}, depth={depth - 1}, total_token={nodes + 1}"
    return _checked("eagle", f"topk={k},depth={depth},nodes={nodes}", Beam(k, k, depth, nodes), note)


def best(text: str) -> DraftTree:
    """The likeliest paths of all, best first (DDTree, OPT-Tree): a beam as wide as the tree finds them."""
    nodes, depth = _numbers("best", text, nodes=32, depth=None)
    assert nodes is not None
    depth = min(nodes, BLOCK_DEPTH) if depth is None else depth
    return _checked("best", f"nodes={nodes},depth={depth}", Beam(nodes, nodes, depth, nodes))


def suffix(text: str) -> DraftTree:
    """What followed the text's end earlier, `width` ways on at each step, the most frequent paths of all."""
    nodes, width, depth = _numbers("suffix", text, nodes=16, width=4, depth=8)
    return _checked("suffix", f"nodes={nodes},width={width},depth={depth}", Beam(width, width, depth, nodes))


KINDS: Mapping[str, Callable[[str], DraftTree]] = {kind.__name__: kind for kind in (eagle, best, suffix)}
EXAMPLES = ("eagle:topk=10,depth=6,nodes=60", "best:nodes=32", "suffix:nodes=16,width=4")


def _numbers(kind: str, text: str, **defaults: int | None) -> list[int]:
    """`topk=4,nodes=8` → the numbers in the order of `defaults`, which stand for those that are left out."""
    given: dict[str, int | None] = {}
    for part in text.split(",") if text else ():
        name, _, value = part.partition("=")
        if name not in defaults or name in given or not (value.isascii() and value.isdigit()) or int(value) < 1:
            names = ", ".join(f"{one}=N" for one in defaults)
            raise SettingError(f"tree is {kind}:{text}", "tree", expected=f"{kind}: with {names}, each 1 or more")
        given[name] = int(value)
    return [given.get(name, default) for name, default in defaults.items()]  # type: ignore[misc]


def _checked(kind: str, numbers: str, shape: Beam, note: str = "") -> DraftTree:
    """The tree, if it can be drafted and verified. Raises `SettingError`."""
    name = f"{kind}:{numbers}"
    limits = {
        "nodes": (shape.nodes, MOST_NODES),
        "levels": (shape.depth, MOST_DEPTH),
        "children a node": (shape.children, MOST_NODES),
    }
    for what, (number, most) in limits.items():
        if not 1 <= number <= most:
            raise SettingError(f"the tree {name} has {number} {what}", "tree", expected=f"1 to {most}")
    if shape.nodes > shape.scored:
        raise SettingError(
            f"the tree {name} has {shape.nodes} nodes, and drafting it finds {shape.scored}",
            "tree",
            hint=f"ask for {shape.scored} nodes at most, for more children of a node or more levels",
        )
    return DraftTree(kind, name, shape, note)
