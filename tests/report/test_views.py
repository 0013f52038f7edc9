"""What is shown of a cell: in the terminal, in a card and its header, as CSV, on a page and in a notebook."""

from __future__ import annotations

import io
import re
import typing
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from fixtures import report_results
from rich.console import Console

from draftkit.report.card.markdown import acceptance_table, speed_table
from draftkit.report.card.model_index import eval_results
from draftkit.report.page.figures import all_figures
from draftkit.report.page.page import page
from draftkit.report.page.series import join
from draftkit.report.terminal.engines import engines_table
from draftkit.report.terminal.tables import category_table, cells_csv, details_table, evaluation_table
from draftkit.results.metrics import METRICS, Metric, View, kind_at, metrics_of, value_at
from draftkit.results.record import Result, result_from

WHERE = Path("result.json")


def views(result: Result) -> dict[str, str]:
    """View → what it shows of the cells of a result, as text with a line for each row."""
    rows = [(1, cell) for cell in result.cells]
    series = join([result])
    html = page([result], series, all_figures(series))
    measurements = html[html.index('aria-label="All measurements"') : html.index('<p class="note">Acceptance length')]
    return {
        "table": _printed(evaluation_table(result)),
        "details": _printed(details_table(result)),
        "card-acceptance": acceptance_table(rows),
        "card-speed": speed_table(rows),
        "model-index": yaml.safe_dump([vars(entry) for entry in eval_results([result])], sort_keys=False),
        "csv": cells_csv(result),
        "page": _lines(measurements),
        "notebook": _lines(result._repr_html_()),
    }


@pytest.fixture
def mixed_result() -> Result:
    return result_from(report_results.mixed_result(), WHERE)


def _printed(table: object) -> str:
    text = io.StringIO()
    Console(file=text, width=250).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _lines(html: str) -> str:
    """A line for each row of a table, its cells between bars."""
    rows = re.findall(r"<tr.*?</tr>", html, re.DOTALL)
    return "\n".join(
        " | ".join(
            " ".join(re.sub(r"<[^>]*>", "", cell).split()) for cell in re.findall(r"<t[dh].*?</t[dh]>", row, re.DOTALL)
        )
        for row in rows
    )


def test_tables_beside_the_first_fit_80_columns(mixed_result: Result) -> None:
    """No heading is broken inside a word, nothing is cut, and captions begin where lines do."""
    cells = mixed_result.cells
    tables = [details_table(mixed_result), category_table(cells), engines_table(cells)]
    text = io.StringIO()
    Console(file=text, width=80).print(*tables, sep="\n")
    printed = text.getvalue()
    assert "…" not in printed.replace("1…K", "")
    headings = [metric.title for metric in metrics_of("details", cells)]
    headings += [str(column.header) for table in tables for column in table.columns]
    assert {word for heading in headings for word in heading.split()} <= set(printed.split())
    assert {table.caption_justify for table in tables} == {"left"}
    assert re.search("^expected: from the", printed, re.MULTILINE)
    assert re.search("^counts: equal when", printed, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: f"{metric.name}-{metric.where[0]}")
def test_a_path_leads_to_something_that_cells_have(metric: Metric, mixed_result: Result) -> None:
    for path in (metric.path, *filter(None, [metric.unlike])):
        kind = kind_at(path)
        for cell in mixed_result.cells:
            found = value_at(cell, path)
            assert found is None or isinstance(found, typing.get_origin(kind) or kind)
            assert isinstance(metric.text(cell), str)


@pytest.mark.parametrize(
    "path", ["acceptance_lenght", "acceptance_length.median", "target.name", "to_dict", "faster.no"]
)
def test_a_path_that_leads_nowhere_is_no_empty_column(path: str) -> None:
    with pytest.raises(AttributeError, match=f"{path} leads nowhere"):
        kind_at(path)


def test_a_metric_is_one_row(monkeypatch: pytest.MonkeyPatch, mixed_result: Result) -> None:
    """In every view, with its heading and its value."""
    toy = Metric("toy", "repetition", "toy heading", ".4f", typing.get_args(View), unit="u")
    monkeypatch.setattr("draftkit.results.metrics.METRICS", (*METRICS, toy))
    cells = tuple(replace(cell, repetition=0.4321) for cell in mixed_result.cells)
    shown = views(replace(mixed_result, cells=cells))
    assert {view for view, text in shown.items() if "0.4321" not in text} == set()
    for view, text in shown.items():
        heading = "toy heading" if view == "table" else "toy" if view in ("csv", "model-index") else "toy heading u"
        assert heading in text, view
    assert shown.keys() == set(typing.get_args(View)) - {"card"}, "every table of a card begins with the rows of card"
