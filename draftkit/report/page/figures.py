"""The figures of a report. Each is one function from series to a chart, or None where nothing was measured.

They have one panel each, of a size that can be read on a phone; the page sets them beside each other.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from rich.cells import cell_len, set_cell_size

from draftkit.io.html import is_as_written
from draftkit.report.page.chart import MOST_SERIES, Axis, Chart, Line, Point, linear, logarithmic, shares
from draftkit.report.page.series import Series
from draftkit.report.page.svg import MARKERS, svg_file
from draftkit.results.cell import Cell, Interval
from draftkit.results.record import Speedup

HEIGHT = 190
NAME_LENGTH = 44  # in columns of a terminal
WIDE_RANGE = 20  # from there on, an axis of times or speeds is logarithmic
FILES = ("*acceptance-*.svg", "loss-*.svg", "speed-by-*.svg", "throughput-by-batch.svg", "latency-*.svg")
LATENCIES = {"ttft": "Time to first token", "tpot": "Time per output token", "itl": "Time between chunks"}
DASHES = ("", "7 3", "7 3 2 3", "2 3")


def all_figures(series: Sequence[Series]) -> dict[str, Chart]:
    """Every figure that the measurements allow, by its name, in the order of the page."""
    figures = {
        "acceptance-by-position": acceptance_by_position(series),
        "conditional-acceptance-by-position": conditional_acceptance_by_position(series),
        "acceptance-by-context": acceptance_by_context(series),
        "acceptance-by-category": acceptance_by_category(series),
        "acceptance-length-by-k": acceptance_length_by_k(series),
        **{f"speed-by-k-batch-{batch}": speedup_by_k(series, batch) for batch in speedup_concurrencies(series)},
        "throughput-by-batch": throughput_by_batch(series),
        "speed-by-batch": speedup_by_batch(series),
        **{f"latency-{name}": latency_distribution(series, name) for name in LATENCIES},
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def figure_files(figures: Mapping[str, Chart]) -> dict[str, bytes]:
    """Figures as SVG files, by name."""
    return {f"{name}.svg": svg_file(figure) for name, figure in figures.items()}


def holds_figures(folder: Path) -> bool:
    """Whether a folder holds figures of a report, as they were written, and nothing else."""
    return all(any(fnmatchcase(path.name, name) for name in FILES) and is_as_written(path) for path in folder.iterdir())


def acceptance_by_position(series: Sequence[Series]) -> Chart | None:
    """The share of rounds in which the draft token at each position was accepted."""
    return _by_position("Accepted at each position", "share of rounds", series, lambda cell: cell.accepted_at)


def conditional_acceptance_by_position(series: Sequence[Series]) -> Chart | None:
    """The share of those rounds that accepted the position before: how good the draft is at each position."""
    return _by_position(
        "Accepted where the one before was", "share of these rounds", series, lambda cell: cell.accepted_after
    )


def acceptance_by_category(series: Sequence[Series]) -> Chart | None:
    """The acceptance length in each category of prompts, with its interval."""
    categories = sorted(
        {name for one in series for name, interval in one.main.by_category.items() if interval}, reverse=True
    )
    if not categories:
        return None
    lines = []
    for i, one in enumerate(series):
        offset = 0.6 * (0.5 - (i + 0.5) / len(series))
        measured = {name: interval for name, interval in one.main.by_category.items() if interval is not None}
        heights = [categories.index(name) + offset for name in measured]
        lines.append(_intervals(one, list(measured.values()), heights, horizontal=True))
    names = tuple((i, short(name)) for i, name in enumerate(categories))
    return Chart(
        "Acceptance length by category",
        linear("acceptance length", _reached(lines, 0)),
        Axis("", -0.6, len(categories) - 0.4, names, ruled=False),
        tuple(lines),
        _legend(series),
        max(HEIGHT, len(categories) * (16 + 13 * len(series))),
    )


def acceptance_by_context(series: Sequence[Series]) -> Chart | None:
    """The acceptance length against the context, at each draft's first setting; a draft's contexts are one line."""
    of_draft: dict[tuple[str, float], list[Series]] = {}
    for one in series:
        of_draft.setdefault((one.main.draft, one.main.temperature), []).append(one)
    lines = []
    for same in of_draft.values():
        lengths = {one.main.context or 0: found for one in same if (found := one.main.acceptance_length) is not None}
        if len(lengths) > 1:
            named = replace(same[0], name=f"{same[0].main.draft}, T={same[0].main.temperature:g}")
            contexts = sorted(lengths)
            lines.append(_intervals(named, [lengths[at] for at in contexts], contexts))
    if not lines:
        return None
    x = linear("tokens of context", _reached(lines, 0))
    y = linear("acceptance length", _reached(lines, 1))
    return Chart(
        "Acceptance length by context", x, y, tuple(lines), tuple(replace(line, points=(), bars=()) for line in lines)
    )


def acceptance_length_by_k(series: Sequence[Series]) -> Chart | None:
    """The acceptance length against K, at the smallest batch, with its interval."""
    lines = []
    for one in series:
        cells = sorted(one.cells, key=lambda cell: cell.num_speculative_tokens)
        smallest = [cell for cell in cells if cell.concurrency == one.main.concurrency]
        lengths = {cell.num_speculative_tokens: cell.acceptance_length for cell in smallest if cell.acceptance_length}
        lines.append(_intervals(one, list(lengths.values()), list(lengths)))
    if not any(len(line.points) > 1 for line in lines):
        return None
    return _by_k("Acceptance length by K", "acceptance length", lines, _legend(series))


def speedup_concurrencies(series: Sequence[Series]) -> list[int]:
    """The batches at which speed was measured with several K."""
    settings = {
        (cell.concurrency, cell.num_speculative_tokens) for one in series for cell in one.cells if cell.times_faster
    }
    settings |= {(p.concurrency, p.num_speculative_tokens) for one in series if one.model for p in one.model.measured}
    batches = [concurrency for concurrency, _ in settings]
    return sorted({concurrency for concurrency in batches if batches.count(concurrency) > 1})


def speedup_by_k(series: Sequence[Series], concurrency: int) -> Chart:
    """Speed against plain decoding by K at one batch: measured, and by the model."""
    lines = []
    for one in series:
        modelled = _at_batch(one.model.predicted if one.model else (), concurrency)
        measured = measured_speedups(one, concurrency)
        lines += [
            _line(one, [(p.num_speculative_tokens, p.speedup) for p in modelled], marker=""),
            _line(one, [(p.num_speculative_tokens, p.speedup) for p in measured], width=0),
        ]
    return _by_k(
        f"Speed by K, batch {concurrency}",
        "times plain decoding",
        _beside_plain(lines),
        _legend(series, _kinds(series)),
    )


def speedup_by_batch(series: Sequence[Series]) -> Chart | None:
    """Speed against plain decoding by batch, each at the K that is best there: measured, and by the model."""
    batches = {cell.concurrency for one in series for cell in one.cells if cell.times_faster}
    if len(batches) < 2:
        return None
    lines = []
    for one in series:
        predicted = _best_by_batch(one.model.predicted if one.model else ())
        measured = [p for concurrency in sorted(batches) for p in measured_speedups(one, concurrency)]
        lines += [
            _line(one, [(p.concurrency, p.speedup) for p in predicted], marker=""),
            _line(one, [(p.concurrency, p.speedup) for p in _best_by_batch(measured)], width=0),
        ]
    lines = _beside_plain(lines)
    return Chart(
        "Speed by batch, at the best K",
        _batches(lines),
        linear("times plain decoding", _reached(lines, 1)),
        tuple(lines),
        _legend(series, _kinds(series)),
    )


def throughput_by_batch(series: Sequence[Series]) -> Chart | None:
    """Output tokens a second by batch, each at the K that is best there, and those of plain decoding."""
    cells = [cell for one in series for cell in one.cells if cell.tokens_per_second is not None]
    if len({cell.concurrency for cell in cells}) < 2:
        return None
    lines = []
    for one in series:
        best: dict[int, float] = {}
        for cell in one.cells:
            if cell.tokens_per_second is not None:
                best[cell.concurrency] = max(best.get(cell.concurrency, 0), cell.tokens_per_second)
        lines.append(_line(one, sorted(best.items())))
    plain = Line("plain decoding", "muted", dash=DASHES[1], width=1.6)
    baselines = {_baseline(one) for one in series} - {()}  # drafts that were measured together share one
    lines += [replace(plain, points=points) for points in sorted(baselines)]
    return Chart(
        "Output speed by batch, at the best K",
        _batches(lines),
        _spread("output tokens / s", _reached(lines, 1)),
        tuple(lines),
        _legend(series, [plain] if baselines else []),
    )


def latency_distribution(series: Sequence[Series], name: str) -> Chart | None:
    """The share of latencies that are at most so long. `name`: a key of `LATENCIES`."""
    measured = {one.number: getattr(one.main, f"{name}_quantiles_ms") or () for one in series}
    shown = [one for one in series if measured[one.number]]
    if not shown:
        return None
    lines = [
        _line(one, [(time, percent / 100) for percent, time in enumerate(measured[one.number])], marker="")
        for one in shown
    ]
    return Chart(
        LATENCIES[name],
        _spread("milliseconds", _reached(lines, 0)),
        shares("share of all"),
        tuple(lines),
        tuple(replace(line, points=()) for line in lines),
    )


def short(name: str) -> str:
    """A name for a legend or a tick: on one line, not too wide; the end of a path tells more than its middle."""
    visible = "".join("�" if unicodedata.category(character)[0] == "C" else character for character in name)
    if cell_len(visible) <= NAME_LENGTH:
        return visible
    head, tail = NAME_LENGTH // 3, NAME_LENGTH - NAME_LENGTH // 3 - 1
    return f"{set_cell_size(visible, head)}…{set_cell_size(visible[::-1], tail)[::-1]}"


def measured_speedups(one: Series, concurrency: int) -> list[Speedup]:
    """What was measured at a batch, by K: the cells, or what the speed model was compared with."""
    cells = [
        Speedup(cell.concurrency, cell.num_speculative_tokens, cell.times_faster)
        for cell in one.cells
        if cell.concurrency == concurrency and cell.times_faster
    ]
    return _at_batch(cells or (one.model.measured if one.model else ()), concurrency)


def _baseline(one: Series) -> tuple[tuple[int, float], ...]:
    """Output tokens a second of plain decoding by batch."""
    speeds = {cell.concurrency: cell.baseline_tokens_per_second for cell in one.cells}
    return tuple((batch, speed) for batch, speed in sorted(speeds.items()) if speed)


def _at_batch(points: Iterable[Speedup], concurrency: int) -> list[Speedup]:
    return sorted((p for p in points if p.concurrency == concurrency), key=lambda p: p.num_speculative_tokens)


def _best_by_batch(points: Iterable[Speedup]) -> list[Speedup]:
    best: dict[int, Speedup] = {}
    for point in points:
        if point.concurrency not in best or point.speedup > best[point.concurrency].speedup:
            best[point.concurrency] = point
    return [best[concurrency] for concurrency in sorted(best)]


def _by_position(
    title: str, label: str, series: Sequence[Series], rates: Callable[[Cell], Sequence[float | None]]
) -> Chart | None:
    if not any(rates(one.main) for one in series):
        return None
    lines = [
        _line(one, [(position, rate) for position, rate in enumerate(rates(one.main), 1) if rate is not None])
        for one in series
    ]
    positions = linear("position of the draft token", _reached(lines, 0), whole=True)
    return Chart(title, positions, shares(label), tuple(lines), _legend(series))


def _by_k(title: str, label: str, lines: Sequence[Line], legend: tuple[Line, ...]) -> Chart:
    ks = linear("draft tokens a round (K)", _reached(lines, 0), whole=True)
    return Chart(title, ks, linear(label, _reached(lines, 1)), tuple(lines), legend)


def _legend(series: Sequence[Series], kinds: Sequence[Line] = ()) -> tuple[Line, ...]:
    """The legend: the series, then kinds of lines."""
    return (*(_line(one, ()) for one in series), *kinds)


def _kinds(series: Sequence[Series]) -> list[Line]:
    kinds = [Line("measured", "muted", marker="circle", width=0)]
    if any(one.model and one.model.predicted for one in series):
        kinds.append(Line("by the speed model", "muted"))
    return kinds


def _line(one: Series, points: Sequence[Point], *, marker: str | None = None, width: float = 2) -> Line:
    """The line of a series: solid for as many series as there are colors, then dashed."""
    markers = tuple(MARKERS)
    return Line(
        short(one.name),
        f"series-{one.number % MOST_SERIES + 1}",
        tuple(points),
        marker=markers[one.number % len(markers)] if marker is None else marker,
        dash=DASHES[one.number // MOST_SERIES % len(DASHES)],
        width=width,
    )


def _intervals(
    one: Series, intervals: Sequence[Interval], positions: Sequence[float], *, horizontal: bool = False
) -> Line:
    """Means as markers with their intervals as bars, joined unless they lie side by side."""

    def point(value: float, position: float) -> Point:
        return (value, position) if horizontal else (position, value)

    found = list(zip(intervals, positions, strict=True))
    line = _line(one, [point(interval.mean, at) for interval, at in found], width=0 if horizontal else 2)
    bounds = [(interval.bounds, at) for interval, at in found]
    return replace(line, bars=tuple((point(b[0], at), point(b[1], at)) for b, at in bounds if b is not None))


def _reached(lines: Iterable[Line], axis: int) -> list[float]:
    """Every value of lines along the lower axis (0) or the other (1)."""
    return [point[axis] for line in lines for point in (*line.points, *(end for ends in line.bars for end in ends))]


def _beside_plain(lines: Sequence[Line]) -> list[Line]:
    """Lines behind which one shows where plain decoding is."""
    at = _reached(lines, 0)
    return [Line("plain decoding", "muted", ((min(at), 1), (max(at), 1)), width=1.2), *lines]


def _batches(lines: Sequence[Line]) -> Axis:
    batches = sorted(set(_reached(lines, 0)))
    return logarithmic("batch", batches, at=batches)


def _spread(label: str, values: Sequence[float]) -> Axis:
    """A logarithmic axis for values that span a wide range."""
    wide = min(values) > 0 and max(values) > WIDE_RANGE * min(values)
    return logarithmic(label, values) if wide else linear(label, values)
