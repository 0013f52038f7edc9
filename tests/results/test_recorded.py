"""Rounds are read back from the file they were recorded in, or refused by their line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftkit.errors import DraftkitError, FormatError
from draftkit.requests import Request
from draftkit.results.cell import Heading
from draftkit.results.recorded import append_rounds, read_rounds
from draftkit.runtime.records import Generation, Round

HEADING = Heading(
    target="t", draft="d", num_speculative_tokens=3, temperature=1.0, concurrency=2, draft_sampling="probabilistic"
)
ROUND = Round(7, 3, 1, 2, (0.5, 0.25, 0.0), (4, 5, 6), False, (0.9, 0.5, 0.1), (0.8, 0.4, 0.2))


def recorded(path: Path, *rounds: Round) -> Path:
    generation = Generation(Request("a", (1,), 9), rounds=list(rounds), finished="length")
    append_rounds(path, HEADING, [generation], {"a": ["category=code"]})
    return path


@settings(max_examples=20)
@given(accepted=st.integers(0, 3), confidences=st.lists(st.floats(0, 1), min_size=3, max_size=3))
def test_what_is_recorded_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, accepted: int, confidences: list[float]
) -> None:
    one = Round(7, 3, accepted, accepted + 1, (0.5, 0.25, 0.0), (4, 5, 6), False, tuple(confidences))
    (read,) = read_rounds([recorded(tmp_path_factory.mktemp("records") / "r.jsonl", one)])
    assert (read.draft, read.temperature, read.request, read.slices) == ("d", 1.0, "a", ("category=code",))
    assert (read.accepted, read.expected, read.confidences) == (accepted, one.expected, tuple(confidences))


def test_a_run_that_was_recorded_twice_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    for _ in range(2):
        recorded(path, ROUND)
    assert len(read_rounds([path, path])) == 1


def test_records_of_earlier_versions_are_read(tmp_path: Path) -> None:
    path = recorded(tmp_path / "r.jsonl", ROUND)
    line = json.loads(path.read_text())
    for name in ("slices", "confidences", "probabilities", "verification", "min_confidence", "draft_sampling"):
        del line[name]
    path.write_text(json.dumps(line) + "\n")
    assert read_rounds([path])[0].confidences == ()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"accepted": 4}, "4 of 3 drafts"),
        ({"confidences": [0.5]}, "confidences is not a chance for each of 3 drafts"),
        ({"confidences": [0.5, 2.0, 0.1]}, "confidences is not a chance"),
        ({"request": 5}, "request"),
        ({"drafted": None}, "drafted"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, change: dict[str, object], said: str) -> None:
    path = recorded(tmp_path / "r.jsonl", ROUND)
    wrong = json.dumps(json.loads(path.read_text()) | change)
    path.write_text(path.read_text() + wrong + "\n")
    with pytest.raises(FormatError, match=said) as raised:
        read_rounds([path])
    assert "line 2" in str(raised.value)


def test_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = recorded(tmp_path / "r.jsonl", ROUND)
    path.write_text(path.read_text()[:-20])
    with pytest.raises(FormatError, match="not a whole record"):
        read_rounds([path])


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(DraftkitError, match="cannot be read"):
        read_rounds([tmp_path / "none.jsonl"])
