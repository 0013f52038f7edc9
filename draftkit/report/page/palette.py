"""The colors of the page and of its figures, in light and dark."""

from __future__ import annotations

import colorsys

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
