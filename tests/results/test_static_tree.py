"""The best static tree against Sequoia's dynamic programme and against all trees, and its worked numbers."""

from __future__ import annotations

from functools import cache
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftkit.results.static_tree import best_choices, bracket, expected_length, rank_rates

RATES = (0.6, 0.2, 0.1)


def sequoia(rates: tuple[float, ...], rows: int, levels: int) -> float:
    """The expected length of the best tree of so many rows, the root among them, by Sequoia's recurrence."""

    @cache
    def best(rows: int, levels: int, children: int) -> float:
        """With at most so many children of the root."""
        if rows == 1 or not levels or not children:
            return 1.0
        found = [best(rows, levels, children - 1)]
        for own in range(1, rows):  # rows of the last child's subtree
            below = best(own, levels - 1, len(rates))
            found.append(best(rows - own, levels, children - 1) + rates[children - 1] * below)
        return max(found)

    return best(rows, levels, len(rates))


@pytest.mark.parametrize(
    ("levels", "lengths"),
    [(9, (1, 1.6, 1.96, 2.176, 2.376, 2.5056, 2.6256, 2.7456, 2.8456, 2.9234)), (1, (1, 1.6, 1.8, 1.9))],
)
def test_the_worked_numbers(levels: int, lengths: tuple[float, ...]) -> None:
    for rows, length in enumerate(lengths, start=1):
        found = best_choices([RATES] * levels, rows - 1)
        assert expected_length([RATES] * levels, found) == pytest.approx(length, abs=1e-4)
        assert sequoia(RATES, rows, levels) == pytest.approx(length, abs=1e-4)


@given(
    st.lists(st.floats(0.0, 0.5), min_size=1, max_size=4).map(lambda rates: tuple(sorted(rates, reverse=True))),
    st.integers(1, 12), st.integers(1, 5),
)  # fmt: skip
def test_it_is_what_the_dynamic_programme_finds(rates: tuple[float, ...], nodes: int, levels: int) -> None:
    found = best_choices([rates] * levels, nodes)
    assert {path[:-1] for path in found} <= {(), *found}, "every prefix is there"
    assert list(found) == sorted(set(found), key=lambda path: (len(path), path))
    assert expected_length([rates] * levels, found) == pytest.approx(sequoia(rates, len(found) + 1, levels))


@given(st.lists(st.lists(st.floats(0.0, 0.5), min_size=2, max_size=2), min_size=2, max_size=2), st.integers(1, 4))
def test_with_rates_of_each_depth_no_tree_is_better(rates: list[list[float]], nodes: int) -> None:
    """Ranks may be better than those before them."""
    paths = [path for depth in (1, 2) for path in product(range(2), repeat=depth)]
    trees = (tree for tree in combinations(paths, nodes) if all(len(p) == 1 or p[:-1] in tree for p in tree))
    best = max(expected_length(rates, tree) for tree in trees)
    assert expected_length(rates, best_choices(rates, nodes)) == pytest.approx(best)


def test_rates_are_shares_of_all_rounds() -> None:
    assert rank_rates([(0, 1), (0, None), (2, 0), (None, 0)], 2) == [[0.5, 0.0], [0.5, 0.25]]
    assert rank_rates([], 2) == [[0.0, 0.0]]


def test_rates_fall_with_the_rank() -> None:
    assert rank_rates([(0,), (0,), (3,), (None,)], 4) == [pytest.approx([0.5, 0.25 / 3, 0.25 / 3, 0.25 / 3])]
    assert rank_rates([(1,), (2,), (2,), (0,)], 4) == [pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])]


def test_the_records_of_a_chain_bracket_a_tree() -> None:
    """Four rounds of a chain of two: one stands, one fails at first, the others at the second draft."""
    ranks = [(0, 0), (1,), (0, 1), (0, None)]
    low, high = bracket(ranks, 2, 4)
    assert low == 1 + (2 + 1 + 2 + 1) / 4, "two siblings at each depth"
    first, second = (0.75, 0.25), (1 / 3, 1 / 3)  # of the three rounds that came to the second draft
    assert high == pytest.approx(1 + sum(first) + first[0] * sum(second))
    assert bracket(ranks, 2, 1) == (1.75, 1.75), "a tree of one node is the chain's first draft"
    assert bracket([], 2, 4) == (1.0, 1.0)
