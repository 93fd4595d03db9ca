"""What one distilled network keeps of a Bayesian one: `python -m benchmarks.distill`.

A LeNet with norms on 4,000 images of Fashion-MNIST (by Rank1 and by ECMP) and an MLP with a noise of its own for each
input on UCI concrete (by MeanField) are trained plain, converted, fine-tuned, and distilled on the training inputs,
with three seeds each. The teacher is the average of 20 draws. The other data are MNIST and KMNIST, of which the student
has seen nothing; for concrete they are test inputs with every column shuffled and doubled. The divergence from the
teacher and the correlation of epistemic uncertainties (of ranks) are on the test rows. The first 2,000 test images are
left out, as the Dirichlet's loss was chosen on them.

Needs $BAYESIFY_DATA. Results are written as they come and not measured again: benchmarks/results/distill.json and
distill.md. Options: names of cases (default: all), --seeds N, --redraw.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bayesify as by
from bayesify.lab.data import Data, load
from bayesify.lab.metrics import auroc, ece, nll
from bayesify.prediction.results import Classification, Regression
from bayesify.training.distill import divergence
from benchmarks.draws import data_folder, lenet_with_norms

RESULTS = Path(__file__).parent / "results" / "distill.json"
SAMPLES, SEEDS, BATCH = 20, 3, 50
SEEN = 2000
"""Test images on which the loss of the Dirichlet was chosen, and which are left out here."""
TIMED = 100
"""How many rows the timed prediction has."""
ROWS = {
    "plain": "plain network",
    "mean": "mean network",
    "teacher": "teacher, 20 draws",
    "student": "student",
    "dirichlet": "student, Dirichlet",
}


@dataclass(frozen=True)
class Case:
    """A network, its method and how long it is trained: plain, after conversion, and as a student."""

    title: str
    method: Any
    epochs: tuple[int, int, int]
    lr: float = 1e-3


CASES = {
    "concrete-meanfield": Case("concrete, MeanField", by.MeanField(init_log_std=(-3.0, -3.0)), (60, 60, 60), 3e-3),
    "fashion-rank1": Case(
        "Fashion-MNIST, Rank1", by.Rank1(4, mean_std=0.3, prior_std=0.3, dropout_rate=0.06), (4, 5, 6)
    ),
    "fashion-ecmp": Case("Fashion-MNIST, ECMP", by.ECMP(5, jitter=0.3), (4, 5, 6)),
}


# The data and the networks.


@dataclass(frozen=True)
class Rows:
    """What a case is trained and measured on."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    others: dict[str, Tensor]
    likelihood: Any


def rows_of(name: str) -> Rows:
    """The training and test rows of a case, and the other data."""
    if name.startswith("concrete"):
        data = load(name="uci", path=data_folder() / "uci" / "concrete")
        (x, y), (test_x, test_y) = (some(data, split, 10**6) for split in ("train", "test"))
        columns = [test_x[torch.randperm(len(test_x), generator=seeded(j)), j] for j in range(test_x.shape[1])]
        return Rows(x, y, test_x, test_y, {"shuffled": 2 * torch.stack(columns, 1)}, by.Gaussian("input"))
    data = load(name="fashion-mnist", limit=4000)
    others = {other: some(load(name=other, limit=100), "test", 500, SEEN, data)[0] for other in ("mnist", "kmnist")}
    return Rows(*some(data, "train", 4000), *some(data, "test", 1000, SEEN), others, by.Categorical())


def some(data: Data, split: str, count: int, skipped: int = 0, like: Data | None = None) -> tuple[Tensor, Tensor]:
    """Rows of a split, prepared as its own data are, or other data."""
    examples = getattr(data, split)
    index = torch.arange(len(examples))[skipped : skipped + count]
    y = examples.targets[index]
    return (like or data).inputs.prepare(examples.raw(index)), y.float() if y.is_floating_point() else y


def seeded(seed: int) -> torch.Generator:
    """A generator of its own."""
    return torch.Generator().manual_seed(seed)


def network_of(name: str, rows: Rows) -> nn.Module:
    """The plain network of a case, not yet trained."""
    if name.startswith("fashion"):
        return lenet_with_norms(None)  # type: ignore[arg-type]
    layers = [nn.Linear(rows.x.shape[1], 50), nn.LayerNorm(50), nn.ReLU(), nn.Linear(50, 50), nn.LayerNorm(50)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(50, 2))


def fit(network: nn.Module, rows: Rows, epochs: int, lr: float) -> nn.Module:
    """Train a plain or converted network with Adam."""
    optimizer, n = torch.optim.Adam(network.parameters(), lr), len(rows.x)
    is_bayesian = any(".posterior" in f".{name}" for name, _ in network.named_modules())
    network.train()
    for _ in range(epochs):
        for chosen in torch.randperm(n).split(BATCH):
            x, y = rows.x[chosen], rows.y[chosen]
            if is_bayesian:
                loss = by.elbo(network, x, y, n=n, likelihood=rows.likelihood).loss
            else:
                loss = -rows.likelihood.log_prob(network(x), y).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return network.eval()


# What each network predicts, and how well.

Predict = Callable[[Tensor], Any]


def measured(name: str, seed: int) -> dict[str, Any]:
    """The figures of every row of the table, for one seed."""
    case, rows = CASES[name], rows_of(name)
    torch.manual_seed(seed)
    network = fit(network_of(name, rows), rows, case.epochs[0], case.lr)
    plain = copy.deepcopy(network)
    model = fit(by.convert(network, case.method), rows, case.epochs[1], case.lr)
    order = torch.randperm(len(rows.x), generator=seeded(seed))
    loader = list(rows.x[order].split(BATCH))
    options: dict[str, Any] = {"epochs": case.epochs[2], "lr": case.lr, "likelihood": rows.likelihood, "cache": True}
    start = time.process_time()
    students = {"student": by.distill(model, loader, **options)}
    seconds = time.process_time() - start
    if isinstance(rows.likelihood, by.Categorical):
        students["dirichlet"] = by.distill(model, loader, into=by.Dirichlet(), **options)
    single = {"plain": plain, "mean": by.draw(model, None), **students}
    predicts: dict[str, Predict] = {
        kind: one_pass(each, by.Dirichlet() if kind == "dirichlet" else rows.likelihood)
        for kind, each in single.items()
    }
    predicts["teacher"] = lambda x: by.predict(model, x, SAMPLES, seed=10**6, likelihood=rows.likelihood)
    truth = predicts["teacher"](rows.test_x)
    found = {kind: figures(predicts[kind], rows, truth) for kind in ROWS if kind in predicts}
    return {"case": name, "seed": seed, "distill_seconds": round(seconds, 1), "rows": found}


def one_pass(network: nn.Module, likelihood: Any) -> Predict:
    """The prediction of one ordinary network."""

    @torch.no_grad()
    def predict(x: Tensor) -> Any:
        return likelihood.interpret(network(x))

    return predict


def figures(predict: Predict, rows: Rows, teacher: Any) -> dict[str, float]:
    """The metrics of one way to predict."""
    p, found = predict(rows.test_x), {}
    if isinstance(p, Classification):
        found = {
            "accuracy": float((p.label == rows.test_y).float().mean()),
            "nll": float(nll(p.log_probs, rows.test_y)),
        }
        found |= {"ece": float(ece(p.probs, rows.test_y)), "divergence": kl(teacher, p)}
        own, scores = p.epistemic, {"entropy": lambda q: q.entropy, "information": lambda q: q.epistemic}
    else:
        assert isinstance(p, Regression)
        found = {
            "rmse": float((p.mean - rows.test_y).square().mean().sqrt()),
            "nll": -float(p.log_prob(rows.test_y).mean()),
        }
        low, high = p.interval(0.9)
        found["coverage"] = float(((low <= rows.test_y) & (rows.test_y <= high)).float().mean())
        output = torch.cat([p.mean, -2 * p.std.log()], -1)
        found["divergence"] = float(divergence(output, teacher, rows.likelihood))
        own, scores = p.epistemic_std, {"std": lambda q: q.std, "epistemic std": lambda q: q.epistemic_std}
    truth = teacher.epistemic if isinstance(teacher, Classification) else teacher.epistemic_std
    found["correlation"] = correlation(own, truth)
    elsewhere = {other: predict(x) for other, x in rows.others.items()}
    for score, of in scores.items():
        for other, q in elsewhere.items():
            here, there = of(p).flatten(), of(q).flatten()
            found[f"{other} by {score}"] = float(auroc(here, there)) if float(here.std()) > 0 else math.nan
    found["milliseconds"] = milliseconds(predict, rows.test_x[:TIMED])
    return found


def kl(teacher: Classification, p: Classification) -> float:
    """The mean divergence of class probabilities from the teacher's."""
    return float((teacher.probs * (teacher.log_probs - p.log_probs)).sum(-1).mean())


def correlation(first: Tensor, second: Tensor) -> float:
    """Spearman's; not a number where one is the same for all rows."""
    if not float(first.std()) > 0:
        return math.nan
    ranks = torch.stack([each.flatten().argsort().argsort().float() for each in (first, second)])
    return float(torch.corrcoef(ranks)[0, 1])


def milliseconds(predict: Predict, x: Tensor) -> float:
    """The shortest of several times of one prediction, of this process alone."""
    times = []
    for _ in range(10):
        start = time.process_time()
        predict(x)
        times.append(time.process_time() - start)
    return 1000 * min(times)


# The page.


def page(results: dict[str, Any]) -> str:
    """The tables in Markdown: means over seeds, and differences from the teacher, seed by seed."""
    lines = [
        "# What one distilled network keeps of a Bayesian one",
        "",
        "Written by `python -m benchmarks.distill`. " + " ".join((__doc__ or "").split("\n\n")[1].split()),
        f"Time is for {TIMED} rows, on one thread, the shortest of ten.",
    ]
    for name, case in CASES.items():
        runs = [each for each in results.values() if each["case"] == name]
        if not runs:
            continue
        kinds, measures = list(runs[0]["rows"]), list(runs[0]["rows"]["teacher"])
        lines += ["", f"## {case.title}, {len(runs)} seeds", "", "Means over seeds ± their standard deviation."]
        lines += ["", *table(kinds, measures, lambda kind, m, runs=runs: [run["rows"][kind][m] for run in runs])]
        lines += ["", "Differences from the teacher with the same seed.", ""]
        others = [kind for kind in kinds if kind != "teacher"]
        compared = [measure for measure in measures if measure not in ("divergence", "correlation", "milliseconds")]
        lines += table(
            others,
            compared,
            lambda kind, m, runs=runs: [r["rows"][kind][m] - r["rows"]["teacher"][m] for r in runs],
            "+",
        )
    return "\n".join(lines) + "\n"


def table(
    kinds: list[str], measures: list[str], values: Callable[[str, str], list[float]], sign: str = ""
) -> list[str]:
    """The lines of one table."""
    lines = [f"| | {' | '.join(measures)} |", "|---" * (len(measures) + 1) + "|"]
    for kind in kinds:
        cells = [shown(values(kind, measure), measure, sign) for measure in measures]
        lines.append(f"| {ROWS[kind]} | {' | '.join(cells)} |")
    return lines


def shown(values: list[float], measure: str, sign: str) -> str:
    """Mean ± standard deviation; a dash where a network has no such uncertainty."""
    if any(map(math.isnan, values)):
        return "–"
    digits = 2 if measure == "milliseconds" else 4 if measure in ("divergence", "ece") else 3
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{sign}.{digits}f}{spread}"


def main() -> None:
    """Measure what is missing, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--redraw", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("BAYESIFY_DATA", str(data_folder()))
    read = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"results": {}}
    for seed in range(0 if given.redraw else given.seeds):
        for name in given.cases or CASES:
            key = f"{name}/{seed}"
            if key not in read["results"]:
                read["results"][key] = measured(name, seed)
                read["versions"] = {"torch": torch.__version__, "python": platform.python_version()}
                RESULTS.write_text(json.dumps(read, indent=1) + "\n")
                print(key, json.dumps(read["results"][key]["rows"]), flush=True)
    RESULTS.with_suffix(".md").write_text(page(read["results"]), encoding="utf-8")


if __name__ == "__main__":
    main()
