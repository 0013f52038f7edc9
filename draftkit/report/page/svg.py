"""Charts as SVG: in the page, whose colors they take in light and dark, and as files. The template is `chart.svg`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup
from rich.cells import cell_len

from draftkit.io.html import signed
from draftkit.report.page.chart import PALETTE, Chart, Line, Point, Tick

TEMPLATES = Path(__file__).with_name("templates")
WIDTH, TOP, ROW = 400, 30, 18
LETTER = 6.6  # how wide one is, about
HANDLE = 30  # the line or marker beside a name in the legend
# Around a point, in the order in which series take them; one more than colors, so that few pairs of both come twice.
MARKERS = {
    "circle": "M-3.5,0a3.5,3.5 0 1 0 7,0a3.5,3.5 0 1 0 -7,0z",
    "square": "M-3.2,-3.2h6.4v6.4h-6.4z",
    "diamond": "M0,-4.6l4,4.6l-4,4.6l-4,-4.6z",
    "up": "M0,-4.4l4.2,7.4h-8.4z",
    "down": "M0,4.4l-4.2,-7.4h8.4z",
    "cross": "M-1.3,-4h2.6v2.7h2.7v2.6h-2.7v2.7h-2.6v-2.7h-2.7v-2.6h2.7z",
    "bar": "M-4.4,-1.5h8.8v3h-8.8z",
}


@dataclass(frozen=True)
class Frame:
    """Where things of a chart lie, in pixels from its upper left corner."""

    chart: Chart

    @property
    def left(self) -> float:
        widest = max((cell_len(text) for _, text in self.chart.y.ticks), default=0)
        return 8 + (ROW if self.chart.y.label else 0) + LETTER * widest

    @property
    def right(self) -> float:
        return WIDTH - 12

    @property
    def bottom(self) -> float:
        return TOP + self.chart.height

    @property
    def columns(self) -> int:
        """The columns of the legend."""
        return 1 if max(cell_len(line.name) for line in self.chart.legend) > 22 else 2

    @property
    def height(self) -> float:
        return self.bottom + 2.6 * ROW + ROW * -(-len(self.chart.legend) // self.columns)

    def x(self, value: float) -> float:
        return round(self.left + (self.right - self.left) * self.chart.x.share(value), 1)

    def y(self, value: float) -> float:
        return round(self.bottom - self.chart.height * self.chart.y.share(value), 1)

    def path(self, points: Sequence[Point]) -> str:
        return "M" + "L".join(f"{self.x(x)},{self.y(y)}" for x, y in points)

    def x_ticks(self) -> Iterator[Tick]:
        """The ticks of the lower axis whose texts do not overlap."""
        end = float("-inf")
        for value, text in self.chart.x.ticks:
            half = LETTER * cell_len(text) / 2
            if self.x(value) - half > end:
                end = self.x(value) + half + 4
                yield value, text

    def legend(self) -> Iterator[tuple[float, float, Line]]:
        """Each entry with the place of its handle, row by row."""
        for i, line in enumerate(self.chart.legend):
            yield 8 + i % self.columns * WIDTH / 2, self.bottom + ROW * (2.9 + i // self.columns), line


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template("chart.svg")


def svg(chart: Chart) -> Markup:
    """An `<svg>` element without a size or colors of its own, to stand in a page."""
    frame = Frame(chart)
    return Markup(_template().render(chart=chart, frame=frame, width=WIDTH, handle=HANDLE, markers=MARKERS))


def svg_file(chart: Chart) -> bytes:
    """The chart as a file for papers and cards: in the light colors, on white."""
    colored = re.sub(r"var\(--([\w-]+)\)", lambda match: PALETTE[match[1]][0], svg(chart))
    head, end, rest = colored.partition(">")
    white = f'{head} style="background: white"{end}\n<rect width="100%" height="100%" fill="white"/>{rest}'
    return signed(white).encode()
