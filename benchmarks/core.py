"""What being Bayesian costs on a CIFAR ResNet-20: ratios to the plain network, interleaved in one process.

Run by `make bench`; writes benchmarks/results/core.json. Options: --rounds N, --only WORD.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import bayesify as by
from bayesify.lab.models import MODELS

ROWS, DRAWS, HEAD_DRAWS = 128, 10, 50
RESULTS = Path(__file__).parent / "results" / "core.json"
FAMILIES = {
    "Rank1": by.Rank1(4),
    "IBNN": by.IBNN(4),
    "EMP": by.EMP(5),
    "ECMP": by.ECMP(5),
    "BatchEnsemble": by.BatchEnsemble(4),
    "LowRankEnsemble": by.LowRankEnsemble(20),
    "MCDropout": by.MCDropout(0.1),
    "DropConnect": by.DropConnect(0.1),
    "MeanField shared": by.MeanField(estimator="shared"),
    "MeanField flipout": by.MeanField(estimator="flipout"),
    "Ensemble": by.Ensemble(4),
}
STEP_GOALS = {"BatchEnsemble": 1.10, "EMP": 1.10, "IBNN": 1.15, "Rank1": 1.25, "MeanField shared": 1.10}
PREDICT_GOALS = dict.fromkeys(("Rank1", "IBNN", "EMP", "ECMP", "BatchEnsemble", "MCDropout"), 1.05)
HEAD_GOAL = 1.5


def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    """A training step: forward, backward, the KL's gradient and the optimizer."""
    bayesian = any(hasattr(module, "posterior") for module in model.modules())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def run() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if bayesian:
            by.add_kl_grad_(model, n=50_000)
        optimizer.step()

    return run


def ratio(plain: Callable[[], object], other: Callable[[], object], rounds: int) -> tuple[float, float]:
    """The best time of one over the best of the other, and the median over rounds, measured in turn."""
    times: list[tuple[float, float]] = []
    for _ in range(rounds + 1):
        marks = [time.perf_counter()]
        for call in (plain, other):
            call()
            marks.append(time.perf_counter())
        times.append((marks[1] - marks[0], marks[2] - marks[1]))
    ones, others = zip(*times[1:], strict=True)  # the first round warms up
    return min(others) / min(ones), statistics.median(b / a for a, b in times[1:])


def measure(rounds: int, only: str) -> list[dict[str, object]]:
    """Every case: its ratio and, where there is one, its goal."""
    torch.manual_seed(0)
    x, y = torch.randn(ROWS, 3, 32, 32), torch.randint(10, (ROWS,))
    plain = MODELS["resnet20"]()
    forward = MODELS["resnet20"]().eval()
    rows: list[dict[str, object]] = []

    def one(case: str, family: str, value: Callable[[], tuple[float, float]], goal: float | None) -> None:
        if only in f"{case} {family}":
            best, median = (round(found, 3) for found in value())
            rows.append({"case": case, "family": family, "best": best, "median": median, "goal": goal})
            shown = "" if goal is None else f"goal {goal}"
            print(f"{case:10} {family:18} best {best:6.3f}  median {median:6.3f}  {shown}", flush=True)

    def plain_forward() -> object:
        with torch.no_grad():
            return forward(x)

    def plain_forwards() -> None:
        for _ in range(DRAWS):  # as long as what it is compared with, or noise would favour the shorter
            plain_forward()

    for name, family in FAMILIES.items():
        model = by.convert(MODELS["resnet20"](), family)
        one("step", name, lambda: ratio(step(plain, x, y), step(model, x, y), rounds), STEP_GOALS.get(name))  # noqa: B023
    for name, family in FAMILIES.items():
        model = by.convert(MODELS["resnet20"](), family)
        predict = lambda: by.predict(model, x, samples=DRAWS)  # noqa: B023, E731
        one("predict", name, lambda: ratio(plain_forwards, predict, max(rounds // 3, 1)), PREDICT_GOALS.get(name))  # noqa: B023
    for name in ("Rank1", "MeanField shared", "ECMP"):
        model = by.convert(MODELS["resnet20"](), {"linear": FAMILIES[name]})
        predict = lambda: by.predict(model, x, samples=HEAD_DRAWS)  # noqa: B023, E731
        one("head", name, lambda: ratio(plain_forward, predict, rounds), HEAD_GOAL)  # noqa: B023
    return rows


def main() -> None:
    """Measure, print and, when all was measured, write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    print(f"ratios to a plain ResNet-20 with {ROWS} rows; step: one training step; predict: {DRAWS} draws over {DRAWS}")
    print(f"plain forwards; head: {HEAD_DRAWS} draws of a Bayesian last layer over one plain forward\n")
    rows = measure(options.rounds, options.only)
    if not options.only:
        made = f"make bench: torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}, "
        made += f"best of {options.rounds} interleaved rounds (a third of that for predict)"
        RESULTS.write_text(json.dumps({"made": made, "rows": rows}, indent=1) + "\n")
        print(f"\nwrote {RESULTS.relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()
