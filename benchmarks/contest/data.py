"""The data sets of the contest: rows to train on, to choose by and to show, other data, corruptions, and a network.

Rows that are held out have a fold. What is shown of fold k was chosen (options, temperature, ranks) on held-out rows of
the other fold. An ordinary data set shows fold 0 only: fold 1 are its validation rows. CIFAR-10, whose network has seen
all training images, shows both halves of its test images. The seed decides the training rows, the initial network and
the order of rows; held-out rows are the same for every seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from bayesify.lab.data import Data, Examples, load
from bayesify.lab.data.augment import augment
from bayesify.lab.models import build
from bayesify.lab.shift import CORRUPTIONS, shifted
from benchmarks.defaults.tasks import PARTS, chosen, spread, table_of, taken
from benchmarks.draws import CIFAR, data_folder, resnet20

HELD = "held"
SEVERITIES = (1, 3, 5)


@dataclass
class Group:
    """Some rows of which predictions are wanted: inputs, labels unless they are other data, and the fold of each."""

    x: Tensor
    y: Tensor | None
    fold: Tensor


@dataclass
class Rows:
    """All rows for one seed. Groups are "held", "corrupted …", "near …" and "far …"."""

    train: tuple[Tensor, Tensor]
    groups: dict[str, Group]


@dataclass(frozen=True)
class DataSet:
    """A data set, its network and how long this is trained.

    From scratch for `epochs`; or fine-tuned for `further` epochs, from a network that was trained plainly for `epochs`
    on the same rows, or that comes with published weights (`epochs` is 0).
    """

    title: str
    rows: Callable[[int], Rows]
    network: Callable[[Rows], nn.Module]
    epochs: int
    further: int = 0
    lr: float = 1e-2
    """The peak of the rate from scratch."""
    further_lr: float = 2e-3
    """The peak of the rate when a network is fine-tuned."""
    weight_decay: float = 1e-2
    batch: int = 128
    folds: int = 1
    seeds: int = 5
    draws: int | None = None
    """How many draws to predict with; None is the library's default for the method."""
    networks: str = ""
    """The name under which plain networks are kept, if another data set has the same ones."""
    augmented: tuple[str, ...] = field(default=())


# Images.


def convolutional_network(rows: Rows) -> nn.Module:
    """Two strided convolutions with batch norms and two linear layers: a LeNet that is quick on a CPU."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 5, stride=2, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(1568, 160), nn.ReLU(), nn.Linear(160, 10)),
    )


def fashion(seed: int) -> Rows:
    """6,000 images of clothing; 2,000 to choose by and 5,000 to show.

    MNIST and KMNIST are near, notMNIST, noise, images of one grey and multiplied images far.
    """
    data = load("fashion-mnist", validation=2000)
    test = spread(len(data.test), 5000)
    groups = {HELD: joined(taken(data, "test", test), taken(data, "validation", torch.arange(2000)))}
    groups |= corrupted(data, data.test.take(test), 100, folds=1)
    others = {name: load(name).test for name in ("mnist", "kmnist", "notmnist")}
    prepared = {name: data.inputs.prepare(each.raw(spread(len(each), 500))) for name, each in others.items()}
    groups |= {f"near {name}": other(prepared[name]) for name in ("mnist", "kmnist")}
    groups["far notmnist"] = other(prepared["notmnist"])
    groups |= made_up(data, groups[HELD].x[:250])
    return Rows(taken(data, "train", chosen(len(data.train), 6000, seed)), groups)


def cifar10(seed: int) -> Rows:
    """10,000 of the training images, which the published network has seen; all 10,000 test images in two halves.

    CIFAR-100 is near; SVHN, textures, noise, images of one colour and multiplied images are far.
    """
    data = load("cifar10", validation=0, **CIFAR)
    x, y = taken(data, "test", torch.arange(len(data.test)))
    groups = {HELD: Group(x, y, (torch.arange(len(y)) >= len(y) // 2).long())}
    groups |= corrupted(data, data.test, 100, folds=2)
    near = load("cifar100", **CIFAR).test
    groups["near cifar100"] = other(data.inputs.prepare(near.raw(spread(len(near), 1000))), folds=2)
    for name in ("svhn", "dtd"):
        images = torch.from_numpy(np.load(data_folder() / "ood32" / f"{name}.npz")["images"]).permute(0, 3, 1, 2)
        groups[f"far {name}"] = other(data.inputs.prepare(images[spread(len(images), 500)]), folds=2)
    groups |= made_up(data, x[spread(len(x), 250)], folds=2)
    return Rows(taken(data, "train", chosen(len(data.train), 10_000, seed)), groups)


def joined(shown: tuple[Tensor, Tensor], validation: tuple[Tensor, Tensor]) -> Group:
    """Held-out rows of fold 0, to show, and of fold 1, to choose by."""
    pairs = (shown, validation)
    fold = torch.cat([torch.full((len(y),), k) for k, (_, y) in enumerate(pairs)])
    return Group(torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs]), fold)


def other(x: Tensor, *, folds: int = 1) -> Group:
    """Other data, to show in all folds in turn."""
    return Group(x, None, torch.arange(len(x)) % folds)


def corrupted(data: Data, test: Examples, count: int, *, folds: int) -> dict[str, Group]:
    """Test images under each corruption, each kind with `count` images of its own, at three severities.

    With two folds, a corrupted image belongs to the fold of the image.
    """
    rows = {}
    for i, kind in enumerate(CORRUPTIONS):
        own = torch.arange(i, len(test), len(CORRUPTIONS))
        rows[kind] = own[spread(len(own), count)]
    y = torch.cat([test.targets[some] for some in rows.values()])
    fold = (torch.cat(list(rows.values())) >= len(test) / folds).long()
    found = {}
    for severity in SEVERITIES:
        raw = torch.cat([shifted(test, kind, severity).raw(some) for kind, some in rows.items()])
        found[f"corrupted {severity}"] = Group(data.inputs.prepare(raw), y, fold)
    return found


def made_up(data: Data, x: Tensor, *, folds: int = 1) -> dict[str, Group]:
    """Noise, images of one colour, and prepared images multiplied by ten."""
    generator = torch.Generator().manual_seed(0)
    shape = tuple(x.shape[1:])
    noise = torch.rand(len(x), *shape, generator=generator)
    flat = torch.rand(len(x), shape[0], 1, 1, generator=generator).expand(-1, *shape)
    found = {"far noise": data.inputs.prepare(noise), "far flat": data.inputs.prepare(flat), "far x10": 10 * x}
    return {name: other(each, folds=folds) for name, each in found.items()}


# Tables and series of PhysioNet's challenge of 2012: train on set a, choose on set b, show set c.


def patients(seed: int) -> Rows:
    """Mortality from a table with categories: 3,000 patients to train on, 4,000 to choose by, 4,000 to show.

    Near are patients each of whose columns is another patient's; far are columns three and ten times as far from the
    mean.
    """
    with np.load(data_folder() / "physionet2012" / "hourly48.npz") as file:
        tables = {part: table_of(file, letter) for part, letter in zip(PARTS, "abc", strict=True)}
    rows = chosen(4000, 3000, seed)
    train = tables["train"][0][rows]
    mean, std = np.nanmean(train, 0), np.nanstd(train, 0) + 1e-6
    pairs = {
        part: (
            torch.from_numpy(np.nan_to_num((values - mean) / std).astype("float32")),
            torch.from_numpy(labels.astype("int64")),
        )
        for part, (values, labels) in tables.items()
    }
    x, y = pairs["train"]
    some = pairs["test"][0][:1000]
    mixed = torch.stack([column[chosen(len(some), len(some), i)] for i, column in enumerate(some.T)], 1)
    groups = {HELD: joined(pairs["test"], pairs["validation"]), "near mixed columns": other(mixed)}
    groups |= {"far x3": other(3 * some), "far x10": other(10 * some)}
    return Rows((x[rows], y[rows]), groups)


def hospital(seed: int) -> Rows:
    """Mortality from 48 hours of 37 measurements: 2,000 series to train on, 2,000 to choose by, 4,000 to show.

    Near are series with their hours in random order; far are values three and ten times as far from the mean.
    """
    data = load("physionet2012")
    shown = taken(data, "test", torch.arange(len(data.test)))
    groups = {HELD: joined(shown, taken(data, "validation", spread(len(data.validation), 2000)))}
    some = shown[0][:500]
    groups["near shuffled hours"] = other(some[:, chosen(some.shape[1], some.shape[1], 0)])
    groups |= {"far x3": other(3 * some), "far x10": other(10 * some)}
    return Rows(taken(data, "train", chosen(len(data.train), 2000, seed)), groups)


def mlp(rows: Rows) -> nn.Module:
    """Two hidden layers of 256 units."""
    return build("mlp", shape=tuple(rows.train[0].shape[1:]), outputs=2, hidden=[256, 256])


def lstm(rows: Rows) -> nn.Module:
    """One LSTM of 32 units, and its head."""
    return build("lstm", shape=tuple(rows.train[0].shape[1:]), outputs=2, hidden=32)


def augmented(x: Tensor, steps: tuple[str, ...]) -> Tensor:
    """Training inputs, changed at random where the data set wants it."""
    return augment(x, steps) if steps else x


DATA = {
    "fashion-scratch": DataSet(
        "Fashion-MNIST, a small convolutional network from scratch",
        fashion,
        convolutional_network,
        8,
        weight_decay=0.1,
        networks="fashion",
    ),
    "fashion-tuned": DataSet(
        "Fashion-MNIST, the same network fine-tuned",
        fashion,
        convolutional_network,
        8,
        further=3,
        weight_decay=0.1,
        networks="fashion",
    ),
    "patients": DataSet("PhysioNet 2012 as a table, an MLP from scratch", patients, mlp, 10, batch=64, lr=1e-3),
    "hospital": DataSet("PhysioNet 2012 as series, an LSTM from scratch", hospital, lstm, 6, batch=64, lr=4e-3),
    "cifar10": DataSet(
        "CIFAR-10, a published ResNet-20 fine-tuned",
        cifar10,
        lambda rows: resnet20(None),  # type: ignore[arg-type]
        0,
        further=3,
        further_lr=1e-3,
        weight_decay=1e-4,
        folds=2,
        seeds=3,
        draws=8,
        augmented=("pad_crop", "flip"),
    ),
}
"""Every data set by name."""
SMALL = [name for name in DATA if name != "cifar10"]
"""Those that take minutes."""
