"""What trees would bring, told without the target scoring one: what a run with each would accept, walked along the
target's own text (`tree_walk.py`), and by the times of its rounds its speed at each batch.

Anchors of a chain's run are others than a tree's, and make trees look better than they are: each tree is walked by its
own. Beside the tree that is usual for a draft stands the best static one for the ranks that the target's tokens have
among the draft's, and the nearest that SGLang drafts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from torch import Tensor

from draftkit.evaluate.measure import Conversations
from draftkit.evaluate.speed import ROUNDS, Delegating, round_time
from draftkit.evaluate.tree_walk import Text, own_texts, rank_paths, simulate_trees
from draftkit.requests import DraftSampling
from draftkit.results.cell import Cell, ForecastTree, MeasuredTree, StaticTree, TreeSpeed
from draftkit.results.settings import Settings
from draftkit.results.static_tree import best_choices, expected_length, rank_rates
from draftkit.runtime.drafters.protocol import Committed, Drafter, Grow
from draftkit.runtime.tree_kinds import (
    BLOCK_DEPTH,
    MOST_DEPTH,
    MOST_NODES,
    Beam,
    Choices,
    DraftTree,
    read_tree,
)
from draftkit.targets.target import Target

WIDTH = 10  # children of a node, and nodes of a frontier, of drafts that read their own tokens
Stood = Mapping[DraftTree, Sequence[Sequence[int]]]  # of each tree, the nodes that stand in each round of each text


def usual_tree(drafter: Drafter, nodes: int, depth: int) -> DraftTree:
    """The tree of so many nodes that is drafted with a draft of its kind: dynamic where it reads its own tokens, else
    the likeliest paths; of at least `depth` levels where it drafts as many."""
    kind = getattr(drafter, "usual_tree", "best")
    depth = min(_levels(drafter, depth), nodes)
    width = {"eagle": f",topk={min(WIDTH, nodes)}", "suffix": ",width=4"}.get(kind, "")
    return read_tree(f"{kind}:nodes={nodes},depth={depth}{width}")


def _levels(drafter: Drafter, depth: int) -> int:
    """The levels of a tree where nodes do not limit it."""
    return min(max(depth, BLOCK_DEPTH), drafter.max_tokens or MOST_DEPTH)


def nearest_in_sglang(static: Choices) -> DraftTree:
    """SGLang's tree with as many levels and nodes, and for each node as many children as the one with the most has, or
    more where these are too few for the nodes."""
    width = max(Counter(path[:-1] for path in static.paths).values())
    while Beam(width, width, static.depth, static.nodes).scored < static.nodes:
        width += 1
    return read_tree(f"sglang:steps={static.depth},topk={width},tokens={static.nodes + 1}")


def with_own_keys(tree: DraftTree) -> DraftTree:
    """The tree of a draft that sees the keys of ancestors, where `tree` has it see those of lanes."""
    assert isinstance(tree.shape, Beam)
    return replace(tree, name=f"{tree.name}, of ancestors", shape=replace(tree.shape, lanes=False))


def cost_of_lanes(target: Target, drafter: Drafter, conversations: Conversations, tree: DraftTree) -> float:
    """The acceptance length of a tree of SGLang's, were its draft to see the keys of ancestors."""
    true = with_own_keys(tree)
    return _length(simulate_trees(target, drafter, own_texts(target, conversations, tree.depth + 1), [true]), true)


def forecast_trees(
    target: Target,
    drafter: Drafter,
    conversations: Conversations,
    cell: Cell,
    nodes: Sequence[int],
    batches: Sequence[int],
    *,
    in_sglang: bool = False,
) -> list[ForecastTree]:
    """What trees of so many nodes would bring at each batch, against the chain of a cell and plain decoding.

    `in_sglang`: SGLang drafts trees with the draft. Raises `SettingError` for more nodes than are drafted.
    """
    depth = cell.num_speculative_tokens
    trees = [usual_tree(drafter, number, depth) for number in nodes]
    texts = own_texts(target, conversations, _levels(drafter, depth) + 1)
    statics = _statics(target, drafter, texts, _levels(drafter, depth), nodes, in_sglang=in_sglang)
    stood = simulate_trees(target, drafter, texts, [*trees, *(tree for static in statics for tree in static.trees)])
    times = _Times.of(target, drafter, conversations, trees, batches)
    found = []
    for tree, static in zip(trees, statics, strict=True):
        length = _length(stood, tree)
        speeds = tuple(times.speeds(tree, length, _chain_length(cell)))
        paying = [s.concurrency for s in takewhile(lambda s: min(s.over_plain, s.over_chain) > 1, speeds)]
        measured = MeasuredTree.of(tree)
        assert measured is not None
        found.append(ForecastTree(measured, length, speeds, max(paying, default=None), static.told(stood)))
    return found


@dataclass(frozen=True)
class _Static:
    """A static tree with the length that rates of ranks give it, and the nearest of SGLang's, where that drafts any."""

    shape: Choices
    expected: float
    nearest: DraftTree | None

    @property
    def listed(self) -> DraftTree:
        return DraftTree("choices", f"choices:{self.shape.nodes} nodes", self.shape)

    @property
    def trees(self) -> list[DraftTree]:
        """All that are to be walked."""
        return [self.listed, *(() if self.nearest is None else (self.nearest, with_own_keys(self.nearest)))]

    def told(self, stood: Stood) -> StaticTree:
        """What a result says of it."""
        static = StaticTree(self.shape.paths, _length(stood, self.listed), self.expected)
        if self.nearest is None:
            return static
        return replace(
            static, sglang=MeasuredTree.of(self.nearest), sglang_length=_length(stood, self.nearest),
            sglang_length_with_own_keys=_length(stood, with_own_keys(self.nearest)),
        )  # fmt: skip


def _statics(
    target: Target, drafter: Drafter, texts: Sequence[Text], levels: int, nodes: Sequence[int], *, in_sglang: bool
) -> list[_Static]:
    """The best static tree of each number of nodes, by the ranks of the texts' own tokens in a chain's rounds."""
    rates = rank_rates(rank_paths(target, drafter, texts, levels), MOST_NODES)
    shapes = [Choices(best_choices(rates, number)) for number in nodes]
    return [
        _Static(shape, expected_length(rates, shape.paths), nearest_in_sglang(shape) if in_sglang else None)
        for shape in shapes
    ]


def _length(stood: Stood, tree: DraftTree) -> float:
    """The acceptance length of rounds that were walked."""
    rounds = [accepted for text in stood[tree] for accepted in text]
    return 1 + sum(rounds) / max(len(rounds), 1)


def _chain_length(cell: Cell) -> float:
    return 1.0 if cell.acceptance_length is None else cell.acceptance_length.mean


@dataclass(frozen=True)
class _Times:
    """Milliseconds by batch: of a plain round, of one of the chain, of one of each tree, and of this without what the
    draft takes of it."""

    plain: Mapping[int, float]
    chain: Mapping[int, float]
    trees: Mapping[DraftTree, Mapping[int, float]]
    verified: Mapping[DraftTree, Mapping[int, float]]

    @classmethod
    def of(
        cls,
        target: Target,
        drafter: Drafter,
        conversations: Conversations,
        trees: Sequence[DraftTree],
        batches: Sequence[int],
    ) -> _Times:
        settings, first = conversations.settings, conversations.first_requests
        new = (ROUNDS + 1) * (max(tree.depth for tree in trees) + 1)

        def timed(target: Target, drafter: Drafter | None, settings: Settings) -> dict[int, float]:
            return {
                batch: round_time(
                    target, drafter,
                    [
                        replace(first[i % len(first)], id=str(i), max_new_tokens=new, ignore_eos=True)
                        for i in range(batch)
                    ],
                    settings,
                )
                for batch in batches
            }  # fmt: skip

        return cls(
            timed(Target(target.model), None, settings),
            timed(target, drafter, settings),
            {tree: timed(target, drafter, _drafting(settings, tree)) for tree in trees},
            {tree: timed(target, _Undrafted(drafter), _drafting(settings, tree)) for tree in trees},
        )

    def speeds(self, tree: DraftTree, length: float, of_chain: float) -> Iterator[TreeSpeed]:
        """What a tree of an acceptance length brings at each batch, against a chain of another."""
        for batch, ms in self.trees[tree].items():
            verified = min(self.verified[tree][batch], ms)
            over_plain, over_chain = length * self.plain[batch] / ms, length / of_chain * self.chain[batch] / ms
            yield TreeSpeed(batch, over_plain, over_chain, ms, verified)


class _Undrafted(Delegating):
    """A drafter of trees of any tokens, which takes no time for it."""

    def expand(self, committed: Committed, depth: int, grow: Grow) -> None:
        tokens = committed.slots.new_zeros(len(committed.slots), 1, MOST_NODES) + _ranks(committed.slots)
        for _ in range(depth):
            grow.children(-tokens.float(), tokens)


def _ranks(like: Tensor) -> Tensor:
    return like.new_ones(MOST_NODES).cumsum(0) - 1


def _drafting(settings: Settings, tree: DraftTree) -> Settings:
    """The settings with a tree, without what goes with chains alone."""
    return replace(
        settings, tree=tree.name, verification="coupled", draft_sampling=DraftSampling(),
        k_by_batch=None, disable_above_batch=None,
    )  # fmt: skip
