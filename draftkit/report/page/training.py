"""A training run as a page: how the acceptance length and the loss went, and where they disagree."""

from __future__ import annotations

from dataclasses import replace

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from draftkit.io.html import signed
from draftkit.report.page.chart import PALETTE, Chart, Line, linear
from draftkit.report.page.svg import TEMPLATES, svg
from draftkit.train.log import TrainingCurve, ValidatedStep
from draftkit.version import __version__


def training_figures(curve: TrainingCurve) -> dict[str, Chart]:
    """Acceptance length with its interval, and the loss on held-out answers, by step; the best step of each."""
    bounds = [(found.step, found.length.bounds) for found in curve.steps]
    length = Line(
        f"longest at step {curve.longest.step:,}",
        "series-1",
        tuple((found.step, found.length.mean) for found in curve.steps),
        tuple(((step, ends[0]), (step, ends[1])) for step, ends in bounds if ends is not None),
        marker="circle",
    )
    figures = {"acceptance-by-step": _by_step("Acceptance length on held-out answers", length, curve.longest)}
    if curve.lowest is not None:
        loss = Line(
            f"lowest at step {curve.lowest.step:,}",
            "series-2",
            tuple((found.step, found.loss) for found in curve.steps if found.loss is not None),
            marker="square",
        )
        figures["loss-by-step"] = _by_step("Loss on held-out answers", loss, curve.lowest)
    return figures


def _by_step(title: str, line: Line, best: ValidatedStep) -> Chart:
    """A line, and another one up and down at its best step."""
    values = [y for _, y in (*line.points, *(end for ends in line.bars for end in ends))]
    y = linear("", values)
    at = Line(line.name, line.color, ((best.step, y.low), (best.step, y.high)), dash="2 3", width=1.4)
    steps = linear("step", [step for step, _ in line.points], whole=True)
    return Chart(title, steps, y, (at, line), (replace(at, points=()),))


def training_page(curve: TrainingCurve) -> str:
    """The run as one HTML page that needs no network and runs no script."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    html = environment.get_template("training.html").render(
        curve=curve,
        figures=[(figure.title, svg(figure)) for figure in training_figures(curve).values()],
        version=__version__,
        palette=PALETTE,
        stylesheet=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
    )
    return signed(html)
