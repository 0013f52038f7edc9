"""A training run as a page: how the acceptance length and the loss went, and where they part."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from draftkit.report.palette import PALETTE
from draftkit.report.theme import MUTED, SERIES, styled, svg
from draftkit.train.curve import TrainingCurve
from draftkit.version import __version__

TEMPLATES = Path(__file__).with_name("templates")
WIDTH, HEIGHT = 6.4, 3.4  # inches


@styled
def training_figure(curve: TrainingCurve) -> Figure:
    """Acceptance length with its interval, and the loss on held-out answers, by step; the best step of each."""
    figure = Figure(figsize=(WIDTH, HEIGHT))
    axes = figure.add_subplot()
    axes.set_title("Acceptance length and loss on held-out answers")
    axes.set_xlabel("step")
    axes.set_ylabel("acceptance length", color=SERIES[0])
    axes.tick_params(length=0)
    steps = [found.step for found in curve.steps]
    axes.plot(steps, [found.length.mean for found in curve.steps], color=SERIES[0], marker="o")
    bounds = [found.length.bounds or (found.length.mean,) * 2 for found in curve.steps]
    axes.fill_between(
        steps, [low for low, _ in bounds], [high for _, high in bounds], color=SERIES[0], alpha=0.15, linewidth=0
    )
    axes.axvline(curve.longest.step, color=SERIES[0], linestyle=":", linewidth=1.2)
    handles = [
        Line2D([], [], color=SERIES[0], marker="o", label=f"acceptance length, longest at {curve.longest.step:,}")
    ]
    if curve.lowest is not None:
        losses = {found.step: found.loss for found in curve.steps if found.loss is not None}
        other = axes.twinx()
        other.set_ylabel("loss", color=SERIES[1])
        other.tick_params(length=0)
        other.grid(visible=False)
        other.plot(list(losses), list(losses.values()), color=SERIES[1], marker="s")
        other.axvline(curve.lowest.step, color=SERIES[1], linestyle=":", linewidth=1.2)
        handles.append(Line2D([], [], color=SERIES[1], marker="s", label=f"loss, lowest at {curve.lowest.step:,}"))
    figure.legend(handles=handles, loc="outside lower left", ncols=2, borderpad=0.1, labelcolor=MUTED)
    return figure


def training_page(curve: TrainingCurve) -> str:
    """The run as one HTML page that needs no network and runs no script."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template("training.html").render(
        curve=curve,
        figure=Markup(svg(training_figure(curve))),
        version=__version__,
        palette=PALETTE,
        stylesheet=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
    )
