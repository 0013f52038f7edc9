"""Result files, and what a report makes of them: series, figures, memory, tokens, rows, the page and the command."""

from __future__ import annotations

import copy
import csv as csv_reader
import io
import itertools
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer.testing
from fixtures.report_results import full_result, old_result
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len

from draftkit.cli.output import print_json
from draftkit.cli.report import report
from draftkit.errors import DraftkitError
from draftkit.report.format import size
from draftkit.report.memory_cost import memory_cost
from draftkit.report.page import figures as figures_module
from draftkit.report.page.chart import MOST_SERIES, PALETTE, SERIES_COLORS, Chart, linear, logarithmic
from draftkit.report.page.figures import all_figures, measured_speedups, short
from draftkit.report.page.page import labelled, page, provenance_table, show_round
from draftkit.report.page.series import Series, join
from draftkit.report.page.svg import Frame, svg, svg_file
from draftkit.report.terminal.tables import PROVENANCE, cells_csv, columns
from draftkit.results.cell import Cell, Interval, PromptRecord, TranscriptRound
from draftkit.results.comparison import compare, summary
from draftkit.results.record import Result, read_result, result_from

HOSTILE = "</title></style><script>alert(1)</script><img src=http://evil.example/x onerror=alert(1)>\"'&$a_b$\x07"
WHERE = Path("result.json")


@pytest.fixture(scope="module")
def full() -> Result:
    return result_from(full_result(), WHERE)


@pytest.fixture(scope="module")
def old() -> Result:
    return result_from(old_result(), WHERE)


@pytest.fixture(scope="module")
def drawn(full: Result) -> dict[str, Chart]:
    return all_figures(join([full]))


def rendered(*results: Result) -> str:
    series = join(results)
    return page(results, series, all_figures(series))


def changed(*path: str | int, value: object) -> dict[str, Any]:
    """The full result with one value replaced."""
    result = copy.deepcopy(full_result())
    inner: Any = result
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return result


# Reading


def test_few_fields_are_enough(old: Result) -> None:
    (cell,) = old.cells
    assert cell.accepted_at == pytest.approx([30 / 46, 22 / 46, 19 / 46, 17 / 46])
    assert cell.accepted_after == pytest.approx([30 / 46, 22 / 30, 19 / 22, 17 / 19])
    assert cell.times_faster == pytest.approx(112.8 / 84.5)
    assert (cell.memory, cell.samples, old.speed_models, cell.engine) == (None, None, (), "draftkit")


def test_unknown_fields_are_passed_over() -> None:
    result = full_result()
    result["later"] = result["cells"][0]["later"] = result["cells"][0]["memory"]["later"] = {"any": float("nan")}
    assert result_from(result, WHERE) == result_from(full_result(), WHERE)


@pytest.mark.parametrize("nothing", [None, {"mean": None, "low": None, "high": None}])
def test_where_nothing_was_drafted_there_is_no_acceptance_length(nothing: object) -> None:
    data = old_result()
    data["cells"][0] |= {
        "acceptance_length": nothing,
        "by_category": {"class": nothing, "all": nothing},
        "num_drafts": 0,
    }
    result = result_from(data, WHERE)
    assert result.cells[0].acceptance_length is None
    assert "nothing was drafted" in rendered(result)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "named"),
    [
        (changed("schema", value=2), "schema"),
        (changed("schema", value=True), "schema"),
        (changed("schema", value=None), "schema"),
        (changed("cells", value=None), "cells"),
        (changed("cells", value=[]), "cells"),
        (changed("cells", 0, value="x" * 9999), "cells[0]"),
        (changed("provenance", value=[]), "provenance"),
        (changed("cells", 1, "temperature", value=float("nan")), "cells[1].temperature"),
        (changed("cells", 1, "acceptance_length", "mean", value=float("inf")), "cells[1].acceptance_length.mean"),
        (changed("cells", 1, "acceptance_length", value={"mean": 2.0}), "cells[1].acceptance_length.low: missing"),
        (changed("cells", 1, "concurrency", value="8"), "cells[1].concurrency"),
        (changed("cells", 1, "concurrency", value=0), "cells[1]: concurrency"),
        (changed("cells", 1, "num_speculative_tokens", value=True), "cells[1].num_speculative_tokens"),
        (changed("cells", 1, "draft", value=None), "cells[1].draft"),
        (changed("cells", 1, "by_category", "math", value=3), "cells[1].by_category.math"),
        (changed("cells", 1, "ttft_quantiles_ms", value=[1.0]), "ttft_quantiles_ms"),
        (changed("cells", 1, "samples", 0, "rounds", 1, "accepted", value=9), "cells[1].samples[0].rounds[1]"),
        (changed("cells", 1, "memory", "capacity", value=0), "cells[1].memory"),
        (changed("speed_models", 0, "schedule", value=[[1, 2]]), "speed_models[0]"),
        (changed("speed_models", 0, "predicted", 2, "speedup", value=None), "speed_models[0].predicted[2].speedup"),
    ],
)
def test_a_wrong_file_is_refused_by_file_and_key(broken: dict[str, Any], named: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(broken))
    with pytest.raises(DraftkitError) as error:
        read_result(path)
    assert "bad.json" in str(error.value)
    assert named in str(error.value)


@pytest.mark.parametrize("content", [b"", b'{"schema": 1, "cells": [', b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_json_object_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_bytes(content)
    with pytest.raises(DraftkitError, match=r"cut\.json"):
        read_result(tmp_path / "cut.json")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DraftkitError, match="eval --json"):
        read_result(tmp_path / "absent.json")


# Series


def cell(draft: str = "a", k: int = 4, batch: int = 1, temperature: float = 0.0) -> Cell:
    return Cell(
        target="target", draft=draft, num_speculative_tokens=k, temperature=temperature, concurrency=batch,
        acceptance_length=Interval(2, 1, 3),
    )  # fmt: skip


def test_a_series_is_a_draft_at_one_setting(full: Result) -> None:
    series = join([full])
    assert [one.name for one in series] == ["zoo:eagle3", "acme/llama-draft-0.2b"]
    assert [len(one.cells) for one in series] == [24, 24]
    assert [one.model.draft for one in series if one.model] == [one.name for one in series]
    assert (series[0].main.concurrency, series[0].main.num_speculative_tokens) == (1, 6)


def test_names_say_what_differs() -> None:
    hot = replace(cell(temperature=1.0), draft_sampling="probabilistic")
    cold = replace(cell(temperature=0.0), draft_sampling="greedy")  # which the temperature says already
    assert [one.name for one in join([Result((cold, hot), {})])] == ["a, T=0", "a, T=1"]


def test_files_are_joined_into_one_sweep_unless_they_repeat_a_setting() -> None:
    first, second = Result((cell(k=2),), {}, path="one.json"), Result((cell(k=4),), {}, path="two.json")
    assert [one.name for one in join([first, second])] == ["a"]
    again = Result((cell(k=2),), {}, path="two.json")
    assert [one.name for one in join([first, again])] == ["a, one.json", "a, two.json"]


def test_hardware_tells_series_apart() -> None:
    results = [Result((cell(),), {"hardware": name}) for name in ("H100", "L4")]
    assert [one.name for one in join(results)] == ["a, H100", "a, L4"]


# Figures


def test_every_figure_is_drawn_from_a_full_file_and_few_from_an_old_one(drawn: dict[str, Chart], old: Result) -> None:
    assert list(drawn) == [
        "acceptance-by-position",
        "conditional-acceptance-by-position",
        "acceptance-by-category",
        "acceptance-length-by-k",
        "speed-by-k-batch-1",
        "speed-by-k-batch-4",
        "speed-by-k-batch-16",
        "speed-by-k-batch-64",
        "throughput-by-batch",
        "speed-by-batch",
        "latency-ttft",
        "latency-tpot",
        "latency-itl",
    ]
    assert list(all_figures(join([old]))) == [
        "acceptance-by-position",
        "conditional-acceptance-by-position",
        "acceptance-by-category",
    ]


def drawn_values(figure: Chart) -> list[list[float]]:
    return [[y for _, y in line.points] for line in figure.lines]


def test_figures_draw_the_numbers_of_the_file(full: Result, drawn: dict[str, Chart]) -> None:
    series = join([full])
    assert drawn_values(drawn["acceptance-by-position"]) == [list(one.main.accepted_at) for one in series]
    measured = [point.speedup for point in measured_speedups(series[0], 16)]
    assert measured in drawn_values(drawn["speed-by-k-batch-16"])
    assert [
        max(cell["speedup"] for cell in full_result()["cells"] if one.main.draft == cell["draft"]) for one in series
    ] == [max(line) for line in drawn_values(drawn["speed-by-batch"])[2::2]]
    interval = full.cells[0].acceptance_length
    assert interval is not None
    assert drawn["acceptance-length-by-k"].lines[0].bars[0] == ((1, interval.low), (1, interval.high))


def test_each_run_has_its_own_plain_decoding() -> None:
    def run(temperature: float, plain: float) -> tuple[Cell, ...]:
        return tuple(
            replace(cell(batch=b, temperature=temperature), tokens_per_second=9.0, baseline_tokens_per_second=plain * b)
            for b in (1, 2)
        )

    drawn = figures_module.throughput_by_batch(join([Result(run(0, 3) + run(1, 2), {})]))
    assert drawn is not None
    assert drawn_values(drawn)[2:] == [[2, 4], [3, 6]]


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ((1, 2, 3), ["1.0", "1.5", "2.0", "2.5", "3.0"]),
        ((0, 4000), ["0", "1,000", "2,000", "3,000", "4,000"]),
        ((2.5, 2.5), ["2.0", "2.2", "2.4", "2.6", "2.8", "3.0"]),
        ((-0.02, 0.03), ["-0.02", "-0.01", "0.00", "0.01", "0.02", "0.03"]),
    ],
)
def test_an_axis_has_round_numbers(values: tuple[float, ...], texts: list[str]) -> None:
    assert [text for _, text in linear("", values).ticks] == texts


def test_axes_of_counts_and_of_wide_ranges() -> None:
    assert [text for _, text in linear("K", (1, 3), whole=True).ticks] == ["1", "2", "3"]
    assert [text for _, text in linear("K", (4, 4), whole=True).ticks] == ["4"]
    assert [text for _, text in logarithmic("ms", (3, 400)).ticks] == ["5", "10", "20", "50", "100", "200"]
    assert [text for _, text in logarithmic("ms", (3, 400_000)).ticks] == ["10", "100", "1,000", "10,000", "100,000"]
    assert [text for _, text in logarithmic("batch", (1, 3), at=(1, 3)).ticks] == ["1", "3"]


@given(st.lists(st.integers(-(10**12), 10**12).map(lambda n: n / 1000), min_size=1, max_size=5), st.booleans())
@example([7.7], False)  # a tick at 8.200000000000001, where the axis ends
def test_an_axis_holds_its_values_and_its_ticks(values: list[float], whole: bool) -> None:
    axis = linear("", values, whole=whole)
    assert all(0 <= axis.share(value) <= 1 for value in (*values, *(value for value, _ in axis.ticks)))
    assert len(axis.ticks) <= 8


def test_every_point_lies_within_its_figure(drawn: dict[str, Chart]) -> None:
    for figure in drawn.values():
        frame = Frame(figure)
        for line in figure.lines:
            for x, y in (*line.points, *(end for bar in line.bars for end in bar)):
                assert frame.left <= frame.x(x) <= frame.right
                assert 30 <= frame.y(y) <= frame.bottom


def test_texts_of_ticks_do_not_run_into_each_other() -> None:
    """A speed model may know of many batches."""
    batches = list(range(1, 200))
    chart = Chart("", logarithmic("batch", batches, at=batches), linear("", (0, 1)), (), (figures_module._line(
        Series("a", 0, (cell(),)), ()),))  # fmt: skip
    frame = Frame(chart)
    places = [(frame.x(value), len(text)) for value, text in frame.x_ticks()]
    assert 8 < len(places) < 40
    assert all(right - left > 6 * (a + b) / 2 for (left, a), (right, b) in itertools.pairwise(places))


def test_svg_has_the_colors_of_the_page_and_nothing_from_elsewhere(drawn: dict[str, Chart]) -> None:
    text = svg(drawn["speed-by-k-batch-4"])
    assert "var(--series-1)" in text
    assert not any(light in text for light, _ in PALETTE.values())
    assert not re.search(r"<(style|metadata|script|image)\b", text)
    assert "zoo:eagle3" in text


def test_palette_colors_are_distinct() -> None:
    assert len({light for light, _ in PALETTE.values()}) == len(PALETTE)


def test_files_are_well_formed_and_need_no_page(drawn: dict[str, Chart]) -> None:
    for figure in drawn.values():
        file = svg_file(figure)
        root = ElementTree.fromstring(file)
        assert b"var(" not in file
        assert root[0].attrib["fill"] == "white"


@pytest.mark.parametrize("name", [HOSTILE, "_hidden", "$x^$", "多语言草稿" * 30, "a" * 500, "\n\n"])
def test_figures_take_any_name(name: str) -> None:
    one = Series(name, 0, (replace(cell(name, 2), acceptance_per_pos=(0.7, 0.4)),))
    figure = all_figures([one])["acceptance-by-position"]
    assert [line.name for line in figure.legend] == [short(name)]
    assert cell_len(short(name)) <= figures_module.NAME_LENGTH
    texts = [element.text for element in ElementTree.fromstring(svg_file(figure)).iter() if element.text]
    assert short(name) in texts


# Memory

GIB = 1 << 30


def test_memory_cost_counts_the_draft_alone(full: Result) -> None:
    cost = memory_cost(join([full])[0].main)
    assert cost is not None
    assert (cost.target_weights, cost.draft_weights) == (16 * GIB, 700 << 20)
    assert (cost.target_kv // cost.capacity, cost.draft_kv // cost.capacity) == (131072, 4096)
    assert cost.batch < cost.plain_batch
    assert cost.lost_share == pytest.approx(1 - cost.batch / cost.plain_batch)


def test_memory_of_another_shape_is_not_guessed(old: Result) -> None:
    assert memory_cost(old.cells[0]) is None
    odd = changed("cells", 0, "memory", "fixed", value={"weights": 1})
    assert memory_cost(result_from(odd, WHERE).cells[0]) is None


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, "–"), (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (16 * GIB, "16 GiB"), (1 << 62, "4194304 TiB")],
)
def test_sizes(count: int | None, text: str) -> None:
    assert size(count) == text


# Tokens


@pytest.mark.parametrize(
    ("drafted", "accepted", "emitted", "kinds", "proposal"),
    [
        ("abc", 3, "abcX", "accepted accepted accepted bonus", "accepted accepted accepted"),
        ("abc", 1, "aX", "accepted recovered", "accepted rejected unread"),
        ("abc", 0, "X", "recovered", "rejected unread unread"),
        ("", 0, "X", "plain", ""),
        ("abc", 2, "a", "accepted", "accepted accepted rejected"),
    ],
)
def test_kinds_of_tokens(drafted: str, accepted: int, emitted: str, kinds: str, proposal: str) -> None:
    shown = show_round(TranscriptRound(tuple(drafted), accepted, tuple(emitted)))
    assert " ".join(token.kind for token in shown.tokens) == kinds
    assert " ".join(token.kind for token in shown.proposal) == proposal


# Rows


@pytest.mark.parametrize("make", [full_result, old_result])
def test_csv_has_a_row_for_each_cell_and_always_the_same_columns(make: Callable[[], dict[str, Any]]) -> None:
    result = make()
    result["cells"][0]["draft"] = 'a, "quoted"\nname'
    header, *rows = csv_reader.reader(io.StringIO(cells_csv(result_from(result, WHERE))))
    assert header == [*columns(), *PROVENANCE]
    assert len(rows) == len(result["cells"])
    row = dict(zip(header, rows[0], strict=True))
    assert row["draft"] == 'a, "quoted"\nname'
    assert float(row["acceptance_length"]) == result["cells"][0]["acceptance_length"]["mean"]
    assert (row["matches_greedy"], row["draftkit"]) == ("true", "0.1.0")
    assert row["ttft_ms_p50"] == str(result["cells"][0]["ttft_ms"]["p50"])


def test_csv_leaves_empty_what_was_not_measured() -> None:
    header, row = csv_reader.reader(io.StringIO(cells_csv(result_from(old_result(), WHERE))))
    values = dict(zip(header, row, strict=True))
    assert values["itl_ms_mean"] == values["acceptance_per_pos"] == values["hardware"] == ""


# Page


class Elements(HTMLParser):
    """Names of elements and of attributes, and every address."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.attributes: set[str] = set()
        self.addresses: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names[tag] += 1
        self.attributes |= {name for name, _ in attrs}
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action")]


def test_csv_has_no_nan_and_nothing_that_a_spreadsheet_runs() -> None:
    result = result_from(old_result(), WHERE)
    for draft in ("=cmd|'/c calc'!A1", "+1", "-1+2", "@SUM(A1)", "\t=1"):
        length = Interval(float("nan"), -1.5, float("inf"))
        cell = replace(result.cells[0], draft=draft, acceptance_length=length, acceptance_per_pos=(0.5, float("nan")))
        header, row = csv_reader.reader(io.StringIO(cells_csv(replace(result, cells=(cell,)))))
        found = dict(zip(header, row, strict=True))
        assert found["draft"] == f"'{draft}"
        assert (found["acceptance_length"], found["acceptance_length_low"], found["acceptance_length_high"]) == (
            "", "-1.5", "",
        )  # fmt: skip
        assert found["acceptance_per_pos"] == "0.5 "


def test_json_on_stdout_has_null_for_nan(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"mean": float("nan"), "all": (1.0, float("inf"))})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {"mean": None, "all": [1.0, None]}


def test_the_page_is_self_contained_and_small(full: Result, drawn: dict[str, Chart]) -> None:
    html = page([full], join([full]), drawn)
    elements = Elements(html)
    assert len(html.encode()) < 1_000_000
    assert elements.names["svg"] == 13
    assert not elements.names.keys() & {"script", "iframe", "img", "object"}
    assert all(address.startswith(("#", "data:")) for address in elements.addresses)
    assert all(
        text in html for text in ("2 of 80 outputs repeat", "NVIDIA H100", "3.50 [3.38, 3.61]", "1–4: 5", "128 KiB")
    )


def test_the_page_of_an_old_file_has_no_empty_parts(old: Result) -> None:
    html = rendered(old)
    assert re.findall(r'<section id="(\w+)"', html) == ["summary", "acceptance", "provenance"]
    assert re.findall(r'<a href="#(\w+)"', html) == ["summary", "acceptance", "provenance"]


def test_hostile_strings_stay_text() -> None:
    def poisoned(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                f"{HOSTILE}{key}" if key in ("math", "vllm", "date") else key: poisoned(v) for key, v in value.items()
            }
        if isinstance(value, list):
            return [poisoned(item) for item in value]
        return value + HOSTILE if isinstance(value, str) else value

    result = full_result()
    result = poisoned(result | {"cells": result["cells"][:2], "speed_models": result["speed_models"][:1]})
    for one in result["cells"]:
        one["memory"]["fixed"] = {"target weights": GIB}
    elements = Elements(rendered(result_from(result, WHERE)))
    assert not elements.names.keys() & {"script", "img"}
    assert not any(name.startswith("on") for name in elements.attributes)
    assert all(address.startswith(("#", "data:")) for address in elements.addresses)


def test_provenance_of_several_files_stands_in_columns() -> None:
    results = [Result((cell(),), {"dtype": "bfloat16", "dataset": {"name": "zoo"}}), Result((cell(),), {"threads": 1})]
    assert provenance_table(results) == [
        ("dtype", ["bfloat16", "–"]),
        ("dataset.name", ["zoo", "–"]),
        ("threads", ["–", "1"]),
    ]


def test_there_are_as_many_colors_as_series() -> None:
    many = tuple(replace(cell(draft=f"draft {i}"), acceptance_per_pos=(0.5,)) for i in range(20))
    html = rendered(Result(many, {}))
    assert len(set(re.findall(r'class="card" style="--color: var\((--series-\d+)\)', html))) == 20
    assert len(set(SERIES_COLORS)) == MOST_SERIES
    assert all(f"--series-{number}: light-dark(" in html for number in range(1, MOST_SERIES + 1))


def test_cells_carry_the_heads_of_their_columns() -> None:
    table = "<table><thead><tr><th>a</th><th class='n'>b <small>c</small></th></tr></thead>"
    html = labelled(f'{table}<tbody><tr class="group"><th>x</th></tr><tr><td>1</td><td class="n">2</td></tr></table>')
    assert '<tr><td data-label="a">1</td><td data-label="b c" class="n">2</td></tr>' in html
    assert '<tr class="group"><th>x</th></tr>' in html


# Two results


def measured(accepted: list[int], **changes: Any) -> Result:
    """A result of as many prompts of ten rounds, with what was accepted of each."""
    prompts = tuple(PromptRecord(str(i), 10, n, 10 + n, 1.0, 10 + n, 2.0) for i, n in enumerate(accepted))
    mean = 1 + sum(accepted) / (10 * len(accepted))
    one = replace(cell(), acceptance_length=Interval(mean, mean - 1, mean + 1), prompts_sha256="p", by_prompt=prompts)
    return Result((replace(one, **changes),), {}, path="x.json")


def test_two_results_are_compared_prompt_by_prompt() -> None:
    """Prompts differ far more than what was gained on each: only the paired interval tells it."""
    before, after = measured([5, 20, 10, 30, 2, 25]), measured([8, 23, 13, 33, 5, 28], draft="b")
    (compared,) = compare(before, after)
    assert compared.gained.mean == pytest.approx(0.3)
    assert compared.gained.bounds == pytest.approx((0.3, 0.3))
    assert compared.faster.above(1)
    assert summary([compared]) == "acceptance lengths are longer at 1 of 1 settings"
    html = rendered(replace(before, path="old.json"), replace(after, path="new.json"))
    assert "new.json against old.json: acceptance lengths are longer at 1 of 1 settings" in html
    assert "+0.30 [+0.30, +0.30] (6)" in html
    assert "a → b" in html
    assert (
        html.index("new.json against") < html.index("<small>old.json</small>") < html.index("<small>new.json</small>")
    )


def test_what_cannot_be_paired_has_no_interval() -> None:
    before = measured([5, 20, 10])
    for other in (measured([5, 20, 10], prompts_sha256="q"), measured([5, 20]), measured([5, 20, 10], by_prompt=None)):
        (compared,) = compare(before, other)
        assert compared.gained.bounds is None
    assert compare(before, measured([5, 20, 10], num_speculative_tokens=9)) == ()
    assert "no setting in common" in summary(())
    same = compare(before, measured([6, 19, 10]))
    assert "no longer and no shorter, as far as these prompts tell, at any of 1" in summary(same)


# Command


@pytest.fixture
def command() -> Callable[..., int]:
    """`draftkit report`; returns the exit code, raises what it raises."""
    app = typer.Typer()
    app.command()(report)

    def run(*arguments: object) -> int:
        return typer.testing.CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False).exit_code

    return run


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "monday.json", tmp_path / "friday.json"]
    for path in paths:
        path.write_text(json.dumps(old_result()))
    return paths


def test_the_command_writes_a_page_and_figures(command: Callable[..., int], files: list[Path], tmp_path: Path) -> None:
    out, folder = tmp_path / "pages" / "report.html", tmp_path / "figures"
    assert command(*files, "--out", out, "--figures", folder) == 0
    assert all(name in out.read_text() for name in ("zoo:eagle, monday.json", "zoo:eagle, friday.json"))
    assert sorted(path.name for path in folder.iterdir()) == [
        "acceptance-by-category.svg",
        "acceptance-by-position.svg",
        "conditional-acceptance-by-position.svg",
    ]
    assert list(out.parent.iterdir()) == [out]


def test_the_command_replaces_nothing_unasked(command: Callable[..., int], files: list[Path], tmp_path: Path) -> None:
    out, folder = tmp_path / "report.html", tmp_path / "figures"
    out.write_text("mine")
    with pytest.raises(DraftkitError, match="--force"):
        command(files[0], "--out", out, "--figures", folder)
    assert out.read_text() == "mine"
    assert not folder.exists()
    assert command(files[0], "--out", out, "--force") == 0
    assert out.read_text() != "mine"
    for _ in range(2):
        assert command(files[0], "--out", out, "--figures", folder) == 0  # its own
    out.write_text(out.read_text() + "mine")
    with pytest.raises(DraftkitError, match="--force"):
        command(files[0], "--out", out)
    figure = folder / "acceptance-by-position.svg"
    drawn = figure.read_text()
    figure.write_text(drawn.replace("svg", "svg mine"))
    with pytest.raises(DraftkitError, match="has not written"):
        command(files[0], "--out", out, "--figures", folder, "--force")
    figure.write_text(drawn)
    (folder / "photograph.png").write_bytes(b"mine")
    with pytest.raises(DraftkitError, match="has not written"):
        command(files[0], "--out", out, "--figures", folder, "--force")
    assert (folder / "photograph.png").read_bytes() == b"mine"


def test_reports_need_no_torch() -> None:
    code = "import sys; from draftkit.report.page import figures, page, series, svg"
    code += "; from draftkit.report.terminal import tables; from draftkit.results import record, saved, settings"
    code += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
