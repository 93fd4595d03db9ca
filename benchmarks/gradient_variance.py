"""How much less gradients vary if a row's samples cancel each other's noise: `python -m benchmarks.gradient_variance`.

Three trained networks (an MLP for a regression, a LeNet with norms on Fashion-MNIST, an LSTM on hourly records) are
converted by every method with noise and fine-tuned. The variance of the gradient of `by.elbo` is its trace over the
network's own tensors (base) and over those that conversion added (posterior). First the rows stay the same, so that
only draws vary; then each step has other rows, too. Figures are ratios: variance with independent samples over that
with balanced ones (above 1 is better), with an interval that 95% of bootstrap samples of the steps are in. The
reference is one sample of twice as many rows, at the same cost. There are 64 steps of 32 rows, 24 for the LSTM.

Also measured: the uncertainty regulariser with mirrored draws, and what training with two samples of either kind gives.

Needs $BAYESIFY_DATA. Results are written as they come and not measured again: benchmarks/results/gradient_variance.json
and gradient_variance.md. Options: --redraw.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bayesify as by
from bayesify.batches import repeated, run
from bayesify.lab.data import Data
from bayesify.layers import bayesian_layers
from benchmarks.draws import TASKS, Task, data_folder, fit, likelihood_of

RESULTS = Path(__file__).parent / "results" / "gradient_variance.json"
ROWS, RESAMPLES = 32, 400
STEPS = {"mlp": 64, "lenet": 64, "lstm": 24}
EPOCHS = {"mlp": 40.0, "lenet": 3.0, "lstm": 1.0}
TUNING = {"mlp": 10.0, "lenet": 1.0, "lstm": 0.5}
TRIALS = {"mlp": {"IBNN": 6, "MeanField flipout": 6}, "lenet": {"IBNN": 3}}
"""How many seeds the methods are trained with."""
KINDS = {"base": "the network's own tensors", "posterior": "added tensors"}
Step = dict[str, Any]
"""Options of a step: its number of samples, their design, and for how many times as many rows."""
TWO: dict[str, Step] = {
    "independent": {"samples": 2, "design": "independent"},
    "balanced": {"samples": 2, "design": "balanced"},
    "twice the rows": {"samples": 1, "times": 2},
}
FOUR: dict[str, Step] = {
    "independent": {"samples": 4, "design": "independent"},
    "balanced": {"samples": 4, "design": "balanced"},
}


def methods(network: str) -> dict[str, Any]:
    """Methods with noise that matters; of the LSTM those whose steps take little time."""
    log_std = (-3.5, -3.5)
    found = {
        "IBNN": by.IBNN(4, mean_std=0.3, prior_std=0.25, scale_mean=0.25, scale_std=0.02),
        "Rank1": by.Rank1(4, mean_std=0.3, prior_std=0.25, dropout_rate=0.06),
        "MeanField flipout": by.MeanField(estimator="flipout", init_log_std=log_std),
        "MCDropout": by.MCDropout(0.1),
    }
    if network != "lstm":
        found["MeanField local"] = by.MeanField(estimator="local", init_log_std=log_std)
    if network == "mlp":
        found |= {
            "MeanField shared": by.MeanField(estimator="shared", init_log_std=log_std),
            "DropConnect": by.DropConnect(0.1),
            "ECMP": by.ECMP(5, jitter=0.25),
            "MeanField exemplar": by.MeanField(estimator="exemplar", init_log_std=log_std),
            "DropConnect row": by.DropConnect(0.1, reach="row"),
            "ECMP row": by.ECMP(5, jitter=0.25, reach="row"),
        }
    return found


# Gradients.


def batch_of(data: Data, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Some training rows."""
    y = data.train.targets[rows]
    return data.inputs.prepare(data.train.raw(rows)), y.float() if y.is_floating_point() else y


def groups_of(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """The trained tensors: the network's own, and those that conversion added."""
    named = list(model.named_parameters())
    groups = {"base": [p for name, p in named if ".posterior." not in f".{name}"]}
    added = [p for name, p in named if ".posterior." in f".{name}"]
    return groups | ({"posterior": added} if added else {})


def flat_gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """The gradient of a loss by group, as one vector each."""
    model.zero_grad()
    loss.backward()
    return {
        kind: torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in tensors])
        for kind, tensors in groups_of(model).items()
    }


def gradients(model: nn.Module, data: Data, step: Step, steps: int, *, same_rows: bool) -> dict[str, Tensor]:
    """The gradients (steps, numbers) of the objective, by group."""
    options = {name: value for name, value in step.items() if name != "times"}
    rows, each = ROWS * step.get("times", 1), []
    for index in range(steps):
        seed = 0 if same_rows else index
        chosen = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(seed))[:rows]
        x, y = batch_of(data, chosen)
        loss = by.elbo(model, x, y, n=len(data.train), likelihood=likelihood_of(data), **options).loss
        each.append(flat_gradients(model, loss))
    return {kind: torch.stack([gradient[kind] for gradient in each]) for kind in each[0]}


def squares(values: Tensor) -> Tensor:
    """The squared distances of vectors from their mean: those of a bootstrap sample need no more than products."""
    return (values - values.mean(0)).double().square().sum(1)


def ratio(first: Tensor, second: Tensor) -> dict[str, float]:
    """The ratio of the variances of two sets of gradients, and its bootstrap interval."""
    one, other, generator = squares(first), squares(second), torch.Generator().manual_seed(0)

    def resampled(distances: Tensor) -> Tensor:
        chosen = torch.randint(len(distances), (RESAMPLES, len(distances)), generator=generator)
        return distances[chosen].mean(1)

    found = resampled(one) / resampled(other)
    low, high = found.quantile(torch.tensor([0.025, 0.975], dtype=found.dtype)).tolist()
    return {"ratio": float(one.mean() / other.mean()), "low": low, "high": high}


def ratios(network: str, model: nn.Module, data: Data) -> dict[str, Any]:
    """All comparisons of one network."""
    model.train()
    found: dict[str, Any] = {}
    compared = {("2, balanced, same rows", "balanced", 2), ("2, balanced, other rows", "balanced", 2)}
    compared |= {("2, twice the rows, other rows", "twice the rows", 2)}
    compared |= {("4, balanced, same rows", "balanced", 4)} if network == "mlp" else set()
    made: dict[tuple[str, int, bool], dict[str, Tensor]] = {}

    def of(kind: str, samples: int, same_rows: bool) -> dict[str, Tensor]:
        key = kind, samples, same_rows
        if key not in made:
            step = (TWO if samples == 2 else FOUR)[kind]
            made[key] = gradients(model, data, step, STEPS[network], same_rows=same_rows)
        return made[key]

    for name, kind, samples in sorted(compared):
        same_rows = name.endswith("same rows")
        one, other = of("independent", samples, same_rows), of(kind, samples, same_rows)
        found[name] = {group: ratio(one[group], other[group]) for group in one}
    return found


# The regulariser.


def information(model: nn.Module, x: Tensor, *, mirrored: bool) -> Tensor:
    """The mean mutual information of two draws of each row with the same component."""
    with ExitStack() as stack:
        for scope in {layer.scope for layer in bayesian_layers(model).values()}:
            stack.enter_context(scope.drawing(per_row=False, samples=2, balanced=mirrored))
        log_probs = run(model, repeated(x, 2, len(x))).log_softmax(-1).unflatten(0, (-1, 2))
    mean = log_probs.logsumexp(1) - torch.tensor(2.0).log()
    entropies = [-(each.exp() * each).sum(-1) for each in (mean, log_probs)]
    return (entropies[0] - entropies[1].mean(1)).mean()


def regulariser(model: nn.Module, data: Data) -> dict[str, Any]:
    """The mutual information of independent and of mirrored draws, and the variance of its gradient over its square."""
    model.train()
    images, found = batch_of(data, torch.arange(ROWS))[0], {}
    x = images + 0.1 * torch.randn_like(images)
    for name in ("independent", "mirrored"):
        values, each = [], []
        for _ in range(2 * STEPS["lenet"]):
            value = information(model, x, mirrored=name == "mirrored")
            values.append(float(value.detach()))
            each.append(torch.cat(list(flat_gradients(model, value).values())))
        stacked = torch.stack(each).double()
        variance = float(squares(stacked).sum() / (len(stacked) - 1))
        size = float(stacked.mean(0).square().sum()) - variance / len(stacked)
        found[name] = {"information": statistics.fmean(values), "relative variance": variance / size}
    return found


# Training.


def trial(task: Task, data: Data, network: str, method: str, seed: int) -> dict[str, float]:
    """The test NLL after a short training from scratch with two samples of either kind, and one of twice the rows."""
    epochs, found = {"mlp": 15.0, "lenet": 1.0}[network], {}
    rows = torch.arange(len(data.test))[:1000]
    x, y = data.inputs.prepare(data.test.raw(rows)), data.test.targets[rows]
    for name, step in TWO.items():
        torch.manual_seed(seed)
        model = by.convert(task.network(data), methods(network)[method])
        optimizer, likelihood = torch.optim.Adam(model.parameters(), 3e-3), likelihood_of(data)
        options = {key: value for key, value in step.items() if key != "times"}
        model.train()
        for index in range(int(epochs * len(data.train) / 50)):
            order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(1000 * seed + index))
            batch = batch_of(data, order[: 50 * step.get("times", 1)])
            optimizer.zero_grad()
            by.elbo(model, *batch, n=len(data.train), likelihood=likelihood, beta=0.1, **options).loss.backward()
            optimizer.step()
        model.eval()
        target = y.float() if y.is_floating_point() else y
        draws = by.predict(model, x, 20, likelihood=likelihood, draws=True).draws
        each = torch.stack([likelihood.log_prob(draw, target) for draw in draws])
        found[name] = float(torch.tensor(len(each)).log() - each.logsumexp(0).mean())
    return found


# The page.


def cell(found: dict[str, Any] | None) -> str:
    """A ratio with its interval."""
    return "–" if found is None else f"{found['ratio']:.2f} ({found['low']:.2f}–{found['high']:.2f})"


def page(results: dict[str, Any]) -> str:
    """The tables in Markdown."""
    parts = (__doc__ or "").split("\n\n")
    lines = ["# How much less gradients vary with balanced samples", ""]
    lines += ["Written by `python -m benchmarks.gradient_variance`. " + " ".join(parts[1].split()), ""]
    columns = {
        "S = 2, the same rows": "2, balanced, same rows",
        "S = 2, other rows in each step": "2, balanced, other rows",
        "twice the rows, other rows in each step": "2, twice the rows, other rows",
        "S = 4, the same rows": "4, balanced, same rows",
    }
    for kind, title in KINDS.items():
        lines += [f"## {title[0].upper()}{title[1:]}", ""]
        lines += [f"| network | method | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
        for name, each in results["variance"].items():
            network, method = name.split("/")
            if any(kind in pairs for pairs in each.values()):
                cells = [cell(each.get(column, {}).get(kind)) for column in columns.values()]
                lines.append(f"| {TASKS[network].title} | {method} | {' | '.join(cells)} |")
        lines.append("")
    lines += [
        "## The uncertainty regulariser: two draws of each row",
        "",
        "With mirrored noise two draws are further apart, so their mutual information is larger: another objective, "
        "so `by.uncertainty_loss` keeps independent draws. "
        "The last two columns are the variance of its gradient over the square of its mean.",
        "",
        "| method | information, independent | mirrored | relative variance, independent | mirrored |",
        "|---|---|---|---|---|",
    ]
    for method, each in results["regulariser"].items():
        values = [each[name][what] for what in ("information", "relative variance") for name in each]
        lines.append(f"| {method} | {' | '.join(f'{value:.3g}' for value in values)} |")
    lines += ["", "## Training from scratch", ""]
    lines += ["Test NLL after as many steps, mean over seeds; differences are paired, with their standard error.", ""]
    lines += ["| network | method | seeds | independent | balanced | twice the rows | balanced - independent |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for name, each in results["training"].items():
        network, method = name.split("/")
        means = [statistics.fmean(seed[kind] for seed in each) for kind in TWO]
        paired = [seed["balanced"] - seed["independent"] for seed in each]
        error = statistics.stdev(paired) / len(paired) ** 0.5
        cells = [*(f"{mean:.4f}" for mean in means), f"{statistics.fmean(paired):+.4f} ± {error:.4f}"]
        lines.append(f"| {TASKS[network].title} | {method} | {len(each)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def tuned(network: str, method: str, plain: nn.Module, data: Data) -> nn.Module:
    """A trained network converted by a method and fine-tuned."""
    import copy

    torch.manual_seed(1)
    model = by.convert(copy.deepcopy(plain), methods(network)[method])
    fit(model, TASKS[network], data, TUNING[network])
    return model


def main() -> None:
    """Measure what is missing, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--redraw", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("BAYESIFY_DATA", str(data_folder()))
    empty: dict[str, Any] = {"variance": {}, "regulariser": {}, "training": {}}
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else empty

    def keep() -> None:
        results["versions"] = {"torch": torch.__version__, "python": platform.python_version()}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        RESULTS.with_suffix(".md").write_text(page(results), encoding="utf-8")

    for network in [] if given.redraw else EPOCHS:
        if all(f"{network}/{method}" in results["variance"] for method in methods(network)):
            continue
        task, data = TASKS[network], TASKS[network].load()
        torch.manual_seed(0)
        plain = task.network(data)
        fit(plain, task, data, EPOCHS[network])
        for method in methods(network):
            key = f"{network}/{method}"
            if key not in results["variance"]:
                model = tuned(network, method, plain, data)
                results["variance"][key] = ratios(network, model, data)
                if network == "lenet" and method in ("IBNN", "Rank1", "MCDropout", "MeanField flipout"):
                    results["regulariser"][method] = regulariser(model, data)
                keep()
                print(key, results["variance"][key]["2, balanced, same rows"], flush=True)
    for network, chosen in () if given.redraw else TRIALS.items():
        for method, seeds in chosen.items():
            key = f"{network}/{method}"
            if key not in results["training"]:
                task, data = TASKS[network], TASKS[network].load()
                results["training"][key] = [trial(task, data, network, method, seed) for seed in range(seeds)]
                keep()
                print(key, results["training"][key], flush=True)
    keep()


if __name__ == "__main__":
    main()
