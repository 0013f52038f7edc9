"""The curves of SmolLM2's drafts are kept as they were read."""

from __future__ import annotations

from pathlib import Path

from draftkit import Interval
from draftkit.train.log import TrainingCurve, ValidatedStep
from scripts.docs.curves import keep, kept, table


def test_what_is_kept_is_read_again_and_has_a_row_in_the_table(tmp_path: Path) -> None:
    def step(number: int, mean: float) -> ValidatedStep:
        return ValidatedStep(number, Interval(mean, mean - 0.1, mean + 0.1, 48), 2.0, 0.4, 476.4 * number, 1.8 * number)

    curves = [
        TrainingCurve(Path("eagle3"), (step(525, 1.3), step(1050, 1.5))),
        TrainingCurve(Path("dflash-seed-1"), (step(525, 1.2),)),
    ]
    keep(curves, tmp_path / "curves.jsonl")
    assert kept(tmp_path / "curves.jsonl") == curves
    assert kept(tmp_path / "none") == []
    assert list(table(curves)) == [
        "| run | processor time | 250,000 tokens | 500,000 tokens |",
        "|---|---|---|---|",
        "| eagle3 | 1,890 s | 1.300 [1.20, 1.40] | 1.500 [1.40, 1.60] |",
        "| dflash-seed-1 | 945 s | 1.200 [1.10, 1.30] |  |",
    ]
