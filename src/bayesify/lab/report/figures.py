"""How figures look: drawn in the page's light colours, as SVG whose colours are then the page's own, and as PNG."""

from __future__ import annotations

import io
import re
from html import escape
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

INK, SOFT, LINE = "#1b1f24", "#59626e", "#d8dce2"
SERIES = ("#1f6fb2", "#c8541c", "#22805a", "#8a4fa8", "#a3720a", "#b8336a", "#3d7f8c", "#6b6f76")
"""The page's light colours, for which `as_svg` puts in CSS variables, so that figures suit dark pages too."""
VARIABLES = {INK: "--ink", SOFT: "--soft", LINE: "--line"} | {c: f"--series-{i}" for i, c in enumerate(SERIES)}
STYLES = ("-", "--", "-.", ":")
STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": SOFT,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "grid.color": LINE,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "text.parse_math": False,
    "axes.formatter.useoffset": False,
}
DOTS = 200
"""A PNG has so many dots per inch: two for each of a screen's pixels."""
COLOURS = 128
"""A PNG has so many colours, which smooth lines and text don't exceed visibly; it makes the page a third as long."""


def look(i: int) -> dict[str, Any]:
    """The colour and the dashes of the i-th model's line; no two of the first 32 have both in common.

    >>> look(0) == look(8), look(1)["color"] == look(9)["color"]
    (False, True)
    """
    return {"color": SERIES[i % len(SERIES)], "linestyle": STYLES[(i // 2 + i // len(SERIES)) % len(STYLES)]}


def labelled(name: str) -> str:
    """A name for a legend, in which matplotlib leaves out those that begin with an underscore.

    >>> labelled("Rank1"), labelled("_mine")
    ('Rank1', ' _mine')
    """
    return f" {name}" if name.startswith("_") else name


def sized(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of so many inches, with one pair of axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def as_svg(figure: Figure, key: str, alt: str, *, legend: bool = True) -> str:
    """The figure as an element for a page; `key` makes its ids unique there, `alt` says what it shows.

    Without the legend, where the page has one for several figures.
    """
    legends, figure.legends = figure.legends, figure.legends if legend else []
    buffer = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": key}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    figure.legends = legends
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{key}-", text)
    text = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", text)  # the page's own font
    text = re.sub(r"font-family: [^;\"]*;?", "", text)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return text.replace("<svg ", f'<svg role="img" aria-label="{escape(alt, quote=True)}" ', 1)


def as_png(figure: Figure) -> bytes:
    """The figure with its legend as a PNG file, on white, at twice the resolution of a screen."""
    drawn, small = io.BytesIO(), io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(drawn, format="png", dpi=DOTS, facecolor="white")
    Image.open(drawn).convert("RGB").quantize(COLOURS).save(small, "PNG", optimize=True, dpi=(DOTS, DOTS))
    return small.getvalue()
