"""`PageFigure`: a figure as it is embedded in the page, with its PNG and CSV files."""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bayesify.lab.data.spreadsheets import safe_cell
from bayesify.lab.report.figures.style import as_png, as_svg


@dataclass(frozen=True)
class File:
    """A file that is embedded in the page as a link, and is also written beside it."""

    name: str
    content: bytes

    @property
    def kind(self) -> str:
        """The text of the link: PNG or CSV."""
        return Path(self.name).suffix[1:].upper()

    @property
    def link(self) -> str:
        """A data URI with the content.

        >>> File("a.csv", b"x,y").link
        'data:text/csv;base64,eCx5'
        """
        return data_uri(self.content, "image/png" if self.kind == "PNG" else "text/csv")


@dataclass(frozen=True)
class PageFigure:
    """A figure with a title, a caption and its files."""

    title: str
    svg: str
    caption: str
    files: tuple[File, ...]

    @classmethod
    def of(
        cls,
        figure: Figure,
        key: str,
        data: Mapping[str, Sequence[Any]],
        *,
        alt: str,
        title: str = "",
        caption: str = "",
        legend: bool = True,
    ) -> PageFigure:
        """Render a figure as SVG for the page and as PNG, with its data as CSV."""
        svg = as_svg(figure, key, alt, legend=legend)
        return cls(title, svg, caption, (File(f"{key}.png", as_png(figure)), File(f"{key}.csv", as_csv(data))))


def data_uri(content: bytes, kind: str) -> str:
    """Content as a data URI."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def as_csv(columns: Mapping[str, Sequence[Any]]) -> bytes:
    """Columns of equal length as a CSV file.

    >>> as_csv({"x": [1, 2], "y": ["a", None]})
    b'x,y\\r\\n1,a\\r\\n2,\\r\\n'
    """
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(map(safe_cell, columns))
    writer.writerows(map(safe_cell, row) for row in zip(*columns.values(), strict=True))
    return file.getvalue().encode()


def slug(*words: object) -> str:
    """Words as a name for files and HTML ids.

    >>> slug("risk", "plain network", 3)
    'risk-plain-network-3'
    """
    text = "-".join(map(str, words)).lower()
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in text)
