"""Whether the uncertainty regulariser detects data it has not seen, and its price: `python -m benchmarks.regulariser`.

A small convolutional network is trained on 4,000 images of Fashion-MNIST (20 epochs of Adam), converted with default
options and fine-tuned for 4 epochs with Adam (1e-3, and a rate of its own for the posterior) and `by.elbo`, with and
without `by.uncertainty_loss`. The out-of-distribution inputs are a quarter as many as the rows of a batch: 1,000 images
of KMNIST, blurred and compressed at random, or training images with uniform noise, or both: "noise" is the share of the
latter. Predictions have 20 draws.

Settings are chosen with one seed, on 1,000 held-out training images, and on 200 images each of KMNIST (others than in
training), traffic signs and house numbers (ood32), of which the last two are kinds that training has not seen: the
highest mean AUROC by mutual information among settings with an NLL at most 0.02 above, and an accuracy at most half a
point below, those of the best rate without the regulariser. (These bounds were set when the validation rows had been
seen, and no test row.) Three other seeds, with plain networks of their own, are shown: 2,000 test images, 300 images
each of MNIST and notMNIST, which nothing above has seen. The temperature is chosen on 500 held-out training images.
Intervals are Student's, for differences paired by seed.

Needs $BAYESIFY_DATA with fashion-mnist, kmnist, mnist, notmnist and ood32. Results are kept as they come, and not
measured again: benchmarks/results/regulariser.json and regulariser.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import platform
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from time import process_time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import bayesify as by
from bayesify.lab.data import TensorExamples, augment, load
from bayesify.lab.data.resized_images import ResizedImages
from bayesify.lab.metrics import accuracy, auroc, ece, nll
from benchmarks.familiarity import fit, images, small_network

RESULTS = Path(__file__).parent / "results" / "regulariser.json"
RUNS = Path(__file__).parents[1] / "runs" / "regulariser"
METHODS = {"Rank1": by.Rank1(), "MeanField": by.MeanField()}
CHOOSING, SHOWING = (0,), (10, 11, 12)
T_QUANTILES = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Of Student's t at 97.5%, by the number of seeds."""
ROWS, BATCH, OTHERS, DRAWS = 4000, 64, 16, 20
AUGMENT = ["blur", "jpeg"]


@dataclass(frozen=True)
class Trial:
    """A fine-tuning; an `alpha` of 0 is without the regulariser."""

    method: str
    seed: int
    epochs: int = 4
    posterior_lr: float = 1e-3
    alpha: float = 0.0
    gamma: float = 0.5
    draws: int = 4
    noise: float = 0.5
    epsilon: float = 0.031


TRIED = Trial("", -1, posterior_lr=1e-2, alpha=1.0)
PAPER = replace(TRIED, alpha=3.0, gamma=0.75, draws=2, noise=0.0)
"""With the paper's alpha, gamma and draws: to compare with, and not among the settings to choose from."""
GRID = {
    "Rank1": [
        *(replace(TRIED, alpha=0.0, posterior_lr=lr) for lr in (1e-3, 1e-2)),
        *(replace(TRIED, noise=noise, epsilon=epsilon) for noise, epsilon in ((0.5, 0.031), (0.5, 0.3), (0.0, 0.031))),
        replace(TRIED, alpha=0.3, epsilon=0.3),
        PAPER,
    ],
    "MeanField": [
        replace(TRIED, alpha=alpha, noise=0.0, posterior_lr=lr) for alpha in (0.0, 1.0) for lr in (1e-3, 1e-2)
    ],
}
"""What is tried, the best without the regulariser being the reference."""


# Data.


def prepare(x: Tensor) -> Tensor:
    """Images from 0 to 1 as the network takes them."""
    return (x - 0.286) / 0.353


@functools.cache
def clothing(seed: int) -> tuple[Tensor, Tensor]:
    """4,000 training images from 0 to 1, then 1,000 for validation, with their labels."""
    train = load("fashion-mnist", validation=0).train
    rows = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))[: ROWS + 1000]
    return train.raw(rows).float() / 255, train.targets[rows]


@functools.cache
def validation_sets() -> dict[str, Tensor]:
    """Other data to choose by: held-out characters, and photographs of signs and numbers in grey."""
    found = {"kmnist": images("kmnist", slice(5000, 5200))[0]}
    for name in ("gtsrb", "svhn"):
        some = np.load(Path(os.environ["BAYESIFY_DATA"]) / "ood32" / f"{name}.npz")["images"][:200]
        x = torch.from_numpy(some).permute(0, 3, 1, 2)
        found[name] = ResizedImages(TensorExamples(x, torch.zeros(len(x))), (1, 28, 28)).raw(torch.arange(len(x)))
    return {name: prepare(x) for name, x in found.items()}


@functools.cache
def test_sets() -> dict[str, Tensor]:
    """Other data to show, which neither training nor the choice has seen."""
    return {name: prepare(images(name, slice(0, 300))[0]) for name in ("mnist", "notmnist")}


# Training.


@functools.cache
def plain_network(seed: int) -> nn.Module:
    """The plain network, trained once."""
    file = RUNS / f"plain-{seed}.pt"
    model = small_network()
    if file.exists():
        model.load_state_dict(torch.load(file, weights_only=True))
        return model
    x, y = clothing(seed)
    torch.manual_seed(seed)
    model = fit(small_network(), prepare(x[:ROWS]), y[:ROWS], 20)
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), file)
    return model


def fine_tuned(trial: Trial) -> nn.Module:
    """The plain network, converted and trained further."""
    x, y = (part[:ROWS] for part in clothing(trial.seed))
    torch.manual_seed(trial.seed)
    model = small_network()
    model.load_state_dict(plain_network(trial.seed).state_dict())
    model = by.convert(model, METHODS[trial.method]).train()
    optimizer = torch.optim.Adam(by.parameter_groups(model, lr=1e-3, posterior_lr=trial.posterior_lr))
    given = images("kmnist", slice(0, 1000))[0]
    for _ in range(trial.epochs):
        others = augment(given, AUGMENT)[torch.randperm(len(given)).repeat(2)]
        for step, rows in enumerate(torch.randperm(ROWS).split(BATCH)):
            loss = by.elbo(model, prepare(x[rows]), y[rows], n=ROWS).loss
            if trial.alpha:
                noisy = round(trial.noise * OTHERS)
                seen = by.uniform_noise(x[torch.randint(ROWS, (noisy,))], trial.epsilon)
                ood = prepare(torch.cat([seen, others[step * OTHERS :][: OTHERS - noisy]]))
                options = {"alpha": trial.alpha, "gamma": trial.gamma, "draws": trial.draws}
                loss = loss + by.uncertainty_loss(model, ood, **options)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


def measured(
    model: nn.Module, x: Tensor, y: Tensor, others: dict[str, Tensor], held_out: tuple[Tensor, Tensor] | None = None
) -> dict[str, float]:
    """Quality on clothing, and the AUROC of each other set by mutual information and by entropy.

    With held-out rows also NLL and ECE with the temperature that these choose, as in recipes.
    """
    p = by.predict(model, prepare(x), DRAWS, batch_size=500, draws=True)
    found = {"accuracy": accuracy(p.probs, y), "nll": nll(p.log_probs, y), "ece": ece(p.probs, y)}
    for name, each in others.items():
        q = by.predict(model, each, DRAWS, batch_size=500)
        found |= {name: auroc(p.epistemic, q.epistemic), f"{name} by entropy": auroc(p.entropy, q.entropy)}
    if held_out is not None:
        likelihood, seen, labels = by.Categorical(), *held_out
        likelihood.calibrate(by.predict(model, prepare(seen), DRAWS, batch_size=500, draws=True), labels)
        cool = likelihood.predictive(p.draws)
        found |= {"nll with temperature": nll(cool.log_probs, y), "ece with temperature": ece(cool.probs, y)}
    return {name: round(float(value), 5) for name, value in found.items()}


def run(trial: Trial) -> dict[str, Any]:
    """What a trial gives on the validation rows, or on the test rows for the seeds that are shown."""
    start = process_time()
    plain_network(trial.seed)
    middle = process_time()
    model = fine_tuned(trial)
    end = process_time()
    x, y = (part[ROWS:] for part in clothing(trial.seed))
    if trial.seed in SHOWING:
        found = measured(model, *images("fashion-mnist", slice(0, 2000)), test_sets(), (x[:500], y[:500]))
    else:
        found = measured(model, x, y, validation_sets())
    print(trial, found, [round(t, 1) for t in (middle - start, end - middle, process_time() - end)], flush=True)
    return found


# Results.


def key(trial: Trial) -> str:
    """A trial as text."""
    return json.dumps(asdict(trial))


def results() -> dict[str, Any]:
    """What is measured already."""
    empty: dict[str, Any] = {"trials": {}}
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else empty


def keep(trial: Trial) -> dict[str, float]:
    """What a trial gives, measured unless it is there."""
    found = results()
    if key(trial) not in found["trials"]:
        record = run(trial)
        found = results()  # to which another process may have added
        found["trials"][key(trial)] = record
        found |= {"torch": torch.__version__, "machine": platform.machine()}
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        RESULTS.with_suffix(".md").write_text(markdown(found), encoding="utf-8")
    return found["trials"][key(trial)]


def settings(trial: Trial) -> Trial:
    """The same for no method and seed in particular."""
    return replace(trial, method="", seed=-1)


def means(found: dict[str, Any], method: str) -> dict[Trial, dict[str, float]]:
    """For each setting the means of what the seeds for choosing gave, if all are there."""
    runs: dict[Trial, list[dict[str, float]]] = {}
    for text, record in found["trials"].items():
        trial = Trial(**json.loads(text))
        if trial.method == method and trial.seed in CHOOSING:
            runs.setdefault(settings(trial), []).append(record)
    whole = {each: records for each, records in runs.items() if len(records) == len(CHOOSING)}
    return {each: {name: fmean(r[name] for r in records) for name in records[0]} for each, records in whole.items()}


def detection(record: dict[str, float], by_what: str = "") -> float:
    """The mean AUROC over sets."""
    skipped = ("accuracy", "nll", "ece")
    return fmean(v for name, v in record.items() if name not in skipped and name.endswith("entropy") == bool(by_what))


def chosen(found: dict[str, Any], method: str) -> tuple[Trial, Trial] | None:
    """The best setting without the regulariser, and the one with it that detects best among those as good as that."""
    known = {each: record for each, record in means(found, method).items() if each != PAPER}
    without = {each: record for each, record in known.items() if not each.alpha}
    if not without or len(known) == len(without):
        return None
    best = min(without, key=lambda each: without[each]["nll"])
    allowed = [each for each in known if each.alpha and is_as_good(known[each], known[best])]
    ranked = sorted((each for each in known if each.alpha), key=lambda each: known[each]["nll"])
    return best, max(allowed, key=lambda each: detection(known[each])) if allowed else ranked[0]


def is_as_good(record: dict[str, float], reference: dict[str, float]) -> bool:
    """Whether on the validation rows NLL and accuracy are worse by at most 0.02 and half a point."""
    return record["nll"] <= reference["nll"] + 0.02 and record["accuracy"] >= reference["accuracy"] - 0.005


def interval(values: list[float]) -> tuple[float, float, float]:
    """The mean and its 95% interval by Student's t."""
    mean = fmean(values)
    if len(values) < 2:
        return mean, -math.inf, math.inf
    half = T_QUANTILES[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return mean, mean - half, mean + half


def shown(found: dict[str, Any], method: str) -> dict[str, list[dict[str, float]]]:
    """What the seeds that are shown gave, without and with the regulariser; the same seeds for both."""
    picked = chosen(found, method)
    if picked is None:
        return {}
    records: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
    for seed in SHOWING:
        pair = [found["trials"].get(key(replace(each, method=method, seed=seed))) for each in picked]
        if all(pair):
            records["without"].append(pair[0])
            records["with"].append(pair[1])
    return records if records["with"] else {}


# The page.

MEASURES = {
    "accuracy": "accuracy",
    "nll": "NLL",
    "ece": "ECE",
    "nll with temperature": "NLL with temperature",
    "ece with temperature": "ECE with temperature",
    "mnist": "AUROC of MNIST by mutual information",
    "notmnist": "AUROC of notMNIST by mutual information",
    "mnist by entropy": "AUROC of MNIST by entropy",
    "notmnist by entropy": "AUROC of notMNIST by entropy",
}


def words(trial: Trial) -> str:
    """The settings as cells of a table."""
    own = [f"{trial.epochs}", f"{trial.posterior_lr:g}"]
    if not trial.alpha:
        return " | ".join([*own, *["–"] * 5])
    return " | ".join([*own, *(f"{v:g}" for v in (trial.alpha, trial.gamma, trial.draws, trial.noise, trial.epsilon))])


def table(records: dict[str, list[dict[str, float]]], names: Iterable[str]) -> list[str]:
    """Lines of a table: each measure without and with the regulariser, and the difference with its interval."""
    lines = ["| | without | with | difference, 95% interval |", "|---|---|---|---|"]
    for name in names:
        columns = [[record[name] for record in records[which]] for which in ("without", "with")]
        mean, low, high = interval([b - a for a, b in zip(*columns, strict=True)])
        cells = [f"{fmean(column):.3f}" for column in columns]
        lines.append(f"| {MEASURES[name]} | {' | '.join(cells)} | {mean:+.3f} ({low:+.3f} to {high:+.3f}) |")
    return lines


def summary(found: dict[str, Any]) -> str:
    """The table in docs/training.md, of Rank1."""
    names = ("mnist", "notmnist", "accuracy", "nll", "nll with temperature", "ece", "ece with temperature")
    return "\n".join(table(shown(found, "Rank1"), names)) + "\n"


def markdown(found: dict[str, Any]) -> str:
    """The page."""
    lines = ["# The uncertainty regulariser on a small network", ""]
    paragraphs = (__doc__ or "").split("\n\n")[1:]
    lines += ["Written by `python -m benchmarks.regulariser`.", ""]
    for paragraph in paragraphs[:-1]:
        lines += [" ".join(paragraph.split()), ""]
    for method in METHODS:
        if records := shown(found, method):
            count = len(records["with"])
            lines += [f"## {method}: test rows, {count} seed{'s' * (count > 1)}", "", *table(records, MEASURES), ""]
    lines += ["## What was tried, on validation rows", ""]
    lines += ["AUROC is by mutual information, the mean of three other sets; **bold** is chosen.", ""]
    heads = ["method", "epochs", "posterior rate", "alpha", "gamma", "draws", "noise", "epsilon"]
    heads += ["accuracy", "NLL", "ECE", "AUROC", "on KMNIST"]
    lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for method in METHODS:
        picked = chosen(found, method) or ()
        for trial, record in means(found, method).items():
            values = [f"{record[name]:.3f}" for name in ("accuracy", "nll", "ece")]
            values += [f"{detection(record):.3f}", f"{record['kmnist']:.3f}"]
            title = f"**{method}**" if trial in picked else method
            lines.append(f"| {title} | {words(trial)} | {' | '.join(values)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure what is missing: first the settings to choose from, then those chosen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--redraw", action="store_true", help="write the page again, without measuring")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if not given.redraw:
        for method in METHODS:
            for seed in CHOOSING:
                for each in GRID[method]:
                    keep(replace(each, method=method, seed=seed))
        for seed in SHOWING:
            for method in METHODS:
                for each in chosen(results(), method) or ():
                    keep(replace(each, method=method, seed=seed))
    RESULTS.with_suffix(".md").write_text(markdown(results()), encoding="utf-8")


if __name__ == "__main__":
    main()
