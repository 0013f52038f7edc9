"""A result in a notebook, and one draft by itself."""

from __future__ import annotations

import inspect
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
from fixtures.report_results import full_result

from draftkit.evaluate.notebook import notebook_progress
from draftkit.results.record import Result, ResultWarning, result_from
from draftkit.results.verdict import verdicts_of


def test_a_result_shows_itself() -> None:
    result = result_from(full_result(), Path("r.json"))
    html = result._repr_html_()
    assert verdicts_of(result)[0].sentence in html
    assert html.count("<tr>") == 1 + len(result.cells)
    assert "3.50 [3.38, 3.61]" in html
    hostile = replace(
        result, cells=(replace(result.cells[0], draft="<script>"),), warnings=(ResultWarning("w", "<script>"),)
    )
    assert "<script>" not in hostile._repr_html_()


def test_progress_is_shown_in_a_notebook_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    notebook_progress()("run", 1, 2, 1.5)  # nothing happens
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    shown: dict[str, tuple[int, int]] = {}

    class Bar:
        def __init__(self, total: int, desc: str):
            self.total, self.desc, self.n = total, desc, 0

        def set_postfix_str(self, text: str) -> None:
            shown[f"{self.desc}: {text}"] = self.n, self.total

    monkeypatch.setattr("tqdm.auto.tqdm", Bar)
    progress = notebook_progress()
    for done in (1, 2):
        progress("zoo:eagle3, K=4", done, 2, 1.5)
    assert shown == {"zoo:eagle3, K=4: acceptance length 1.50": (2, 2)}


def test_results_are_typed() -> None:
    from draftkit import evaluate_draft

    assert inspect.get_annotations(evaluate_draft)["return"] in (Result, "Result")
