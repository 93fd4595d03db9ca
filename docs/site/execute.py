"""Execute the tutorials, each in a Jupyter kernel and a folder of its own: python -m docs.site.execute [name …].

Each notebook with its outputs is written to build/notebooks, from where hooks.py puts it into the site.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from docs.site.cells import EXECUTED, notebook, tutorials

FIGURES = ["--InlineBackend.rc={'figure.dpi': 160}"]
SECONDS = 120
"""The longest that a cell may take."""


def execute(page: Path) -> None:
    """Run a tutorial and write its notebook; an error in a cell is raised."""
    found = nbformat.from_dict(notebook(page.read_text(encoding="utf-8")))
    nbformat.validate(found)
    with tempfile.TemporaryDirectory() as folder:
        kernel = AsyncKernelManager(transport="ipc", connection_file=f"{folder}/kernel.json")  # no network
        options = {"timeout": SECONDS, "resources": {"metadata": {"path": folder}}, "extra_arguments": FIGURES}
        NotebookClient(found, km=kernel, **options).execute()
    for cell in found.cells:
        cell.metadata.pop("execution", None)  # times of the run
    EXECUTED.mkdir(parents=True, exist_ok=True)
    part = EXECUTED / f"{page.stem}.part"
    part.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(part, EXECUTED / f"{page.stem}.ipynb")


if __name__ == "__main__":
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    wanted = sys.argv[1:]
    for path in tutorials():
        if not wanted or path.stem in wanted:
            start = time.perf_counter()
            execute(path)
            print(f"{path.stem}: {time.perf_counter() - start:.0f} s", flush=True)
