"""What it gains to run draws in one vectorized call: `python -m benchmarks.plan`.

50 draws of a few rows, predicted with all draws in one call (`torch.vmap`) and one after the other, in turn in one
process, one thread, CPU time: the median ratio of seven pairs. The rules that these figures decide are in
`bayesify.prediction.plan`: few rows are vectorized, and all rows where only the head of the network is drawn. Results
are benchmarks/results/plan.json and plan.md.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor, nn

import bayesify as by
from bayesify.lab.models import build
from bayesify.prediction.plan import FEW_ROWS, Plan

RESULTS = Path(__file__).parent / "results" / "plan.json"
DRAWS, PAIRS = 50, 7


class Recurrent(nn.Module):
    """An LSTM and its head."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(37, 32, batch_first=True), nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        """The output after the last step."""
        return self.head(self.lstm(x)[0][:, -1])  # type: ignore[no-any-return]


def mlp() -> nn.Module:
    """Two hidden layers of 512 units with batch norms."""
    hidden = [nn.Linear(784, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 512), nn.BatchNorm1d(512), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(512, 10))


def small_cnn() -> nn.Module:
    """Four convolutions and two linear layers."""
    convolutions: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU()]
    for _ in range(3):
        convolutions += [nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)]
    return nn.Sequential(*convolutions, *head)


def transformer() -> nn.Module:
    """Two blocks of width 64 on 16 tokens."""
    block = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(block, 2), nn.Flatten(), nn.Linear(64 * 16, 10))


def resnet20() -> nn.Module:
    """The CIFAR ResNet-20."""
    return build("resnet20", shape=(3, 32, 32), outputs=10)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "ResNet-20": (resnet20, (3, 32, 32)),
    "small CNN": (small_cnn, (3, 32, 32)),
    "MLP": (mlp, (784,)),
    "LSTM": (Recurrent, (48, 37)),
    "transformer": (transformer, (16, 64)),
}
METHODS = {"Rank1": by.Rank1(4), "ECMP": by.ECMP(5), "MeanField": by.MeanField()}
HEADS = {"small CNN": ("10", "12"), "MLP": ("6",)}
"""The names of the linear layers at the end."""


def ratio(model: nn.Module, x: Tensor) -> float:
    """The time of vectorized draws over that of draws one after the other."""
    ratios = []
    for _ in range(PAIRS + 1):  # the first warms up
        seconds = []
        for vectorized in (True, False):
            rule = lambda plan, rows, draws, of, chosen=vectorized: chosen and draws > 1  # noqa: E731
            with patch.object(Plan, "is_vectorized", rule):
                started = time.process_time()
                by.predict(model, x, DRAWS)
                seconds.append(time.process_time() - started)
        ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios[1:])


def measured() -> list[dict[str, object]]:
    """A row for each network, method and number of rows."""
    found: list[dict[str, object]] = []
    for network, (make, shape) in NETWORKS.items():
        cases = [(name, method, (1, FEW_ROWS, 16)) for name, method in METHODS.items()]
        if network in HEADS:
            head = {**dict.fromkeys(HEADS[network], by.Rank1(4)), "*": None}
            cases.append(("Rank1, head only", head, (1, 32, 128)))
        for name, method, counts in cases:
            torch.manual_seed(0)
            model = by.convert(make(), method).eval()
            for rows in counts:
                value = round(ratio(model, torch.randn(rows, *shape)), 3)
                found.append({"network": network, "method": name, "rows": rows, "ratio": value})
                print(network, name, rows, value, flush=True)
    return found


def page(rows: list[dict[str, object]]) -> str:
    """The table in Markdown."""
    about = " ".join((__doc__ or "").split("\n\n")[1].split())
    lines = ["# Vectorized draws", "", f"Written by `python -m benchmarks.plan`. {about}", ""]
    lines += ["| network | method | rows | vectorized / one by one |", "|---|---|---|---|"]
    lines += [f"| {row['network']} | {row['method']} | {row['rows']} | {row['ratio']:.2f} |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write the results."""
    torch.set_num_threads(1)
    rows = measured()
    versions = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
    RESULTS.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
