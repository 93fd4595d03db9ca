"""Whether the uncertainty regulariser detects data it has not seen, and its price: `python -m benchmarks.regulariser`.

A small convolutional network is trained on 4,000 images of Fashion-MNIST (20 epochs of Adam), converted with default
options and fine-tuned with Adam and `by.elbo`, with and without `by.uncertainty_loss`. The out-of-distribution inputs
are half as many as the rows of a batch: training images with uniform noise, and 1,000 images of KMNIST, blurred and
compressed at random. Predictions have 20 draws.

Settings are chosen on 1,000 held-out training images, and on held-out rows of KMNIST, traffic signs and house numbers
(ood32), which the regulariser has not seen, as a mean of two seeds: the highest mean AUROC by mutual information among
those whose validation NLL and accuracy are not worse than those of the best setting without the regulariser, which has
its own rate and number of epochs. With these settings five other seeds are shown: 4,000 test images, MNIST and
notMNIST. Intervals are Student's, for differences paired by seed.

Needs $BAYESIFY_DATA with fashion-mnist, kmnist, mnist, notmnist and ood32. Results are kept as they come, and not
measured again: benchmarks/results/regulariser.json and regulariser.md.
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
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
CHOOSING, SHOWING = (0, 1), (10, 11, 12, 13, 14)
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
    return {name: prepare(images(name, slice(0, 500))[0]) for name in ("mnist", "notmnist")}


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


def measured(model: nn.Module, x: Tensor, y: Tensor, others: dict[str, Tensor]) -> dict[str, float]:
    """Quality on clothing, and the AUROC of each other set by mutual information."""
    p = by.predict(model, prepare(x), DRAWS, batch_size=500)
    found = {"accuracy": accuracy(p.probs, y), "nll": nll(p.log_probs, y), "ece": ece(p.probs, y)}
    for name, each in others.items():
        q = by.predict(model, each, DRAWS, batch_size=500)
        found |= {name: auroc(p.epistemic, q.epistemic), f"{name} by entropy": auroc(p.entropy, q.entropy)}
    return {name: round(float(value), 5) for name, value in found.items()}


def run(trial: Trial) -> dict[str, Any]:
    """What a trial gives on the validation rows, or on the test rows for the seeds that are shown."""
    start = process_time()
    plain_network(trial.seed)
    middle = process_time()
    model = fine_tuned(trial)
    end = process_time()
    if trial.seed in SHOWING:
        found = measured(model, *images("fashion-mnist", slice(0, 2000)), test_sets())
    else:
        x, y = clothing(trial.seed)
        found = measured(model, x[ROWS:], y[ROWS:], validation_sets())
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
    """Run a trial unless its result is there."""
    found = results()
    if key(trial) not in found["trials"]:
        found["trials"][key(trial)] = run(trial)
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    return found["trials"][key(trial)]
