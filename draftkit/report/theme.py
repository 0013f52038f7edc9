"""How figures look: one palette for the page in light and dark and for PNG files, and what a figure is saved as.

A figure is drawn in the light colors. In the page's SVG each of them becomes a CSS custom property, which the page
sets for light and dark.
"""

from __future__ import annotations

import io
import re
import warnings

import matplotlib
from matplotlib.figure import Figure

from draftkit.report.palette import PALETTE

INK, MUTED, GRID = (PALETTE[name][0] for name in ("ink", "muted", "grid"))
SERIES = [light for name, (light, _) in PALETTE.items() if name.startswith("series")]
MARKERS = "osD^vPX"  # one more than colors, so that no pair of both comes twice for long
PNG_DPI = 220

STYLE = {
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 9,
    "axes.axisbelow": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "figure.constrained_layout.use": True,
    "figure.facecolor": "none",
    "font.family": ["sans-serif"],
    "font.size": 9,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "svg.fonttype": "none",  # text stays text: small, searchable, in the page's font
    "svg.hashsalt": "draftkit",
    "text.color": INK,
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "xtick.color": GRID,
    "xtick.labelcolor": MUTED,
    "xtick.labelsize": 8.5,
    "ytick.color": GRID,
    "ytick.labelcolor": MUTED,
    "ytick.labelsize": 8.5,
}

# A decorator: the function draws in this style.
styled = matplotlib.rc_context(STYLE)  # type: ignore[arg-type]


def svg(figure: Figure) -> str:
    """An `<svg>` element without a size, ids or colors of its own, to stand in a page."""
    text = _saved(figure, "svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}).decode()
    text = text[text.index("<svg") :]
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # names such as axes_1, the same in every figure
    text = re.sub(r"<(metadata|style)\b.*?</\1>", "", text, flags=re.DOTALL)  # a style here would be the whole page's
    text = re.sub(r'^<svg [^>]*?(viewBox="[^"]*")[^>]*>', r'<svg xmlns:xlink="http://www.w3.org/1999/xlink" \1>', text)
    names = {light: name for name, (light, _) in PALETTE.items()}
    return re.sub(
        r"(fill|stroke): (#[0-9a-f]{6})",
        lambda match: f"{match[1]}: var(--{names[match[2]]})" if match[2] in names else match[0],
        text,
    )


def png(figure: Figure) -> bytes:
    """For papers and cards: the light colors on white, so that it can stand on any background."""
    return _saved(figure, "png", dpi=PNG_DPI, facecolor="white")


@styled
def _saved(figure: Figure, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # a browser finds another font
        figure.savefig(buffer, format=format, **options)  # type: ignore[arg-type]
    return buffer.getvalue()
