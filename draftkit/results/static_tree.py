"""The static tree that would accept most, of how often a draft's first, second, third … choice at each depth is right.

A node stands where its own rank is right and its parent stands; that what happens at one depth says nothing about the
next is assumed. Then the expected length is 1 and the sum over nodes of the products of their rates, and the best tree
of N nodes are the N likeliest paths, for no path is likelier than one that it goes through. With the same rates at each
depth that is what Sequoia's dynamic programme finds (arXiv 2402.12374). No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from math import prod

Path_ = tuple[int, ...]
Rates = Sequence[Sequence[float]]  # by depth, of each rank: how often the target's token had it, of all rounds


def rank_rates(rounds: Sequence[Sequence[int | None]], ranks: int) -> list[list[float]]:
    """The rates of the first `ranks` ranks at each depth, of rounds that tell the rank of the target's token at each
    depth; None where it was beyond them. Of no rounds all are 0, at one depth."""
    counts = [Counter(column) for column in zip(*rounds, strict=True)] or [Counter()]
    return [_falling([counted[rank] / max(len(rounds), 1) for rank in range(ranks)]) for counted in counts]


def bracket(rounds: Sequence[Sequence[int | None]], k: int, nodes: int) -> tuple[float, float]:
    """The acceptance length of trees of so many nodes, from below and from above, by what a chain of K drafts alone
    tells: the ranks of the target's tokens up to the first that was not the draft's first choice.

    From below: the tree whose siblings are leaves, which adds a token where the first choice failed and one of the
    others was right; a tree that goes on below these accepts more. From above: the best static tree, were the ranks
    below a sibling those below a first choice, which they are not: where the first choice failed, the next is harder.
    """
    stood = [next((depth for depth, rank in enumerate(ranks) if rank != 0), len(ranks)) for ranks in rounds]
    width, most, total = max(nodes // k, 1), min(nodes, k), 0
    for ranks, depth in zip(rounds, stood, strict=True):
        failed = ranks[depth] if depth < len(ranks) else None
        total += min(depth, most) + (depth < most and failed is not None and failed < width)
    rates: list[list[float]] = []
    for depth in range(k):
        reached = [ranks[depth] for ranks, at in zip(rounds, stood, strict=True) if depth <= at and depth < len(ranks)]
        rates += rank_rates([(rank,) for rank in reached], nodes)
    return 1 + total / max(len(rounds), 1), expected_length(rates, best_choices(rates, nodes))


def _falling(rates: Sequence[float]) -> list[float]:
    """Rates that fall with the rank, as a draft orders its tokens: where chance has them rise, their mean."""
    runs: list[tuple[float, int]] = []  # sums, and of how many
    for rate in rates:
        runs.append((rate, 1))
        while len(runs) > 1 and runs[-2][0] * runs[-1][1] < runs[-1][0] * runs[-2][1]:
            (total, number), (more, others) = runs[-2:]
            runs[-2:] = [(total + more, number + others)]
    return [total / number for total, number in runs for _ in range(number)]


def best_choices(rates: Rates, nodes: int) -> tuple[Path_, ...]:
    """The paths of the best tree, by length and then in order, as Medusa's lists have them. Of equally likely paths the
    shorter one, then that of the lower ranks."""
    order = [sorted(range(len(level)), key=lambda rank: (-level[rank], rank)) for level in rates]
    found: list[Path_] = []
    waiting: list[tuple[float, int, Path_, int]] = []  # with the place of its last rank in that depth's order

    def offer(parent: Path_, place: int) -> None:
        depth = len(parent)
        if depth < len(rates) and place < len(order[depth]):
            path = (*parent, order[depth][place])
            heappush(waiting, (-chance(rates, path), depth, path, place))

    offer((), 0)
    while waiting and len(found) < nodes:
        *_, path, place = heappop(waiting)
        found.append(path)
        offer(path[:-1], place + 1)
        offer(path, 0)
    return tuple(sorted(found, key=lambda path: (len(path), path)))


def chance(rates: Rates, path: Path_) -> float:
    """How often a path stands."""
    return prod(rates[depth][rank] for depth, rank in enumerate(path))


def expected_length(rates: Rates, choices: Iterable[Path_]) -> float:
    """The acceptance length that the rates give a tree."""
    return 1 + sum(chance(rates, path) for path in choices)
