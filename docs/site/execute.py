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

from docs.site.cells import DPI, EXECUTED, notebook, tutorials

SECONDS = 600
"""The longest that a cell may take."""


def execute(page: Path) -> None:
    """Run a tutorial and write its notebook; an error in a cell is raised."""
    found = nbformat.from_dict(notebook(page.read_text(encoding="utf-8")))
    nbformat.validate(found)
    with tempfile.TemporaryDirectory() as folder:
        kernel = AsyncKernelManager(transport="ipc", connection_file=f"{folder}/kernel.json")  # no network
        figures = f"--InlineBackend.rc={{'figure.dpi': {DPI}}}"
        options = {"timeout": SECONDS, "resources": {"metadata": {"path": folder}}, "extra_arguments": [figures]}
        client = NotebookClient(found, km=kernel, **options)
        client.owns_km = True  # and ends the kernel
        client.execute()
    for cell in found.cells:
        cell.metadata.pop("execution", None)  # times of the run
    EXECUTED.mkdir(parents=True, exist_ok=True)
    part = EXECUTED / f"{page.stem}.part"
    part.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(part, EXECUTED / f"{page.stem}.ipynb")


def chosen(names: list[str]) -> list[Path]:
    """The tutorials of these names, or all if there are none."""
    known = {path.stem: path for path in tutorials()}
    wrong = [name for name in names if name not in known]
    if wrong:
        raise SystemExit(f"{wrong[0]!r}: no such tutorial; there are {', '.join(known)}")
    return [known[name] for name in names or known]


if __name__ == "__main__":
    quiet = "ignore:IProgress not found,ignore:`is_gradient_checkpointing` is deprecated"  # in tqdm, PEFT
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": quiet}
    for path in chosen(sys.argv[1:]):
        start = time.perf_counter()
        execute(path)
        print(f"{path.stem}: {time.perf_counter() - start:.0f} s", flush=True)
