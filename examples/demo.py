"""A network that is sure of what it has never seen, and its Bayesian version that asks a person instead.

A small convolutional network learns scikit-learn's handwritten digits. `by.Rank1()` makes it Bayesian, with default
options, and `by.Familiarity` learns what the training images look like to it. Then it is shown test digits, and other
images: letters, digits on their side, pieces of photographs, noise. Beside it: the plain network, also trained for as
many more epochs, temperature scaling, and a deep ensemble. Each asks a person about inputs that it doubts more than 95%
of the validation digits.

All of it is done five times, with five test sets that together are all 1,797 digits. Prints two tables, and writes a
picture and a page to runs/demo. Takes one to two minutes on two cores.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import demo_report
import torch
from other_images import other_images
from rich.progress import track
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import bayesify as by
from bayesify.lab.baselines.temperature import best_temperature
from bayesify.prediction.results import Classification

FOLDER = Path("runs/demo")
FOLDS, EPOCHS, MEMBERS = 5, 30, 4


@dataclass(frozen=True)
class Model:
    """Something that predicts images."""

    networks: Sequence[nn.Module]
    predict: Callable[[Tensor], Classification]
    familiarity: by.Familiarity | None = None


def main() -> None:
    torch.set_num_threads(1)  # small networks are not faster with more
    found = load_digits()
    x, y = torch.from_numpy(found.images / 16).float()[:, None], torch.from_numpy(found.target)
    folds = [one_fold(x, y, fold) for fold in track(range(FOLDS), "Five times: train, convert, ask", transient=True)]
    demo_report.write(folds, FOLDER)


def one_fold(x: Tensor, y: Tensor, fold: int) -> demo_report.Fold:
    """Train on some of the digits; predict others, and other images, with each model."""
    torch.manual_seed(fold)
    parts = torch.arange(len(x)) % FOLDS == fold
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, rest = order[parts], order[~parts]
    models = train((x[rest[300:]], y[rest[300:]]), (x[rest[:300]], y[rest[:300]]))
    images = {"validation": x[rest[:300]], "test": x[test]}
    names = {"test": [f"digit {label}" for label in y[test].tolist()]}
    for kind, (some, what) in other_images(x[test], y[test]).items():
        images[kind], names[kind] = some, what
    return demo_report.Fold(
        images,
        names,
        y[test],
        {name: {part: model.predict(some) for part, some in images.items()} for name, model in models.items()},
        {name: sum(p.numel() for net in model.networks for p in net.parameters()) for name, model in models.items()},
        models["Rank1"].familiarity,
    )


def train(data: tuple[Tensor, Tensor], validation: tuple[Tensor, Tensor]) -> dict[str, Model]:
    """The plain network, its Bayesian version, and what people would use instead."""
    members = [fit(network(), *data) for _ in range(MEMBERS)]
    plain = members[0]
    longer = fit(copy.deepcopy(plain), *data)
    temperature = best_temperature(plain(validation[0]), validation[1])
    usual = by.Familiarity.fit(plain, data, held_out=validation[0]).calibrated(average([plain], validation[0]))

    bayesian = fit(by.convert(copy.deepcopy(plain), by.Rank1()), *data)
    familiarity = by.Familiarity.fit(bayesian, data, held_out=validation[0])
    familiarity = familiarity.calibrated(by.predict(bayesian, validation[0]))
    return {
        "plain network": Model([plain], lambda x: with_doubt(average([plain], x), usual, plain, x)),
        "trained longer": Model([longer], lambda x: average([longer], x)),
        "temperature scaling": Model([plain], lambda x: average([plain], x, temperature)),
        f"ensemble of {MEMBERS}": Model(members, lambda x: average(members, x)),
        "Rank1": Model([bayesian], lambda x: by.predict(bayesian, x, familiarity=familiarity), familiarity),
    }


def network() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(256, 10)),
    )


def fit(model: nn.Module, x: Tensor, y: Tensor) -> nn.Module:
    """A usual training loop; for a Bayesian network only the loss is another."""
    is_bayesian = any(hasattr(layer, "posterior") for layer in model.children())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    model.train()
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            if is_bayesian:
                loss = by.elbo(model, x[rows], y[rows], n=len(x)).loss
            else:
                loss = F.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
    return model.eval()


@torch.no_grad()
def average(networks: Sequence[nn.Module], x: Tensor, temperature: float = 1.0) -> Classification:
    """What plain networks predict on average, in the form that `by.predict` returns."""
    outputs = torch.stack([each(x) for each in networks])
    return by.Categorical().predictive(outputs / temperature)


def with_doubt(p: Classification, familiarity: by.Familiarity, plain: nn.Module, x: Tensor) -> Classification:
    """A plain network's prediction with what `by.predict(…, familiarity=…)` adds for a Bayesian network."""
    p = replace(p, familiarity=familiarity.score(plain, x))
    return replace(p, doubt=familiarity.doubt(p))


if __name__ == "__main__":
    main()
