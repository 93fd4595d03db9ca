"""How many independent draws a balanced draw is worth: `python -m benchmarks.draws`.

Four trained networks (a CIFAR-10 ResNet-20 with published weights, a LeNet with norms on Fashion-MNIST, an MLP for a
regression, an LSTM on hourly records) are converted by every method whose draws are random, fine-tuned, and predict
test inputs. The truth is the average of 4,000 independent draws. The error of S draws is the mean squared difference
from it: of S of those draws, corrected for their share in the truth, and of S balanced draws of 24 other seeds. As the
error of independent draws falls as 1/S, the ratio of the two is how many independent draws a balanced one is worth.

Margins: the share of values whose 95% margin (`p.margin()`) after S balanced draws holds the truth. The truth is here
the average of the 4,000 draws and of the other 23 seeds' balanced draws, weighted by their precision; its own error
is allowed for. Probabilities near 0 and 1 are dominated by rare draws, and their margins hold less often. The margins
of the MLP, the LSTM and four methods of the LeNet (Rank1, Cauchy, IBNN, EMP) are of networks that were trained again by
the same recipe, not of those in the tables of worth.

Needs $BAYESIFY_DATA. Trained networks are kept in runs/draws, results are written as they come and not measured again:
benchmarks/results/draws.json, draws.md, draws.png and draws_worth.png. Options: names of networks (default: all),
--redraw.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bayesify as by
from bayesify.conversion.drawn_network import DrawnNetwork
from bayesify.lab.data import Data, load
from bayesify.lab.metrics import ece, nll
from bayesify.lab.models import build, load_weights
from bayesify.methods.draw_design import Blocks
from bayesify.prediction.results import Classification

ROOT = Path(__file__).parents[1]
RUNS, RESULTS = ROOT / "runs" / "draws", ROOT / "benchmarks" / "results" / "draws.json"
TRUTH, SEEDS = 4000, 24
SIZES = (8, 16, 20, 30, 40, 80)
MARGIN_SIZES = (20, 40, 80)
TRUTH_SEED = 10**6
GOALS = {"Rank1": 2.5, "IBNN": 2.5, "MeanField": 3, "MCDropout": 2, "DropConnect": 2, "EMP": 5, "ECMP": 5}
"""The medians over networks that are to be reached."""
Network = Callable[[Data], nn.Module]


@dataclass(frozen=True)
class Task:
    """A network, its data, how it is trained before and after conversion, and how many inputs it predicts."""

    title: str
    data: dict[str, Any]
    network: Network
    epochs: float
    tuning: float
    inputs: int
    lr: float = 1e-3
    noise: float = 0.25
    """The standard deviation of factors to start from."""

    def load(self) -> Data:
        """Its data."""
        given = dict(self.data)
        return load(**given | ({"path": data_folder() / given["path"]} if "path" in given else {}))


def lenet_with_norms(data: Data) -> nn.Module:
    """A LeNet with a batch norm after each convolution."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 5), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(800, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def mlp_with_norms(data: Data) -> nn.Module:
    """Two hidden layers of 50 units with layer norms, for one real target."""
    width = int(data.inputs.prepare(data.train.raw(torch.arange(1))).shape[-1])
    layers = [nn.Linear(width, 50), nn.LayerNorm(50), nn.ReLU(), nn.Linear(50, 50), nn.LayerNorm(50), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(50, 1))


def resnet20(data: Data) -> nn.Module:
    """The published CIFAR-10 ResNet-20."""
    network = build("resnet20", shape=(3, 32, 32), outputs=10)
    load_weights(network, data_folder() / "weights" / "resnet20-12fca82f.th")
    return network


def lstm(data: Data) -> nn.Module:
    """One LSTM of 32 units on values, and its head."""
    shape = tuple(data.inputs.prepare(data.train.raw(torch.arange(1))).shape[1:])
    return build("lstm", shape=shape, outputs=2, hidden=32)


def data_folder() -> Path:
    """Where the data is."""
    return Path(os.environ.get("BAYESIFY_DATA") or ROOT.parent / "shared" / "data")


CIFAR = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
TASKS = {
    "resnet20": Task("CIFAR-10 ResNet-20", {"name": "cifar10", **CIFAR}, resnet20, 0, 0.15, 24, noise=0.09),
    "lenet": Task("Fashion-MNIST LeNet", {"name": "fashion-mnist", "limit": 5000}, lenet_with_norms, 5, 3, 100),
    "mlp": Task("concrete MLP", {"name": "uci", "path": "uci/concrete"}, mlp_with_norms, 60, 30, 200),
    "lstm": Task("PhysioNet LSTM", {"name": "physionet2012"}, lstm, 4, 2, 100),
}


def methods(noise: float) -> dict[str, Any]:
    """Every method whose draws are random, with noise large enough to matter."""
    rate, is_deep = noise**2 / (1 + noise**2), noise < 0.1
    tails = 2500 if is_deep else 25  # the tails of a Cauchy distribution wreck a deep network
    return {
        "Rank1": by.Rank1(4, mean_std=1.2 * noise, prior_std=noise, dropout_rate=rate),
        "Rank1 Cauchy": by.Rank1(
            4, mean_std=1.2 * noise, prior_std=noise / tails**0.5, posterior="cauchy", dropout_rate=rate / tails
        ),
        "IBNN": by.IBNN(4, mean_std=1.2 * noise, prior_std=noise, scale_mean=noise, scale_std=0.02),
        "EMP": by.EMP(5, jitter=0.8 * noise),
        "ECMP": by.ECMP(5, jitter=noise),
        "MeanField": by.MeanField(estimator="shared", init_log_std=(-5.0, -4.5) if is_deep else (-3.5, -3.5)),
        "MCDropout": by.MCDropout(0.05 if is_deep else 0.1),
        "DropConnect": by.DropConnect(0.05 if is_deep else 0.1),
    }


# The networks.


def likelihood_of(data: Data) -> Any:
    """What outputs mean."""
    return by.Gaussian(precision=10.0) if data.train.targets.is_floating_point() else by.Categorical()


def trained(name: str, method: str, task: Task, data: Data) -> nn.Module:
    """The converted and fine-tuned network, from its file if there is one."""
    RUNS.mkdir(parents=True, exist_ok=True)
    plain, file = RUNS / f"{name}.safetensors", RUNS / f"{name}-{method.replace(' ', '-')}.safetensors"
    torch.manual_seed(0)
    network = task.network(data)
    if file.exists():
        return by.load(network, file).eval()
    if task.epochs:
        from safetensors.torch import load_model, save_model

        if not plain.exists():
            fit(network, task, data, task.epochs)
            save_model(network, str(plain))
        load_model(network, str(plain))
    torch.manual_seed(1)
    model = by.convert(network, methods(task.noise)[method])
    fit(model, task, data, task.tuning)
    by.save(model, file)
    return model.eval()


def fit(network: nn.Module, task: Task, data: Data, epochs: float) -> None:
    """Train a plain or converted network with Adam."""
    likelihood, rows = likelihood_of(data), len(data.train)
    optimizer = torch.optim.Adam(network.parameters(), task.lr)
    is_bayesian = any(".posterior" in f".{name}" for name, _ in network.named_modules())
    network.train()
    steps = math.ceil(epochs * rows / 50)
    while steps > 0:
        for chosen in torch.randperm(rows).split(50)[:steps]:
            x, y = data.inputs.prepare(data.train.raw(chosen)), data.train.targets[chosen]
            y = y.float() if y.is_floating_point() else y
            optimizer.zero_grad()
            if is_bayesian:
                loss = by.elbo(network, x, y, n=rows, likelihood=likelihood).loss
            else:
                loss = -likelihood.log_prob(network(x), y).mean()
            loss.backward()
            optimizer.step()
            steps -= 1


# Errors.


def figures(likelihood: Any, outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
    """What some draws (S, B, …) predict: the mean, the uncertainty of the model, and metrics."""
    if isinstance(likelihood, by.Gaussian):
        return {"predictive": outputs.mean(0), "epistemic": outputs.std(0, unbiased=False)}
    p = likelihood.predictive(outputs)
    assert isinstance(p, Classification)
    return {"predictive": p.probs, "epistemic": p.epistemic, "nll": nll(p.log_probs, y), "ece": ece(p.probs, y)}


def errors(found: list[dict[str, Tensor]], truth: dict[str, Tensor]) -> dict[str, float]:
    """Mean squared differences from the truth."""
    return {
        name: statistics.fmean(float((each[name] - value).square().mean()) for each in found)
        for name, value in truth.items()
    }


def measured(model: nn.Module, task: Task, data: Data) -> dict[str, Any]:
    """The errors of independent and of balanced draws, their ratios, and how often margins hold."""
    rows = torch.arange(len(data.test))[:: max(1, len(data.test) // task.inputs)][: task.inputs]
    x, y, likelihood = data.inputs.prepare(data.test.raw(rows)), data.test.targets[rows], likelihood_of(data)
    outputs = draws_of(model, x, likelihood, TRUTH, TRUTH_SEED, "independent")
    balanced = [draws_of(model, x, likelihood, max(SIZES), seed, "balanced") for seed in range(SEEDS)]
    margins = covered(likelihood, DrawnNetwork(model).blocks, outputs, balanced)
    return compared(likelihood, outputs, balanced, y) | {"margins": margins}


def compared(likelihood: Any, outputs: Tensor, balanced: list[Tensor], y: Tensor) -> dict[str, Any]:
    """The errors of independent and of balanced draws, and their ratios."""
    truth = figures(likelihood, outputs, y)
    found: dict[str, Any] = {"rows": len(y), "independent": {}, "balanced": {}, "saved": {}}
    for size in SIZES:
        share = size / TRUTH
        parts = [figures(likelihood, some, y) for some in outputs[: TRUTH // size * size].split(size)]
        alone = {name: error / (1 - share) for name, error in errors(parts, truth).items()}
        together = errors([figures(likelihood, some[:size], y) for some in balanced], truth)
        together = {name: max(error - alone[name] * share, 1e-12) for name, error in together.items()}
        found["independent"][size], found["balanced"][size] = alone, together
        found["saved"][str(size)] = {name: alone[name] / together[name] for name in alone}
    return found


def covered(likelihood: Any, blocks: Blocks, outputs: Tensor, balanced: list[Tensor]) -> dict[str, Any]:
    """For some numbers of draws, the share of values whose margins hold the truth, and the mean margin."""

    def value_of(p: Any) -> Tensor:
        return (p.mean if isinstance(likelihood, by.Gaussian) else p.probs).double()

    many, found = likelihood.predictive(outputs), dict[str, Any]()
    first, variance = value_of(many), many.standard_error.double().square().clamp_min(1e-18)
    means = torch.stack([value_of(likelihood.predictive(some)) for some in balanced])
    middle = (first > 0.05) & (first < 0.95)
    for size in MARGIN_SIZES:
        held, nearly, width = [], [], []
        for seed, some in enumerate(balanced):
            others = torch.cat([means[:seed], means[seed + 1 :]])
            precision = 1 / variance, len(others) / others.var(0).clamp_min(1e-18)
            truth = (first * precision[0] + others.mean(0) * precision[1]) / sum(precision)
            accumulator = likelihood.accumulator(False, blocks)
            likelihood.add(accumulator, some[:size])
            p = accumulator.result()
            reach = (p.margin().double().square() + 1.96**2 / sum(precision)).sqrt()
            held.append((value_of(p) - truth).abs() <= reach + 1e-6)  # the precision of single numbers
            nearly.append((value_of(p) - truth).abs() <= reach + 0.001)
            width.append(float(p.margin().mean()))
        shares = torch.stack(held).double().mean(0)
        found[str(size)] = {"all": float(shares.mean()), "mean_margin": statistics.fmean(width)}
        if not isinstance(likelihood, by.Gaussian):
            label = shares.gather(-1, first.argmax(-1, keepdim=True))
            found[str(size)] |= {"label": float(label.mean()), "middle": float(shares[middle].mean())}
            found[str(size)]["nearly"] = float(torch.stack(nearly).double().mean())
    return found


def draws_of(model: nn.Module, x: Tensor, likelihood: Any, samples: int, seed: int, design: str) -> Tensor:
    """The outputs (S, B, …) of some draws."""
    options: dict[str, Any] = {"seed": seed, "likelihood": likelihood, "draws": True, "design": design}
    return torch.cat([by.predict(model, some, samples, **options).draws for some in x.split(100)], 1)


# The page.


def median(results: dict[str, Any], method: str, sizes: tuple[str, ...], measure: str = "predictive") -> float:
    """The median over networks and numbers of draws of what a draw is worth."""
    found = [
        each["saved"][size].get(measure) for each in results.values() for size in sizes if each["method"] == method
    ]
    return statistics.median([value for value in found if value is not None])


def shown(worth: float) -> str:
    """A number for a cell; above 50 it is not known, as the truth is not exact."""
    return "–" if math.isnan(worth) else "> 50" if worth > 50 else f"{worth:.1f}"


def page(results: dict[str, Any]) -> str:
    """The tables in Markdown."""
    sizes = tuple(str(size) for size in SIZES)
    lines = [
        "# How many independent draws a balanced draw is worth",
        "",
        "Written by `python -m benchmarks.draws`. " + " ".join((__doc__ or "").split("\n\n")[1].split()),
        "",
        "| method | median over networks and S | goal | lowest | epistemic, median | NLL, median | ECE, median |",
        "|---|---|---|---|---|---|---|",
    ]
    for method in dict.fromkeys(each["method"] for each in results.values()):
        lowest = min(
            each["saved"][s]["predictive"] for each in results.values() for s in sizes if each["method"] == method
        )
        others = [median(results, method, sizes, measure) for measure in ("epistemic", "nll", "ece")]
        goal = f"{GOALS[method]:g}" if method in GOALS else ""
        cells = [shown(median(results, method, sizes)), goal, shown(lowest), *map(shown, others)]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    for name, task in TASKS.items():
        mine = [each for each in results.values() if each["network"] == name]
        if mine:
            lines += ["", f"## {task.title}, {mine[0]['rows']} inputs", ""]
            lines += [f"| method | {' | '.join(f'S = {size}' for size in sizes)} |"]
            lines += ["|---" * (len(sizes) + 1) + "|"]
            for each in mine:
                worth = [shown(each["saved"][size]["predictive"]) for size in sizes]
                lines.append(f"| {each['method']} | {' | '.join(worth)} |")
    lines += margins_table(results)
    return "\n".join(lines) + "\n"


def margins_table(results: dict[str, Any]) -> list[str]:
    """How often margins hold, in percent."""
    lines = ["", "## How often a 95% margin holds, in percent", ""]
    lines += [" ".join((__doc__ or "").split("\n\n")[2].split()), ""]
    lines += ["Cells: all probabilities / all, give or take 0.001 / those from 0.05 to 0.95. Of a regression: all.", ""]
    lines += [f"| network | method | {' | '.join(f'S = {size}' for size in MARGIN_SIZES)} |"]
    lines += ["|---" * (len(MARGIN_SIZES) + 2) + "|"]
    for each in results.values():
        cells = []
        for size in MARGIN_SIZES:
            found = each.get("margins", {}).get(str(size), {})
            kinds = [found[kind] for kind in ("all", "nearly", "middle") if kind in found]
            cells.append(" / ".join("–" if math.isnan(share) else f"{100 * share:.0f}" for share in kinds) or "–")
        lines.append(f"| {TASKS[each['network']].title} | {each['method']} | {' | '.join(cells)} |")
    return lines


def figure(results: dict[str, Any], path: Path) -> None:
    """A panel for each network: what a draw is worth, by the number of draws."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name in TASKS if any(each["network"] == name for each in results.values())]
    canvas, axes = pyplot.subplots(1, len(names), figsize=(3.2 * len(names), 3.4), sharey=True, squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        for each in (each for each in results.values() if each["network"] == name):
            worth = [min(each["saved"][str(size)]["predictive"], 50) for size in SIZES]
            axis.plot(SIZES, worth, marker="o", markersize=3, label=each["method"])
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.set(xscale="log", yscale="log", title=TASKS[name].title, xlabel="balanced draws")
        axis.set_xticks(SIZES, [str(size) for size in SIZES])
        axis.minorticks_off()
    axes[0][0].set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    axes[0][0].set_ylabel("worth of a draw, in independent ones")
    axes[0][-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    canvas.tight_layout()
    canvas.savefig(path, dpi=150)


def worth_figure(results: dict[str, Any], path: Path) -> None:
    """As many independent draws as 20 balanced ones are worth: a row for each method, a point for each network."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = list(dict.fromkeys(each["method"] for each in results.values()))
    most = 600  # beyond, the truth is not exact enough to tell
    canvas, axis = pyplot.subplots(figsize=(7.2, 3.6))
    for row, method in enumerate(kinds):
        worth = [20 * each["saved"]["20"]["predictive"] for each in results.values() if each["method"] == method]
        middle = min(statistics.median(worth), most)
        axis.plot([20, middle], [row, row], color="tab:blue", linewidth=7, alpha=0.3, solid_capstyle="butt")
        axis.annotate(f"{middle:.0f}", (middle, row), (0, 7), textcoords="offset points", fontsize=8, ha="center")
    names = [name for name in TASKS if any(each["network"] == name for each in results.values())]
    for name, marker in zip(names, "osD^", strict=False):
        mine = [each for each in results.values() if each["network"] == name]
        worth = [min(20 * each["saved"]["20"]["predictive"], most) for each in mine]
        rows = [kinds.index(each["method"]) for each in mine]
        axis.plot(worth, rows, marker, markersize=5, label=TASKS[name].title, clip_on=False)
    axis.axvline(20, color="grey", linewidth=0.8)
    axis.set(xscale="log", xlim=(18, most), ylim=(len(kinds) - 0.5, -0.8))
    axis.set_xlabel("independent draws as precise as 20 balanced ones (bar and number: the median)")
    axis.set_yticks(range(len(kinds)), kinds)
    axis.set_xticks([20, 50, 100, 200, most], ["20", "50", "100", "200", "600 or more"])
    axis.minorticks_off()
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.45, 1.14), ncols=len(names), frameon=False)
    canvas.tight_layout()
    canvas.savefig(path, dpi=150)


def main() -> None:
    """Measure what is missing, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", choices=[*TASKS, []])
    parser.add_argument("--redraw", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("BAYESIFY_DATA", str(data_folder()))
    read = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"results": {}}
    results = read["results"]
    for name in [] if given.redraw else given.networks or TASKS:
        task, data = TASKS[name], TASKS[name].load()
        for method in methods(task.noise):
            key = f"{name}/{method}"
            if "margins" not in results.get(key, {}):
                found = measured(trained(name, method, task, data), task, data)
                read = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"results": {}}  # of another process
                read["results"][key] = {"network": name, "method": method, **found}
                read["versions"] = {"torch": torch.__version__, "python": platform.python_version()}
                RESULTS.write_text(json.dumps(read, indent=1) + "\n")
                print(key, {s: round(v["predictive"], 1) for s, v in found["saved"].items()}, flush=True)
    results = json.loads(RESULTS.read_text())["results"]
    order = [f"{name}/{method}" for name, task in TASKS.items() for method in methods(task.noise)]
    results = {key: results[key] for key in order if key in results}
    RESULTS.with_suffix(".md").write_text(page(results), encoding="utf-8")
    figure(results, RESULTS.with_suffix(".png"))
    worth_figure(results, RESULTS.with_name("draws_worth.png"))


if __name__ == "__main__":
    main()
