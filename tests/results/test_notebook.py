"""A result in a notebook, and one draft by itself."""

from __future__ import annotations

import inspect
import re
import sys
import types
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from fixtures.report_results import full_result

import draftkit
from draftkit import convert_checkpoint, inspect_checkpoint
from draftkit.doctor.diagnose import Diagnosis
from draftkit.doctor.measure import Tried
from draftkit.evaluate.notebook import notebook_progress, notebook_trials
from draftkit.results.cell import Interval
from draftkit.results.record import Result, ResultWarning, result_from
from draftkit.train.adapt import Adaptation, AdaptedSlice
from draftkit.train.run import Trained


def test_a_result_shows_itself() -> None:
    result = result_from(full_result(), Path("r.json"))
    html = result._repr_html_()
    assert result.judged[0].sentence in html
    assert html.count("<tr>") == 1 + len(result.cells)
    assert "3.50 [3.38, 3.61]" in html
    hostile = replace(
        result, cells=(replace(result.cells[0], draft="<script>"),), warnings=(ResultWarning("w", "<script>"),)
    )
    assert "<script>" not in hostile._repr_html_()


INTERVAL = Interval(2.5, 2.25, 2.75, 8)
TRIED = Tried("rope", "rope_theta=<1e4>", 2.5, 2.9, Interval(0.4, 0.3, 0.5, 8), True, True, "--set rope_theta=1e4", "")
DIAGNOSIS = Diagnosis("t", "d", "eagle3", INTERVAL, None, (), (), (TRIED,), {}, {})


@pytest.mark.parametrize(
    ("shown", "words"),
    [
        (DIAGNOSIS,
         ["with t: acceptance length 2.50 [2.25, 2.75]", "rope_theta=&lt;1e4&gt;", "<td>+0.40 [+0.30, +0.50]</td>"]),
        (replace(DIAGNOSIS, length=None, tried=()), ["not measured", "Nothing found"]),
        (Adaptation(Path("out/draft"), 1200, (AdaptedSlice("all", 9, INTERVAL, INTERVAL, INTERVAL, None),)),
         ["trained on 1,200 answers", "<td>–</td>"]),
        (Trained(Path("run/draft"), Path("run/c"), {"eval_acceptance_length": 2.345}), ["acceptance_length", "2.345"]),
        (inspect_checkpoint("zoo:eagle3", target="zoo:target"), ["zoo:eagle3: eagle3", "<td>rope_theta</td>"]),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_functions_return_shows_itself(shown: object, words: list[str]) -> None:
    html = shown._repr_html_()  # type: ignore[attr-defined]
    assert [word for word in words if word not in html] == []
    text = str(shown)
    assert [word for word in words if unescape(re.sub("</?td>", "", word)) not in text] == []
    assert f"{type(shown).__name__}(" not in text


def test_a_cell_shows_itself() -> None:
    cell = result_from(full_result(), Path("r.json")).cells[0]
    assert f"<p><b>{cell.draft} with {cell.target}, K=" in cell._repr_html_()
    length = f"{cell.acceptance_length.mean:.2f}"
    assert f"<td>acceptance length</td><td>{length} [" in cell._repr_html_()
    assert re.search(rf"^acceptance length +{length} \[", str(cell), re.MULTILINE)


def test_the_package_lists_its_public_names() -> None:
    assert dir(draftkit) == sorted(draftkit.__all__)
    assert all(getattr(draftkit, name) is not None for name in dir(draftkit))


def test_warnings_of_one_kind_are_one_line_with_the_worst() -> None:
    warnings = [ResultWarning("slow", f"off by {error:.0%}", extent=error) for error in (0.2, 0.4, 0.3)]
    result = replace(result_from(full_result(), Path("r.json")), warnings=(*warnings, ResultWarning("odd", "once")))
    assert [(w.message, kind) for w, kind in result.warned] == [("off by 40%", "slow: the worst of 3"), ("once", "odd")]
    assert str(result).endswith("warning: off by 40% [slow: the worst of 3]\nwarning: once [odd]")
    read = result_from(result.to_dict(), Path("r.json"))  # as a page is made of a file
    assert read.warned == result.warned


def test_a_converted_draft_shows_itself(tmp_path: Path) -> None:
    html = inspect_checkpoint(str(convert_checkpoint("zoo:eagle3", tmp_path / "d", target="zoo:target")))._repr_html_()
    assert "d: eagle3, 14 tensors" in html
    assert "<td>aux_layer_ids</td>" in html


def test_progress_is_shown_in_a_notebook_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    notebook_progress()("run", 1, 2, 1.5)  # nothing happens
    notebook_trials()("trial", 1, 2)
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    shown: dict[str, tuple[int, int]] = {}

    class Bar:
        def __init__(self, total: int = 0, desc: str = "trials"):
            self.total, self.desc, self.n = total, desc, 0

        def set_description(self, text: str, refresh: bool) -> None:
            self.desc = text

        def set_postfix_str(self, text: str) -> None:
            shown[f"{self.desc}: {text}"] = self.n, self.total

    monkeypatch.setattr("tqdm.auto.tqdm", Bar)
    progress = notebook_progress()
    for done in (1, 2):
        progress("zoo:eagle3, K=4", done, 2, 1.5)
    notebook_trials()("rope", 3, 9)
    assert shown == {"zoo:eagle3, K=4: acceptance length 1.50": (2, 2), "trials: rope": (3, 9)}


def test_results_are_typed() -> None:
    from draftkit import evaluate_draft

    assert inspect.get_annotations(evaluate_draft)["return"] in (Result, "Result")
