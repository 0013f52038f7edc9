"""Records from JSON: strictly, and as files of measurements are read."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from draftkit.errors import LayoutError
from draftkit.io.records import from_dict, read_record


@dataclass(frozen=True)
class Mean:
    mean: float
    low: float


@dataclass(frozen=True)
class Measured:
    k: int
    length: Mean | None
    note: str = "none"
    rates: tuple[float | None, ...] = ()
    by_name: dict[str, Mean | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.k < 0:
            raise ValueError(f"k is {self.k}")


MEAN = {"mean": 2, "low": 1.5}
NOTHING = {"mean": None, "low": None}


def test_a_measurement_may_have_more_and_less() -> None:
    data = {"k": 3, "length": NOTHING, "note": None, "by_name": {"a": MEAN, "b": NOTHING}, "rates": [1, None], "new": 1}
    record, problems = read_record(Measured, data, lenient=True)
    assert problems == []
    assert record == Measured(3, None, rates=(1.0, None), by_name={"a": Mean(2.0, 1.5), "b": None})


def test_a_fact_may_not() -> None:
    for change in ({"new": 1}, {"note": None}, {"length": NOTHING}):
        with pytest.raises(LayoutError):
            from_dict(Measured, {"k": 3, "length": MEAN} | change, "a test")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"k": None}, "k: None is not a whole number"),
        ({"k": True}, "k: True is not a whole number"),
        ({"k": -1}, "k is -1"),
        ({"length": {"mean": 2}}, "length.low: missing"),
        ({"length": {"mean": float("nan"), "low": 1}}, "length.mean: nan is not a finite number"),
        ({"by_name": {"a": {"mean": "2", "low": 1}}}, "by_name.a.mean: '2' is not a number"),
        ({"rates": [1, "x" * 200]}, "rates[1]: '" + "x" * 79 + " … is not a number"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_named_by_its_place(change: dict[str, object], problem: str) -> None:
    record, problems = read_record(Measured, {"k": 3, "length": MEAN} | change, lenient=True)
    assert (record, problems) == (None, [problem])


def test_every_problem_is_listed() -> None:
    _, problems = read_record(Measured, {"length": 1, "note": 2}, path="cell", lenient=True)
    assert problems == ["cell.k: missing", "cell.length: 1 is not an object", "cell.note: 2 is not text"]
