"""Tutorials as notebooks: their Markdown is the source, every Python block is a cell."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
EXECUTED = ROOT / "build" / "notebooks"
"""Where `python -m docs.site.execute` puts the notebooks with their outputs."""
DPI = 160
"""The resolution of figures, sharp on screens with many pixels."""
BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
KERNEL = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}


def notebook(text: str) -> dict[str, Any]:
    """The notebook of a page, without outputs: in turn the Markdown between blocks, and each block."""
    cells = []
    for i, source in enumerate(BLOCK.split(text)):
        if not source.strip():
            continue
        cell: dict[str, Any] = {"id": f"cell-{i}", "metadata": {}, "source": source.strip()}
        if i % 2:
            cell |= {"cell_type": "code", "execution_count": None, "outputs": []}
        else:
            cell |= {"cell_type": "markdown"}
        cells.append(cell)
    return {"cells": cells, "metadata": dict(KERNEL), "nbformat": 4, "nbformat_minor": 5}


def tutorials() -> list[Path]:
    """The tutorials: all pages but the list of them."""
    return sorted(path for path in TUTORIALS.glob("*.md") if path.name != "index.md")
