"""Evaluation streams: many draws hold no more memory than one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MEASURE = """
import resource, sys
from pathlib import Path
import torch
from torch import nn
import bayesify as by
from bayesify.lab.data import Classes, Images, TensorExamples
from bayesify.lab.evaluation import predictive
from bayesify.lab.recipes import Recipe
from bayesify.lab.trained import Trained

layers, rows, keep = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "keep"
torch.manual_seed(0)
network = nn.Sequential(nn.Conv2d(3, 4, 2, stride=8), nn.ReLU(), nn.Flatten(), nn.Linear(64, 10))
model = by.convert(network, by.Rank1(4) if layers == "all" else {"3": by.Rank1(4)})
images = Images((3, 32, 32), (0.5,) * 3, (0.25,) * 3)
trained = Trained(model, by.Categorical(), images, Classes(tuple("abcdefghij")), Recipe.of({}))
x = torch.randint(256, (rows, 3, 32, 32), dtype=torch.uint8)
examples = TensorExamples(x, torch.zeros(rows, dtype=torch.long))
predictive(trained, examples.take(torch.arange(8)), samples=2)  # what is loaded once

trained.likelihood.keeps_draws = keep
before = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
for draws in (1, 200):
    p = predictive(trained, examples, samples=draws)
    assert p.samples == draws and p.probs.shape == (rows, 10)
    # getrusage would tell the peak of the process that started this one, if that was higher
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(int(peak.split()[1]) * 1024 - before)
"""
MIB = 2**20
KEPT = 200 * 10_000 * 10 * 4
"""The bytes of 200 draws of ten logits for 10,000 rows."""


def measured(layers: str, rows: int = 10_000, keep: str = "") -> tuple[int, int]:
    """Bytes that one draw, and then 200, needed at the peak beyond what a new process held before."""
    command = [sys.executable, "-c", MEASURE, layers, str(rows), keep]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    one, many = map(int, done.stdout.split())
    return one, many


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc, which Linux has")
@pytest.mark.parametrize("layers", ["all", "last"])
def test_two_hundred_draws_hold_at_most_twice_the_memory_of_one(layers: str) -> None:
    one, many = measured(layers)
    assert one > 10 * MIB, "too little to compare: the process had held as much before"
    assert many < 2 * one and many - one < KEPT / 2


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc, which Linux has")
def test_the_measure_would_see_draws_that_are_kept() -> None:
    """That is, more than the test above lets pass; what one draw needs at the peak differs from process to process."""
    tries = (measured("last", keep="keep") for _ in range(8))
    assert any(many - one > KEPT / 2 for one, many in tries)
