"""The figures of a report. Each is one function from series to a matplotlib figure, or None where nothing was measured.

They have one panel each, of a size that can be read on a phone; the page sets them beside each other.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from draftkit.report.series import Series
from draftkit.report.theme import GRID, MARKERS, MUTED, SERIES, png, styled
from draftkit.results.record import Cell, Interval, Speedup

Dash = Literal["-", "--", "-.", ":", ""]

WIDTH, HEIGHT = 4.4, 3.1  # inches
NAME_LENGTH = 44
WIDE_RANGE = 20  # from there on, an axis of times or speeds is logarithmic
FILES = ("*acceptance-*.png", "speed-by-*.png", "throughput-by-batch.png", "latency-*.png")  # of `all_figures`
LATENCIES = {"ttft": "Time to first token", "tpot": "Time per output token", "itl": "Time between chunks"}


def all_figures(series: Sequence[Series]) -> dict[str, Figure]:
    """Every figure that the measurements allow, by its name, in the order of the page."""
    figures = {
        "acceptance-by-position": acceptance_by_position(series),
        "conditional-acceptance-by-position": conditional_acceptance_by_position(series),
        "acceptance-by-category": acceptance_by_category(series),
        "acceptance-length-by-k": acceptance_length_by_k(series),
        **{f"speed-by-k-batch-{batch}": speedup_by_k(series, batch) for batch in speedup_concurrencies(series)},
        "throughput-by-batch": throughput_by_batch(series),
        "speed-by-batch": speedup_by_batch(series),
        **{f"latency-{name}": latency_distribution(series, name) for name in LATENCIES},
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def save_figures(figures: Mapping[str, Figure], folder: Path) -> list[Path]:
    """Write figures as PNG files into a folder."""
    paths = [folder / f"{name}.png" for name in figures]
    for path, figure in zip(paths, figures.values(), strict=True):
        path.write_bytes(png(figure))
    return paths


def holds_figures(folder: Path) -> bool:
    """Whether a folder holds figures of a report and nothing else."""
    return all(any(fnmatchcase(path.name, name) for name in FILES) for path in folder.iterdir())


def acceptance_by_position(series: Sequence[Series]) -> Figure | None:
    """Accepted draft tokens at each position / rounds."""
    return _by_position("Accepted at each position", "share of rounds", series, lambda cell: cell.accepted_at)


def conditional_acceptance_by_position(series: Sequence[Series]) -> Figure | None:
    """The same over the rounds in which the position before was accepted: how good the draft is there."""
    return _by_position(
        "Accepted where the one before was", "share of these rounds", series, lambda cell: cell.accepted_after
    )


def acceptance_by_category(series: Sequence[Series]) -> Figure | None:
    """The acceptance length in each category of prompts, with its interval."""
    categories = sorted({category for one in series for category in one.main.by_category}, reverse=True)
    if not categories:
        return None
    height = max(HEIGHT, 1.2 + len(categories) * (0.16 + 0.13 * len(series)))
    axes = _axes("Acceptance length by category", "acceptance length", "", height)
    for i, one in enumerate(series):
        offset = 0.6 * (0.5 - (i + 0.5) / len(series))
        measured = {name: interval for name, interval in one.main.by_category.items() if interval is not None}
        heights = [categories.index(name) + offset for name in measured]
        _intervals(axes, one, measured.values(), heights, horizontal=True)
    axes.set_yticks(range(len(categories)), [short(name) for name in categories])
    axes.set_ylim(-0.6, len(categories) - 0.4)
    axes.grid(axis="y", visible=False)
    return _with_legend(axes, series)


def acceptance_length_by_k(series: Sequence[Series]) -> Figure | None:
    """The acceptance length against K, at the smallest batch, with its interval."""
    drawn = {one.number: _sweep(one, lambda cell: cell.num_speculative_tokens) for one in series}
    if not any(len(cells) > 1 for cells in drawn.values()):
        return None
    axes = _axes("Acceptance length by K", "draft tokens a round (K)", "acceptance length")
    for one in series:
        lengths = {c.num_speculative_tokens: c.acceptance_length for c in drawn[one.number] if c.acceptance_length}
        _intervals(axes, one, lengths.values(), list(lengths), linestyle=_dash(one))
    _whole_numbers(axes)
    return _with_legend(axes, series)


def speedup_concurrencies(series: Sequence[Series]) -> list[int]:
    """The batches at which speed was measured with several K."""
    settings = {
        (cell.concurrency, cell.num_speculative_tokens) for one in series for cell in one.cells if cell.times_faster
    }
    settings |= {(p.concurrency, p.num_speculative_tokens) for one in series if one.model for p in one.model.measured}
    batches = [concurrency for concurrency, _ in settings]
    return sorted({concurrency for concurrency in batches if batches.count(concurrency) > 1})


def speedup_by_k(series: Sequence[Series], concurrency: int) -> Figure:
    """Speed against plain decoding by K at one batch: measured, by the model, and if all were accepted."""
    axes = _axes(f"Speed by K, batch {concurrency}", "draft tokens a round (K)", "times plain decoding")
    axes.axhline(1, color=MUTED, linewidth=1)
    for one in series:
        modelled = _at_batch(one.model.predicted if one.model else (), concurrency)
        ideal = [(p.num_speculative_tokens, p.ideal_speedup) for p in modelled if p.ideal_speedup is not None]
        _line(axes, one, [(p.num_speculative_tokens, p.speedup) for p in modelled])
        _line(axes, one, ideal, linestyle=":", linewidth=1.2)
        _points(axes, one, [(p.num_speculative_tokens, p.speedup) for p in measured_speedups(one, concurrency)])
    _whole_numbers(axes)
    return _with_legend(axes, series, _kinds(series))


def speedup_by_batch(series: Sequence[Series]) -> Figure | None:
    """Speed against plain decoding by batch, each at the K that is best there: measured, and by the model."""
    batches = {cell.concurrency for one in series for cell in one.cells if cell.times_faster}
    if len(batches) < 2:
        return None
    axes = _axes("Speed by batch, at the best K", "batch", "times plain decoding")
    axes.axhline(1, color=MUTED, linewidth=1)
    for one in series:
        predicted = _best_by_batch(one.model.predicted if one.model else ())
        _line(axes, one, [(p.concurrency, p.speedup) for p in predicted])
        measured = [p for concurrency in sorted(batches) for p in measured_speedups(one, concurrency)]
        _points(axes, one, [(p.concurrency, p.speedup) for p in _best_by_batch(measured)])
        batches |= {p.concurrency for p in predicted}
    _batch_axis(axes, batches)
    return _with_legend(axes, series, [kind for kind in _kinds(series) if kind.get_linestyle() != ":"])


def throughput_by_batch(series: Sequence[Series]) -> Figure | None:
    """Output tokens a second by batch, each at the K that is best there, and those of plain decoding."""
    cells = [cell for one in series for cell in one.cells if cell.tokens_per_second is not None]
    batches = {cell.concurrency for cell in cells}
    if len(batches) < 2:
        return None
    axes = _axes("Output speed by batch, at the best K", "batch", "output tokens / s")
    for one in series:
        best: dict[int, float] = {}
        for cell in one.cells:
            if cell.tokens_per_second is not None:
                best[cell.concurrency] = max(best.get(cell.concurrency, 0), cell.tokens_per_second)
        _points(axes, one, sorted(best.items()), linestyle=_dash(one))
    baselines = {_baseline(one) for one in series} - {()}  # drafts that were measured together share one
    for plain in sorted(baselines):
        axes.plot(*zip(*plain, strict=True), color=MUTED, linestyle="--", linewidth=1.4)
    _batch_axis(axes, batches)
    _spread(axes, "y", [cell.tokens_per_second for cell in cells if cell.tokens_per_second is not None])
    kinds = [Line2D([], [], color=MUTED, linestyle="--", linewidth=1.4, label="plain decoding")]
    return _with_legend(axes, series, kinds if baselines else [])


def latency_distribution(series: Sequence[Series], name: str) -> Figure | None:
    """Which share of times is at most so long. `name`: a key of `LATENCIES`."""
    measured = {one.number: getattr(one.main, f"{name}_quantiles_ms") for one in series}
    times = [time for quantiles in measured.values() for time in quantiles or ()]
    if not times:
        return None
    axes = _axes(LATENCIES[name], "milliseconds", "share of all, %")
    for one in series:
        if quantiles := measured[one.number]:
            axes.plot(quantiles, range(len(quantiles)), color=_color(one), linestyle=_dash(one))
    _spread(axes, "x", times)
    axes.set_ylim(0, 100)
    return _with_legend(axes, [one for one in series if measured[one.number]], [])


def short(name: str) -> str:
    """A name for a legend or a tick: on one line, not too long; the end of a path tells more than its middle."""
    visible = "".join("�" if unicodedata.category(character)[0] == "C" else character for character in name)
    if len(visible) <= NAME_LENGTH:
        return visible
    return f"{visible[: NAME_LENGTH // 3]}…{visible[1 - NAME_LENGTH + NAME_LENGTH // 3 :]}"


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


def _sweep(one: Series, setting: Callable[[Cell], int]) -> list[Cell]:
    """The cells of a series at its smallest batch, in the order of a setting."""
    return sorted((cell for cell in one.cells if cell.concurrency == one.main.concurrency), key=setting)


def _by_position(
    title: str, label: str, series: Sequence[Series], rates: Callable[[Cell], Sequence[float | None]]
) -> Figure | None:
    if not any(rates(one.main) for one in series):
        return None
    axes = _axes(title, "position of the draft token", label)
    for one in series:
        points = [(position, rate) for position, rate in enumerate(rates(one.main), 1) if rate is not None]
        _points(axes, one, points, linestyle=_dash(one))
    _whole_numbers(axes)
    axes.set_ylim(0, 1.02)
    return _with_legend(axes, series)


@styled
def _axes(title: str, x: str, y: str, height: float = HEIGHT) -> Axes:
    axes = Figure(figsize=(WIDTH, height)).add_subplot()
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.tick_params(length=0)
    return axes


@styled
def _with_legend(axes: Axes, series: Sequence[Series], kinds: Sequence[Line2D] = ()) -> Figure:
    """The figure, with a legend below it: the series, then kinds of lines."""
    handles = [
        Line2D([], [], color=_color(one), linestyle=_dash(one), marker=_marker(one), label=short(one.name))
        for one in series
    ]
    columns = 1 if max(len(short(one.name)) for one in series) > 22 else 2
    if kinds and columns == 2:  # a column for each
        handles += [Line2D([], [], linestyle="", label=" ")] * (len(kinds) - len(series))
    handles += kinds
    figure = axes.get_figure(root=True)
    assert isinstance(figure, Figure)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.19 * -(-len(handles) // columns))
    figure.legend(handles=handles, loc="outside lower left", ncols=columns, borderpad=0.1, handlelength=1.9)
    return figure


def _kinds(series: Sequence[Series]) -> list[Line2D]:
    kinds = [Line2D([], [], color=MUTED, linestyle="", marker="o", label="measured")]
    if any(one.model and one.model.predicted for one in series):
        kinds.append(Line2D([], [], color=MUTED, label="by the speed model"))
        if any(p.ideal_speedup is not None for one in series if one.model for p in one.model.predicted):
            kinds.append(Line2D([], [], color=MUTED, linestyle=":", linewidth=1.2, label="if all were accepted"))
    return kinds


def _points(axes: Axes, one: Series, points: Sequence[tuple[float, float]], linestyle: Dash = "") -> None:
    if points:
        axes.plot(*zip(*points, strict=True), color=_color(one), linestyle=linestyle, marker=_marker(one))


def _line(
    axes: Axes, one: Series, points: Sequence[tuple[float, float]], linestyle: Dash = "-", linewidth: float = 1.8
) -> None:
    if points:
        axes.plot(*zip(*points, strict=True), color=_color(one), linestyle=linestyle, linewidth=linewidth)


def _intervals(
    axes: Axes,
    one: Series,
    intervals: Iterable[Interval],
    positions: Sequence[float],
    *,
    horizontal: bool = False,
    linestyle: Dash = "",
) -> ErrorbarContainer:
    """Means as markers with their intervals as bars."""
    found = list(intervals)
    means = [interval.mean for interval in found]
    bounds = [i.bounds or (i.mean, i.mean) for i in found]
    reach = [
        [max(i.mean - low, 0) for i, (low, _) in zip(found, bounds, strict=True)],
        [max(high - i.mean, 0) for i, (_, high) in zip(found, bounds, strict=True)],
    ]
    x, y = (means, positions) if horizontal else (positions, means)
    return axes.errorbar(
        x,
        y,
        xerr=reach if horizontal else None,
        yerr=None if horizontal else reach,
        color=_color(one),
        marker=_marker(one),
        linestyle=linestyle,
        elinewidth=1.2,
        capsize=2,
    )


def _whole_numbers(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _spread(axes: Axes, axis: Literal["x", "y"], values: Sequence[float]) -> None:
    """A logarithmic scale for values that span a wide range."""
    if min(values) > 0 and max(values) > WIDE_RANGE * min(values):
        axes.set(**{f"{axis}scale": "log"})
        numbers = axes.xaxis if axis == "x" else axes.yaxis
        numbers.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        numbers.set_minor_formatter(NullFormatter())


def _batch_axis(axes: Axes, batches: Iterable[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(batches), [str(batch) for batch in sorted(batches)])
    axes.minorticks_off()
    axes.spines["bottom"].set_color(GRID)


def _color(one: Series) -> str:
    return SERIES[one.number % len(SERIES)]


def _marker(one: Series) -> str:
    return MARKERS[one.number % len(MARKERS)]


def _dash(one: Series) -> Dash:
    """Solid for as many series as there are colors, then dashed."""
    dashes: tuple[Dash, ...] = ("-", "--", "-.", ":")
    return dashes[one.number // len(SERIES) % len(dashes)]
