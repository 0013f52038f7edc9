"""The page that shows draftkit in a notebook: its cells run in their order, and what each ends with shows itself."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs/guides/notebook.md"


def cells() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def run(cell: str, names: dict[str, Any]) -> object:
    """What a cell ends with, as a notebook shows it; None for a statement."""
    *statements, last = ast.parse(cell).body
    if not isinstance(last, ast.Expr):
        exec(compile(ast.parse(cell), str(PAGE), "exec"), names)
        return None
    exec(compile(ast.Module(statements, []), str(PAGE), "exec"), names)
    return eval(compile(ast.Expression(last.value), str(PAGE), "eval"), names)


@pytest.mark.long
def test_the_cells_of_the_notebook_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    shown = [run(cell, names) for cell in cells()]
    pages = [value._repr_html_() for value in shown if hasattr(value, "_repr_html_")]
    assert [page.count("<table>") for page in pages] == [1, 1]  # a measurement, a draft
    printed = capsys.readouterr().out
    assert "zoo:eagle3 with zoo:target, K=4, concurrency 1, T=0" in printed
    assert re.search(r"^change +gain +helps$", printed, re.MULTILINE)
    assert str(names["trained"].draft) in printed
    assert not re.search(r"^(Cell|Diagnosis|Trained)\(", printed, re.MULTILINE)
