"""The acceptance length along answers: where rounds began, in stretches that double."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import pairwise
from math import log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from draftkit.report.page.figures import all_figures
from draftkit.report.page.series import join
from draftkit.report.terminal.tables import show_evaluation
from draftkit.requests import Request
from draftkit.results.cell import Cell, Interval
from draftkit.results.record import Result
from draftkit.results.statistics import FIRST_PLACE, lengths_by_place
from draftkit.runtime.records import Generation, Round

PROMPT = 7


def answer(number: int, rounds: list[tuple[int, int]]) -> Generation:
    """One with rounds that begin after so many output tokens, and accept so many drafts."""
    return Generation(
        Request(str(number), (1,) * PROMPT, 9999), rounds=[Round(PROMPT + at, 4, a, a + 1) for at, a in rounds]
    )


@given(st.lists(st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 4)), max_size=12), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_every_round_is_in_the_place_where_it_began(answers: list[list[tuple[int, int]]]) -> None:
    places = lengths_by_place([answer(number, rounds) for number, rounds in enumerate(answers)])
    whole = [one for rounds in answers for one in rounds]
    if len({0 if at < FIRST_PLACE else int(log2(at / FIRST_PLACE)) + 1 for at, _ in whole}) < 2:
        assert not places
        return
    assert sum(place.rounds for place in places) == len(whole)
    assert all(one.end <= other.begin for one, other in pairwise(places))
    for place in places:
        mine = [accepted for at, accepted in whole if place.begin <= at < place.end]
        assert place.rounds == len(mine)
        assert place.acceptance_length.mean == pytest.approx(1 + sum(mine) / len(mine))
        assert place.end in (FIRST_PLACE, 2 * place.begin)


def test_a_draft_that_loses_its_way_is_seen_to() -> None:
    """In a table, and as a figure."""
    answers = [answer(n, [(at, 3 - (at >= 128) * (2 + n % 2)) for at in range(1, 500, 3)]) for n in range(12)]
    places = lengths_by_place(answers)
    assert [(place.begin, place.end, place.prompts) for place in places] == [
        (0, 64, 12), (64, 128, 12), (128, 256, 12), (256, 512, 12),
    ]  # fmt: skip
    assert places[1].acceptance_length.mean == 4
    assert places[2].acceptance_length.below(2)
    cell = Cell(
        target="t", draft="d", num_speculative_tokens=4, temperature=0, concurrency=1,
        acceptance_length=Interval(2, 1.8, 2.2, 12),
    )  # fmt: skip
    result = Result((replace(cell, by_place=places),), {})
    console = Console(width=80, file=io.StringIO())
    show_evaluation(console, result, details=True)
    assert "256 – 511" in console.file.getvalue()
    assert "acceptance-by-place" in all_figures(join([result]))
    assert "acceptance-by-place" not in all_figures(join([Result((cell,), {})]))
