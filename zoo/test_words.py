"""The documentation's code that needs transformers, and the examples, run as a user would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python transformers\n(.*?)^```", re.MULTILINE | re.DOTALL)
"""The main suite runs those that say ```python alone."""


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")  # of the Trainer's loader where there is no GPU
@pytest.mark.parametrize("page", ["docs/transformers.md"])
def test_code_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    text = (ROOT / page).read_text(encoding="utf-8")
    namespace: dict[str, object] = {"__name__": "__main__"}
    assert BLOCK.search(text)
    for block in BLOCK.finditer(text):
        first_line = text[: block.start(1)].count("\n")
        exec(compile("\n" * first_line + block[1], page, "exec", dont_inherit=True), namespace)


def rows_of(example: str) -> dict[str, list[float]]:
    """The numbers of the table that an example prints, by its rows' names."""
    paths = [str(ROOT / "zoo"), *filter(None, [os.environ.get("PYTHONPATH")])]
    code = f"import conftest, runpy, sys; sys.path.insert(0, {str(ROOT / 'examples')!r}); " + (
        f"runpy.run_path({str(ROOT / 'examples' / example)!r}, run_name='__main__')"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert "Warning" not in done.stderr, done.stderr
    found = re.findall(r"^(\S.*?) {2,}((?:\d\.\d{3} *){9})$", done.stdout, re.MULTILINE)
    return {name: [float(number) for number in numbers.split()] for name, numbers in found}


@pytest.mark.parametrize(
    ("example", "plain", "bayesian"),
    [("trainer.py", "plain BERT", "Rank-1 BERT"), ("bayesian_lora.py", "plain LoRA", "Bayesian LoRA")],
)
def test_an_example_shows_better_probabilities_and_doubt_where_it_is_due(
    example: str, plain: str, bayesian: str
) -> None:
    rows = rows_of(example)
    (accuracy, nll, ece, *_), ours = rows[plain], rows[bayesian]
    assert ours[0] > accuracy - 0.03 and ours[1] < nll and ours[2] < ece
    known, ambiguous, strange = ours[3:6]
    assert ambiguous > known and strange > known  # entropy
    known, ambiguous, strange = ours[6:]
    assert ambiguous > known and strange > known  # epistemic
