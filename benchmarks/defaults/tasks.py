"""The suite: small tasks with a training, a validation and a test split, other data, and a network.

Validation rows are for choosing, test rows for showing; both are the same for every seed, which decides the training
rows, the initial network and the order of rows. Other data are split in the same way. Real targets are standardised.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import bayesify as by
from bayesify.lab.data import Data, load
from bayesify.lab.models import build
from benchmarks.draws import CIFAR, data_folder, lenet_with_norms, resnet20

Pair = tuple[Tensor, Tensor]


@dataclass
class Split:
    """The rows of a task for one seed; `other` are inputs of another kind, by the split that they belong to."""

    train: Pair
    validation: Pair
    test: Pair
    other: dict[str, Tensor] = field(default_factory=dict)

    @property
    def is_regression(self) -> bool:
        """Whether targets are real."""
        return self.train[1].is_floating_point()


@dataclass(frozen=True)
class Task:
    """A task: its rows, its network, how many epochs train the plain network, and how many more follow.

    From scratch, a network is trained for both. `epochs` is 0 where the network comes with trained weights.
    """

    title: str
    rows: Callable[[int], Split]
    network: Callable[[Split], nn.Module]
    epochs: int
    further: int
    batch: int = 64
    draws: int = 20

    def likelihood(self, split: Split) -> by.Categorical | by.Gaussian:
        """What outputs mean; the noise of real targets is learnt."""
        return by.Gaussian(precision="learned") if split.is_regression else by.Categorical()


def chosen(count: int, most: int, seed: int) -> Tensor:
    """Some of `count` rows, in random order."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:most]


def spread(count: int, most: int) -> Tensor:
    """Some of `count` rows, evenly spread."""
    return torch.arange(count)[:: max(1, count // most)][:most]


def halves(x: Tensor) -> dict[str, Tensor]:
    """Every second row for validation, the others for the test."""
    return {"validation": x[::2], "test": x[1::2]}


def taken(data: Data, split: str, rows: Tensor) -> Pair:
    """Prepared inputs and targets of some rows."""
    examples = getattr(data, split)
    return data.inputs.prepare(examples.raw(rows)), examples.targets[rows]


# Images.


def fashion(seed: int) -> Split:
    """4,000 images of clothing, 1,000 for validation, 4,000 for the test; MNIST is other data."""
    data = load("fashion-mnist", validation=1000)
    digits = load("mnist").test
    other = data.inputs.prepare(digits.raw(spread(len(digits), 2000)))
    return Split(
        taken(data, "train", chosen(len(data.train), 4000, seed)),
        taken(data, "validation", torch.arange(1000)),
        taken(data, "test", spread(len(data.test), 4000)),
        halves(other),
    )


def small_conv_net(split: Split) -> nn.Module:
    """Two convolutions and two linear layers, without norms."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(32 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def cifar10(seed: int) -> Split:
    """4,000 images; as the network has seen all training images, test images 0 to 4999 are for validation.

    Of these 500, and 1,000 of the others for the test. CIFAR-100 is other data.
    """
    data = load("cifar10", validation="test:5000", **CIFAR)
    near = load("cifar100", **CIFAR).test
    return Split(
        taken(data, "train", chosen(len(data.train), 4000, seed)),
        taken(data, "validation", spread(5000, 500)),
        taken(data, "test", spread(5000, 1000)),
        halves(data.inputs.prepare(near.raw(spread(len(near), 1000)))),
    )


WRONG = 0.1


def noisy_digits(seed: int) -> Split:
    """250 digits of 8×8 pixels, a tenth of them with a wrong label; patches of photographs are other data."""
    data = load("digits", validation=500, test=1000)
    rows = chosen(len(data.train), 250, seed)
    x, y = taken(data, "train", rows)
    generator = torch.Generator().manual_seed(seed)
    is_wrong = torch.randperm(len(y), generator=generator) < WRONG * len(y)
    others = (y + torch.randint(1, 10, y.shape, generator=generator)) % 10
    return Split(
        (x, torch.where(is_wrong, others, y)),
        taken(data, "validation", torch.arange(500)),
        taken(data, "test", torch.arange(1000)),
        halves(data.inputs.prepare(photograph_patches(1000))),
    )


def photograph_patches(count: int) -> Tensor:
    """Grey patches of 8×8 pixels of scikit-learn's two photographs."""
    from sklearn.datasets import load_sample_images

    grey = [torch.from_numpy(np.array(image)).float().mean(-1) for image in load_sample_images().images]
    patches = torch.cat([image.unfold(0, 8, 8).unfold(1, 8, 8).reshape(-1, 1, 8, 8) for image in grey])
    return patches[chosen(len(patches), count, 0)].round().to(torch.uint8)


def digit_net(split: Split) -> nn.Module:
    """The lab's network for tiny images."""
    return build("cnn", shape=(1, 8, 8), outputs=10)


# Tables and series.


def regression(name: str) -> Callable[[int], Split]:
    """A UCI regression; a seed is one of its fixed splits. Inputs three times as far from the mean are other data."""

    def rows(seed: int) -> Split:
        data = load("uci", path=data_folder() / "uci" / name, split=seed, validation=0.15, seed=seed)
        parts = {part: taken(data, part, torch.arange(len(getattr(data, part)))) for part in PARTS}
        other = {part: 3 * parts[part][0] for part in ("validation", "test")}
        return Split(**{part: (x, y.float()) for part, (x, y) in parts.items()}, other=other)

    return rows


PARTS = ("train", "validation", "test")


def mlp(split: Split) -> nn.Module:
    """Two hidden layers of 50 units."""
    outputs = 1 if split.is_regression else 2
    return build("mlp", shape=tuple(split.train[0].shape[1:]), outputs=outputs, hidden=[50, 50])


def patients(seed: int) -> Split:
    """Mortality from a table: age, height, weight and mean measurements, and as categories sex and the kind of unit.

    The columns are those of PhysioNet's challenge of 2012; a missing number is its column's mean.
    """
    with np.load(data_folder() / "physionet2012" / "hourly48.npz") as file:
        tables = {part: table_of(file, letter) for part, letter in zip(PARTS, "abc", strict=True)}
    rows = chosen(4000, 2000, seed)
    train = tables["train"][0][rows]
    mean, std = np.nanmean(train, 0), np.nanstd(train, 0) + 1e-6
    x = {
        part: torch.from_numpy(np.nan_to_num((values - mean) / std).astype("float32"))
        for part, (values, _) in tables.items()
    }
    y = {part: torch.from_numpy(labels.astype("int64")) for part, (_, labels) in tables.items()}
    other = {part: 3 * x[part][:1000] for part in ("validation", "test")}
    shown = spread(4000, 2000)
    return Split(
        (x["train"][rows], y["train"][rows]),
        (x["validation"][shown], y["validation"][shown]),
        (x["test"][shown], y["test"][shown]),
        other,
    )


def table_of(file: np.lib.npyio.NpzFile, letter: str) -> tuple[np.ndarray, np.ndarray]:
    """The columns of one of the three sets, with a column for each category, and its labels."""
    static, names = file[f"{letter}_static"], list(file["static_names"])
    numbers = [static[:, names.index(name)] for name in ("Age", "Height", "Weight")]
    numbers = [np.where(column > 0, column, np.nan) for column in numbers]
    categories = [static[:, names.index("ICUType")] == kind for kind in (1, 2, 3, 4)]
    categories += [static[:, names.index("Gender")] == kind for kind in (0, 1)]
    series = file[f"{letter}_x"]
    counts = np.isfinite(series).sum(1)
    means = np.where(counts > 0, np.nansum(series, 1) / np.maximum(counts, 1), np.nan)
    return np.column_stack([*numbers, *categories, means]), file[f"{letter}_y"]


def hospital(seed: int) -> Split:
    """2,000 series of 48 hours; the same with their hours in random order are other data."""
    data = load("physionet2012")
    shown = spread(4000, 1000)
    parts = {part: taken(data, part, shown) for part in ("validation", "test")}
    order = chosen(48, 48, 0)
    return Split(
        taken(data, "train", chosen(len(data.train), 2000, seed)),
        **parts,
        other={part: x[:500, order] for part, (x, _) in parts.items()},
    )


def lstm(split: Split) -> nn.Module:
    """One LSTM of 32 units, and its head."""
    return build("lstm", shape=tuple(split.train[0].shape[1:]), outputs=2, hidden=32)


# Text.

LENGTH, WORDS = 32, 4000


def reviews(seed: int) -> Split:
    """2,000 sentences of film reviews, for or against the film; short messages are other data."""
    folder = data_folder() / "text"
    sentences = [line for kind in ("neg", "pos") for line in lines_of(folder / f"rt-polarity.{kind}")]
    labels = torch.tensor([0, 1]).repeat_interleave(len(sentences) // 2)
    order = chosen(len(sentences), len(sentences), 0)
    held, rest = order[:3000], order[3000:]
    train = rest[chosen(len(rest), 2000, seed)]
    common = Counter(word for i in train.tolist() for word in words_of(sentences[i])).most_common(WORDS)
    numbers = {word: 2 + place for place, (word, _) in enumerate(common)}
    x = torch.stack([numbered(sentence, numbers) for sentence in sentences])
    messages = [line.partition("\t")[2] for line in lines_of(folder / "SMSSpamCollection")]
    other = torch.stack([numbered(messages[i], numbers) for i in spread(len(messages), 2000).tolist()])
    parts = {"train": train, "validation": held[:1000], "test": held[1000:]}
    return Split(**{part: (x[rows], labels[rows]) for part, rows in parts.items()}, other=halves(other))


def lines_of(path: Path) -> list[str]:
    """The lines of a text file."""
    return path.read_text(encoding="latin-1").splitlines()


def words_of(sentence: str) -> list[str]:
    """The words of a sentence."""
    return re.findall(r"[a-z']+|[^\sa-z']", sentence.lower())


def numbered(sentence: str, numbers: dict[str, int]) -> Tensor:
    """The numbers of its words: 1 for an unknown one, 0 after the end."""
    found = [numbers.get(word, 1) for word in words_of(sentence)[:LENGTH]] or [1]
    return torch.tensor(found + [0] * (LENGTH - len(found)))


class SmallTransformer(nn.Module):
    """Two encoder layers of width 64 over words, their mean, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS + 2, 64, padding_idx=0), nn.Embedding(LENGTH, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(64, 2)
        for table in (self.words, self.places):
            nn.init.normal_(table.weight, std=1 / math.sqrt(64))

    def forward(self, x: Tensor) -> Tensor:
        is_end = x == 0
        states = self.encoder(self.words(x) + self.places.weight, src_key_padding_mask=is_end)
        states = states.masked_fill(is_end.unsqueeze(-1), 0.0)
        logits: Tensor = self.head(states.sum(1) / (~is_end).sum(1, keepdim=True))
        return logits


TASKS = {
    "fashion": Task("Fashion-MNIST, small network without norms", fashion, small_conv_net, 30, 5),
    "fashion-norms": Task("Fashion-MNIST, LeNet with norms", fashion, lambda split: lenet_with_norms(None), 30, 5),  # type: ignore[arg-type]
    "cifar10": Task("CIFAR-10, published ResNet-20", cifar10, lambda split: resnet20(None), 0, 1),  # type: ignore[arg-type]
    "concrete": Task("concrete, MLP", regression("concrete"), mlp, 100, 30, batch=32),
    "energy": Task("energy, MLP", regression("energy"), mlp, 100, 30, batch=32),
    "patients": Task("PhysioNet as a table with categories, MLP", patients, mlp, 15, 5),
    "hospital": Task("PhysioNet, LSTM", hospital, lstm, 5, 2),
    "reviews": Task("review sentences, transformer", reviews, lambda split: SmallTransformer(), 6, 3),
    "digits": Task("250 digits, a tenth with wrong labels", noisy_digits, digit_net, 100, 20, batch=32),
}
"""Every task by name. None can be trained from scratch in minutes but those with `epochs`."""
