"""How figures look, and their output as SVG in the colours of the page, and as PNG."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from html import escape
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

INK, SOFT, LINE = "#1b1f24", "#59626e", "#d8dce2"
SERIES = ("#1f6fb2", "#c8541c", "#22805a", "#8a4fa8", "#a3720a", "#b8336a", "#3d7f8c", "#6b6f76")
"""The colours of the light page. `as_svg` replaces them by CSS variables, so that figures work in dark mode too."""
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
"""Dots per inch of a PNG: twice the resolution of a screen."""
COLOURS = 128
"""The number of colours of a PNG: enough for smooth lines, and it makes the page a third of the size."""


def line_style(i: int) -> dict[str, Any]:
    """The colour and line style of the i-th model; the first 32 are all different.

    >>> line_style(0) == line_style(8), line_style(1)["color"] == line_style(9)["color"]
    (False, True)
    """
    return {"color": SERIES[i % len(SERIES)], "linestyle": STYLES[(i // 2 + i // len(SERIES)) % len(STYLES)]}


def legend_label(name: str) -> str:
    """A name for a legend, from which matplotlib omits names that begin with an underscore.

    >>> legend_label("Rank1"), legend_label("_mine")
    ('Rank1', ' _mine')
    """
    return f" {name}" if name.startswith("_") else name


class HoverFigure(Figure):
    """A figure with texts that its SVG shows when the pointer is over a bar or a strip."""

    def __init__(self, width: float, height: float, layout: Literal["constrained"] | None = "constrained") -> None:
        super().__init__(figsize=(width, height), layout=layout)
        self._hover: list[tuple[Axes, tuple[float, float], tuple[float, float], str]] = []

    def add_hover(self, axes: Axes, corner: tuple[float, float], opposite: tuple[float, float], text: str) -> None:
        """Show a text over the rectangle from the lower left corner to the upper right one."""
        self._hover.append((axes, corner, opposite, text))

    def hover_marks(self) -> Iterator[str]:
        """An invisible SVG rectangle for each text, in the coordinates of a figure that was just written as SVG."""
        height = 72 * self.get_figheight()
        for axes, corner, opposite, text in self._hover:
            (left, bottom), (right, top) = 72 / self.dpi * axes.transData.transform([corner, opposite])
            place = f'x="{left:.1f}" y="{height - top:.1f}" width="{right - left:.1f}" height="{top - bottom:.1f}"'
            yield f'<rect class="hit" {place}><title>{escape(text)}</title></rect>'


def new_figure(width: float, height: float) -> tuple[HoverFigure, Axes]:
    """A figure of a size in inches, with one pair of axes."""
    figure = HoverFigure(width, height)
    return figure, figure.add_subplot()


def as_svg(figure: Figure, key: str, alt: str, *, legend: bool = True) -> str:
    """The figure as an SVG element: `key` makes its ids unique on the page, `alt` describes it.

    Without the legend, if the page has one for several figures.
    """
    legends, figure.legends = figure.legends, figure.legends if legend else []
    buffer = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": key}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    figure.legends = legends
    text = buffer.getvalue()
    if isinstance(figure, HoverFigure):
        text = text.replace("</svg>", "".join([*figure.hover_marks(), "</svg>"]))
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{key}-", text)
    text = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", text)  # inherit the font of the page
    text = re.sub(r"font-family: [^;\"]*;?", "", text)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return text.replace("<svg ", f'<svg role="img" aria-label="{escape(alt, quote=True)}" ', 1)


def as_png(figure: Figure) -> bytes:
    """The figure with its legend as a PNG file, on white."""
    drawn, small = io.BytesIO(), io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(drawn, format="png", dpi=DOTS, facecolor="white")
    Image.open(drawn).convert("RGB").quantize(COLOURS).save(small, "PNG", dpi=(DOTS, DOTS))
    return small.getvalue()
