"""Training runs as a page: how acceptance length, losses and speed went, where they disagree, and which run is best."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from draftkit.hub.local_paths import named
from draftkit.io.html import signed
from draftkit.report.page.chart import MOST_SERIES, PALETTE, Chart, Line, linear
from draftkit.report.page.page import labelled
from draftkit.report.page.svg import MARKERS, TEMPLATES, svg
from draftkit.train.log import FEW, TrainingCurve, ValidatedStep, too_few
from draftkit.version import __version__

ASKED = ("recipe", "target", "draft", "data")  # settings that are shown even where runs agree on them
PLACES = ("out",)  # and those that say nothing


@dataclass(frozen=True)
class DrawnRun:
    """A run as the page draws it: its curve, the name and color that it has in every figure."""

    curve: TrainingCurve
    name: str
    color: str
    marker: str

    def line(self, points: Iterable[tuple[float, float | None]], name: str = "") -> Line:
        known = tuple((x, y) for x, y in points if y is not None)
        return Line(name or self.name, self.color, known, marker=self.marker)


def drawn_runs(curves: Sequence[TrainingCurve]) -> list[DrawnRun]:
    """The runs by the names of their folders, or by their paths where two folders are called the same."""
    names = [curve.run.name for curve in curves]
    if len(set(names)) < len(names):
        names = [curve.run.as_posix() for curve in curves]
    markers = tuple(MARKERS)
    return [
        DrawnRun(curve, name, f"series-{number % MOST_SERIES + 1}", markers[number % len(markers)])
        for number, (curve, name) in enumerate(zip(curves, names, strict=True))
    ]


def training_figures(curves: Sequence[TrainingCurve]) -> dict[str, Chart]:
    """By step: acceptance length with its interval and loss on held-out answers, the best step of each run marked;
    training loss, learning rate and speed. Of several runs acceptance length by tokens and processor time too, as their
    steps may be of different sizes."""
    runs = drawn_runs(curves)
    compared = (
        {"acceptance-by-tokens": by_tokens(runs), "acceptance-by-processor-time": by_processor_time(runs)}
        if len(runs) > 1
        else {}
    )
    found = {
        "acceptance-by-step": _best("Acceptance length on held-out answers", runs, _length, lambda c: c.longest),
        **compared,
        "loss-by-step": _best("Loss on held-out answers", runs, _held_out_loss, lambda c: c.lowest),
        "training-loss-by-step": _logged("Training loss", runs, "loss"),
        "learning-rate-by-step": _logged("Learning rate", runs, "learning_rate"),
        "speed-by-step": _logged("Tokens a second", runs, "tokens_per_second"),
    }
    return {name: chart for name, chart in found.items() if chart is not None}


def _length(run: DrawnRun, place: Callable[[ValidatedStep], float | None] = lambda found: found.step) -> Line:
    """The acceptance length with its interval, where each validation has its `place`."""
    known = [(x, found.length) for found in run.curve.steps if (x := place(found)) is not None]
    bars = tuple(((x, ends[0]), (x, ends[1])) for x, length in known if (ends := length.bounds) is not None)
    return replace(run.line((x, length.mean) for x, length in known), bars=bars)


def by_tokens(runs: Iterable[DrawnRun]) -> Chart | None:
    """Acceptance length by tokens."""
    lines = [_length(run, lambda at: None if at.tokens is None else at.tokens / 1e6) for run in runs]
    return _chart("Acceptance length by tokens", lines, "million tokens", whole=False)


def by_processor_time(runs: Iterable[DrawnRun]) -> Chart | None:
    """Acceptance length by processor time."""
    lines = [
        _length(run, lambda at: None if at.processor_seconds is None else at.processor_seconds / 3600) for run in runs
    ]
    return _chart("Acceptance length by processor time", lines, "hours of processor time", whole=False)


def _held_out_loss(run: DrawnRun) -> Line:
    return run.line((found.step, found.loss) for found in run.curve.steps)


def _best(
    title: str,
    runs: list[DrawnRun],
    line_of: Callable[[DrawnRun], Line],
    best_of: Callable[[TrainingCurve], ValidatedStep | None],
) -> Chart | None:
    """A line for each run, and another up and down at its best step, which the legend names."""
    lines = [(run, line_of(run), best_of(run.curve)) for run in runs]
    chart = _chart(title, [line for _, line, _ in lines])
    if chart is None:
        return None
    at = [
        Line(f"{run.name}: best at step {best.step:,}", run.color, _upright(best.step, chart), dash="2 3", width=1.4)
        for run, _, best in lines
        if best is not None
    ]
    return replace(chart, lines=(*at, *chart.lines), legend=tuple(replace(one, points=()) for one in at))


def _upright(step: float, chart: Chart) -> tuple[tuple[float, float], ...]:
    return ((step, chart.y.low), (step, chart.y.high))


def _logged(title: str, runs: list[DrawnRun], name: str) -> Chart | None:
    """What the lines of the logs say under a name."""
    lines = [replace(run.line((at.step, getattr(at, name)) for at in run.curve.logged), marker="") for run in runs]
    return _chart(title, lines)


def _chart(title: str, lines: Sequence[Line], label: str = "step", *, whole: bool = True) -> Chart | None:
    """Lines by step, or by what `label` says, at `whole` numbers or not; None where nothing is known of them."""
    drawn = tuple(line for line in lines if line.points)
    if not drawn:
        return None
    values = [y for line in drawn for _, y in (*line.points, *(end for ends in line.bars for end in ends))]
    places = [x for line in drawn for x, _ in line.points]
    legend = tuple(replace(line, points=(), bars=()) for line in drawn)
    return Chart(title, linear(label, places, whole=whole), linear("", values), drawn, legend)


def comparison(curves: Sequence[TrainingCurve]) -> list[tuple[str, list[str]]]:
    """A row for each thing that runs are compared by, with its value in each: what they found, then the settings that
    differ or that everybody asks for."""
    return [*_found(curves), *_settings(curves)]


def _found(curves: Sequence[TrainingCurve]) -> Iterator[tuple[str, list[str]]]:
    yield "longest acceptance length", [_length_of(curve.longest) for curve in curves]
    yield "at step", [f"{curve.longest.step:,} of {curve.steps[-1].step:,}" for curve in curves]
    documents = [curve.longest.length.prompts for curve in curves]
    yield "held-out documents", ["–" if count is None else f"{count:,}" for count in documents]
    yield (
        "lowest loss, held out",
        [_or_none(lowest.loss if lowest else None, ".4f") for lowest in (curve.lowest for curve in curves)],
    )
    last = [curve.logged[-1:] for curve in curves]
    yield "last training loss", [_or_none(next((at.loss for at in end), None), ".4f") for end in last]
    yield "tokens a second", [_or_none(next((at.tokens_per_second for at in end), None), ",.0f") for end in last]


def _length_of(found: ValidatedStep) -> str:
    bounds = found.length.bounds
    return f"{found.length.mean:.3f}" + ("" if bounds is None else " [{:.3f}, {:.3f}]".format(*bounds))


def _or_none(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _settings(curves: Sequence[TrainingCurve]) -> Iterator[tuple[str, list[str]]]:
    names = dict.fromkeys((*ASKED, *(name for curve in curves for name in curve.settings)))
    for name in names:
        values = [str(named(curve.settings.get(name, "–"))) for curve in curves]
        if name not in PLACES and (name in ASKED or len(set(values)) > 1) and set(values) - {"–", ""}:
            yield name, values


def summary(curves: Sequence[TrainingCurve]) -> str:
    """One run's own; of several, which has the longest acceptance length, and whether the intervals tell it from the
    next."""
    if len(curves) == 1:
        return curves[0].summary
    runs = sorted(drawn_runs(curves), key=lambda run: run.curve.longest.length.mean, reverse=True)
    best, second = (run.curve.longest for run in runs[:2])
    said = f"{runs[0].name} has the longest acceptance length, {_length_of(best)}; {runs[1].name} {_length_of(second)}"
    if best.length.bounds is None or second.length.bounds is None:
        said += "."
    elif best.length.overlaps(second.length):
        said += ": the intervals overlap, so that this may be chance."
    else:
        said += ": the intervals are apart."
    judges = min((run.longest.length.prompts or FEW for run in curves), default=FEW)
    return said if judges >= FEW else f"{said} {too_few(judges)}"


def training_page(curves: Sequence[TrainingCurve]) -> str:
    """The runs as one HTML page that needs no network and runs no script."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    runs = drawn_runs(curves)
    html = environment.get_template("training.html").render(
        title=" · ".join(run.name for run in runs),
        runs=runs,
        summary=summary(curves),
        comparison=comparison(curves),
        figures=[(figure.title, svg(figure)) for figure in training_figures(curves).values()],
        version=__version__,
        palette=PALETTE,
        stylesheet=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
    )
    return signed(labelled(html))
