"""Adaptive sampling against a fixed number of draws, on a trained run's test images.

Both predict each batch in turn, single-threaded, timed by CPU time. Writes benchmarks/results/adaptive.json and
adaptive.md after every batch. `fixed_alike` uses for every image as many draws as adaptive sampling took on average.
`orders` is how far adaptive sampling, and half of the draws for every image, are from all draws in other
orders: mean and standard deviation, in percent. Options: folders of runs, as benchmarks/cifar10.py makes them; --rows N
test images of each (default: all), evenly spread.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Iterator
from pathlib import Path
from time import process_time
from typing import Any

import torch
from torch import Tensor

import bayesify as by
from bayesify.conversion.drawn_network import DrawnNetwork
from bayesify.lab.data.examples import evenly_spread
from bayesify.lab.metrics import accuracy, ece, nll
from bayesify.lab.runs import Run
from bayesify.methods.draw_design import Blocks
from bayesify.prediction.adaptive import predict_adaptively
from bayesify.prediction.results import Classification

RESULTS = Path(__file__).parent / "results" / "adaptive.json"
BATCH, ORDERS = 250, 40
RULE = by.Adaptive()


def timed(*args: Any, **options: Any) -> tuple[Classification, float]:
    """A prediction and the seconds it took."""
    start = process_time()
    found = by.predict(*args, **options)
    return found, process_time() - start


def quality(p: Classification, y: Tensor) -> dict[str, float]:
    """The metrics of a prediction."""
    measures = {"accuracy": accuracy, "nll": nll, "ece": ece}
    return {name: float(measure(p.log_probs if name == "nll" else p.probs, y)) for name, measure in measures.items()}


def compared(fixed: list[Classification], adaptive: list[Classification], y: Tensor) -> dict[str, Any]:
    """Both predictions of the batches so far, and how far apart they are."""
    one, other = Classification.join(fixed), Classification.join(adaptive)
    mean = float(other.draws_used.double().mean())
    assert one.draws is not None
    alike = by.Categorical().predictive(one.draws[: round(mean)])
    assert isinstance(alike, Classification)
    found = {"fixed": quality(one, y), "adaptive": quality(other, y), "fixed_alike": quality(alike, y)}
    return {
        "rows": len(y),
        "draws": {"mean": mean, "median": float(other.draws_used.double().median()), "share_of_fixed": mean / RULE.max},
        "share_at_max": float((other.draws_used == RULE.max).double().mean()),
        "labels_that_differ": float((one.label != other.label).double().mean()),
        **found,
        "nll_percent": 100 * (found["adaptive"]["nll"] / found["fixed"]["nll"] - 1),
        "ece_percent": 100 * (found["adaptive"]["ece"] / found["fixed"]["ece"] - 1),
        "ece_difference": found["adaptive"]["ece"] - found["fixed"]["ece"],
    }


def in_other_orders(draws: Tensor, y: Tensor, blocks: Blocks) -> dict[str, dict[str, dict[str, float]]]:
    """What is found with the same blocks of draws in random orders."""
    likelihood, stops = by.Categorical(), RULE.stopping_points(blocks.length)
    whole = quality(likelihood.predictive(draws), y)
    found: dict[str, list[dict[str, float]]] = {"adaptive": [], "half_of_the_draws": []}
    for seed in range(ORDERS):
        shuffled = draws[shuffled_blocks(len(draws), blocks.length, seed)]
        rows = torch.arange(len(y)).unsqueeze(1)
        some = predict_adaptively(KnownOutputs(shuffled, blocks), rows, likelihood, RULE, stops)
        half = likelihood.predictive(shuffled[: len(draws) // 2])
        for name, p in (("adaptive", some), ("half_of_the_draws", half)):
            found[name].append({key: 100 * (value / whole[key] - 1) for key, value in quality(p, y).items()})
    return {
        name: {key: spread([each[key] for each in all_of]) for key in ("nll", "ece")} for name, all_of in found.items()
    }


def shuffled_blocks(draws: int, length: int, seed: int) -> Tensor:
    """An order of draws in which complete blocks change places."""
    order = torch.randperm(draws // length, generator=torch.Generator().manual_seed(seed))
    complete = (length * order.unsqueeze(1) + torch.arange(length)).flatten()
    return torch.cat([complete, torch.arange(len(complete), draws)])


class KnownOutputs:
    """A plan whose outputs (S, N, C) are known: a batch is the numbers of its rows."""

    row_dim = batch_dim = 0

    def __init__(self, draws: Tensor, blocks: Blocks) -> None:
        self.draws, self.blocks, self.drawn = draws, blocks, self

    def outputs(self, batch: Tensor, indices: range) -> Iterator[Tensor]:
        """The outputs of some draws for the rows of a batch."""
        yield self.draws[indices.start : indices.stop].index_select(1, batch.flatten())


def spread(values: list[float]) -> dict[str, float]:
    """Mean and standard deviation."""
    return {"mean": statistics.mean(values), "sd": statistics.stdev(values)}


def measured(run: Run, rows: int) -> Any:
    """What is known after each batch of a run's test images."""
    trained, test = run.load(), evenly_spread(run.data().test, rows)
    fixed, adaptive, seconds = [], [], {"fixed": 0.0, "adaptive": 0.0}
    for rows_now in torch.arange(len(test)).split(BATCH):
        x = trained.inputs.prepare(test.raw(rows_now))
        for name, samples, parts in (("fixed", RULE.max, fixed), ("adaptive", RULE, adaptive)):
            p, took = timed(trained.model, x, samples, draws=name == "fixed")
            parts.append(p)
            seconds[name] += took
        found = compared(fixed, adaptive, test.targets[: int(rows_now[-1]) + 1])
        found |= {"run": run.name, "seconds": seconds, "time_ratio": seconds["adaptive"] / seconds["fixed"]}
        yield found
    draws = Classification.join(fixed).draws
    assert draws is not None
    yield found | {"orders": in_other_orders(draws, test.targets, DrawnNetwork(trained.model).blocks)}


def line(found: dict[str, Any]) -> str:
    """A row of the table."""
    fixed, adaptive = found["fixed"], found["adaptive"]
    return (
        f"| {found['run']} | {found['rows']} | {found['draws']['mean']:.1f} | {found['time_ratio']:.3f} "
        f"| {fixed['nll']:.4f} → {adaptive['nll']:.4f} ({found['nll_percent']:+.2f}%) "
        f"| {fixed['ece']:.4f} → {adaptive['ece']:.4f} ({found['ece_percent']:+.1f}%) "
        f"| {in_words(found, 'adaptive')} | {in_words(found, 'half_of_the_draws')} |"
    )


def in_words(found: dict[str, Any], way: str) -> str:
    """How far from all draws, in other orders."""
    each = found.get("orders", {}).get(way, {})
    return ", ".join(f"{name.upper()} {it['mean']:+.1f} ± {it['sd']:.1f}%" for name, it in each.items()) or "–"


def write(results: dict[str, Any]) -> None:
    """The JSON and the table."""
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    head = f"| run | test images | mean draws of {RULE.max} | time | NLL | ECE "
    head += f"| in other orders of the draws | {RULE.max // 2} draws for every image, in other orders |\n"
    head += "|---" * 8 + "|\n"
    RESULTS.with_suffix(".md").write_text(head + "\n".join(map(line, results["runs"].values())) + "\n")


def main() -> None:
    """Measure the runs, keeping what is known of others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--rows", type=int, default=10**9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = {"torch": torch.__version__, "machine": platform.machine(), "threads": 1}
    rule = {"max": RULE.max, "tolerance": RULE.tolerance, "error": RULE.error, "first": RULE.first}
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results = {"made_by": "benchmarks/adaptive.py", **machine, "rule": rule, "runs": {}}
    results["runs"] = known.get("runs", {}) if known.get("rule") == rule else {}
    for folder in options.folders:
        for found in measured(Run.open(folder), options.rows):
            results["runs"][found["run"]] = found
            write(results)
            print(line(found), flush=True)


if __name__ == "__main__":
    main()
