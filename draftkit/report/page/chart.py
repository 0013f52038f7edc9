"""What a figure shows, whatever draws it: axes, and lines of points in the colors of the page."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Point = tuple[float, float]
Tick = tuple[float, str]  # a value of an axis, and the text beside it

MOST_TICKS = 6
MARGIN = 0.04  # of an axis, beyond the outermost values


@dataclass(frozen=True)
class Axis:
    """An axis from `low` to `high`. `ruled`: whether a line crosses the figure at each tick."""

    label: str
    low: float
    high: float
    ticks: tuple[Tick, ...]
    logarithmic: bool = False
    ruled: bool = True

    def share(self, value: float) -> float:
        """Where a value lies: 0 at the beginning, 1 at the end."""
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return (value - low) / (high - low)


@dataclass(frozen=True)
class Line:
    """Points of one color, a name of the palette. `bars`: the ends of each interval.

    `marker`: a name of `svg.MARKERS`, none if empty; `dash`: as in SVG, solid if empty; `width` 0: markers alone.
    """

    name: str
    color: str
    points: tuple[Point, ...] = ()
    bars: tuple[tuple[Point, Point], ...] = ()
    marker: str = ""
    dash: str = ""
    width: float = 2


@dataclass(frozen=True)
class Chart:
    """`legend`: lines of which only the look and the name count. `height`: of what the axes enclose."""

    title: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...]
    legend: tuple[Line, ...]
    height: float = 190


def linear(label: str, values: Iterable[float], *, whole: bool = False) -> Axis:
    """An axis that holds all values; `whole`: with ticks at whole numbers only."""
    found = list(values)
    low, high = min(found), max(found)
    margin = MARGIN * (high - low) or 0.5
    step = _step(high - low or 1)
    step = max(step, 1) if whole else step
    low, high = low - margin, high + margin
    return Axis(label, low, high, tuple(_ticks(low, high, step)))


def shares(label: str) -> Axis:
    """An axis of shares, from nothing to all."""
    return Axis(label, 0, 1, tuple(_ticks(0, 1, 0.2)))


def logarithmic(label: str, values: Iterable[float], at: Sequence[float] = ()) -> Axis:
    """A logarithmic axis for positive values, with ticks `at` values, or at 1, 2 and 5 times powers of ten."""
    found = [math.log10(value) for value in values]
    margin = MARGIN * (max(found) - min(found)) or 0.1
    low, high = min(found) - margin, max(found) + margin
    if not at:
        powers = [10.0**power for power in range(math.floor(low), math.ceil(high) + 1)]
        at = [power * times for power in powers for times in ((1, 2, 5) if high - low < 3 else (1,))]
    low, high = 10**low, 10**high
    return Axis(label, low, high, tuple((v, f"{v:,g}") for v in at if low <= v <= high), logarithmic=True)


def _step(span: float) -> float:
    """The least of 1, 2 and 5 times a power of ten that divides a span into no more than `MOST_TICKS`."""
    power = 10.0 ** math.floor(math.log10(span / MOST_TICKS))
    return next(power * times for times in (1, 2, 5, 10) if power * times * MOST_TICKS >= span * (1 - 1e-9))


def _ticks(low: float, high: float, step: float) -> Iterable[Tick]:
    """The multiples of a step on an axis; one that rounding puts beyond an end lies at the end."""
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1):
        yield min(max(i * step, low), high), f"{i * step:,.{digits}f}"


MOST_SERIES = 36  # told apart by color; then they begin anew

# Colors of series are Okabe and Ito's, which color-blind readers tell apart, shaded for contrast with the background.
_FIRST = (
    ("#0072b2", "#56b4e9"),
    ("#c04f00", "#f0803c"),
    ("#009e73", "#2fc79c"),
    ("#aa4499", "#dd8fcb"),
    ("#b58900", "#f0c340"),
    ("#64748b", "#a9b8cc"),
)


def _further(number: int) -> tuple[str, str]:
    """Hues as far apart as they can be whatever their number is (the golden angle), in two saturations by turns."""
    hue, saturation = number * 0.618034 % 1, (0.75, 0.45)[number % 2]

    def color(lightness: float) -> str:
        parts = colorsys.hls_to_rgb(hue, lightness, saturation)
        return "#" + "".join(f"{round(255 * part):02x}" for part in parts)

    return color(0.36), color(0.70)


SERIES_COLORS = (*_FIRST, *(_further(number) for number in range(MOST_SERIES - len(_FIRST))))
PALETTE = {
    "ink": ("#1f2530", "#e4e7ec"),
    "muted": ("#5b6472", "#9aa4b2"),
    "grid": ("#dfe3e9", "#333a45"),
    **{f"series-{number}": colors for number, colors in enumerate(SERIES_COLORS, start=1)},
}
