"""The gallery of the report: the inputs that each model is least and most certain of."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from PIL import Image

from bayesify.lab.comparison.row import Row
from bayesify.lab.data import (
    Classes,
    Columns,
    Images,
    Inputs,
    Labels,
    Masks,
    Reals,
    Targets,
    inputs_from_dict,
    targets_from_dict,
)
from bayesify.lab.evaluation.rows import GALLERY, SHOWN, damaged, gallery_of, require_arrays
from bayesify.lab.report.figures.draw import gallery_figure
from bayesify.lab.report.figures.page_figure import File, as_csv, data_uri, slug
from bayesify.lab.report.figures.style import as_png
from bayesify.lab.runs import Run, read_json

MOST_PIXELS = 96
"""The most pixels of an image on a side; larger ones are scaled down."""
BARS = 3
"""This many of the most probable classes are shown, and the true class."""
ROUNDING = 1e-6
"""A number below this, relative to its column's standard deviation, is zero but for rounding."""
OUTCOMES: dict[type[Targets], tuple[str, ...]] = {
    Classes: ("entropy", "epistemic", "probs"),
    Labels: ("entropy", "epistemic", "probs"),
    Masks: ("entropy", "epistemic", "label"),
    Reals: ("epistemic_std", "mean", "std"),
}
"""What a gallery has of each kind of targets."""
MOST_NUMBERS = 24
"""Inputs with more numbers than this are not written out."""


@dataclass(frozen=True)
class Bar:
    """A class with its probability."""

    name: str
    share: float
    is_truth: bool


@dataclass(frozen=True)
class Card:
    """One input and its prediction."""

    row: int
    picture: str
    """The image as a data URI, if the input is one."""
    values: tuple[str, ...]
    """The values of the input, if it is a row of a table or a short array."""
    bars: tuple[Bar, ...]
    predicted: str
    truth: str
    total: float
    epistemic: float | None
    """None for a single network."""

    @property
    def is_right(self) -> bool:
        """Whether the predicted class is the true one."""
        return self.predicted == self.truth

    @property
    def alt(self) -> str:
        """The alternative text of the image."""
        return f"row {self.row}: {self.truth}, predicted as {self.predicted}"


@dataclass(frozen=True)
class Gallery:
    """A model's least certain inputs and its most certain ones."""

    name: str
    least_certain: tuple[Card, ...]
    most_certain: tuple[Card, ...]
    columns: tuple[str, ...]
    """The names of the values, if inputs are shown as values."""
    unit: str
    files: tuple[File, ...]

    @classmethod
    def of(cls, index: int, row: Row, split: str) -> Gallery | None:
        """The gallery of a model's first run, or None if its evaluation has none for the split."""
        run = row.runs[0]
        rows = _GalleryRows.of(run, split)
        if rows is None:
            return None
        try:
            cards = rows.cards()
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # of arrays that don't fit the data
            raise damaged(run, GALLERY, f"its arrays don't fit the data ({error})") from error
        half = len(cards) // 2
        files = rows.files(slug("gallery", index + 1, row.name), cards)
        return cls(row.name, cards[:half], cards[half:], rows.columns, rows.unit, tuple(files))


@dataclass(frozen=True)
class _GalleryRows:
    """The gallery rows of an evaluated run, least certain first, with their inputs and targets."""

    arrays: Mapping[str, np.ndarray]
    inputs: Inputs
    targets: Targets
    is_single: bool

    @classmethod
    def of(cls, run: Run, split: str) -> _GalleryRows | None:
        found = gallery_of(run) if (run.folder / GALLERY).exists() else {}
        arrays = {key.removeprefix(f"{split}_"): each for key, each in found.items() if key.startswith(f"{split}_")}
        shown = min(SHOWN, run.metrics[split]["n"] // 2)
        if not found or not shown:
            return None
        description = read_json(run.folder / "preprocessing.json")
        inputs, targets = inputs_from_dict(description["inputs"]), targets_from_dict(description["targets"])
        require_arrays(run, GALLERY, arrays, ("row", "inputs", "truth", *OUTCOMES[type(targets)]), 2 * shown)
        if not isinstance(targets, Reals) and not _are_classes(arrays, targets):
            raise damaged(run, GALLERY, f"its classes are not {targets.count}, as in preprocessing.json")
        return cls(arrays, inputs, targets, run.metrics[split].get("draws") == 1)

    @property
    def unit(self) -> str:
        return "standard deviations of the target" if isinstance(self.targets, Reals) else "nats"

    @property
    def columns(self) -> tuple[str, ...]:
        """A name for each value of an input, unless it is an image or too long."""
        if isinstance(self.inputs, Columns):
            return (*self.inputs.numeric, *self.inputs.categorical)
        inputs = self.arrays["inputs"]
        short = not isinstance(self.inputs, Images) and inputs.ndim == 2 and inputs.shape[1] <= MOST_NUMBERS
        return tuple(f"x{i}" for i in range(inputs.shape[1])) if short else ()

    def cards(self) -> tuple[Card, ...]:
        total, epistemic = self._uncertainties()
        return tuple(
            Card(
                row=int(row),
                picture=data_uri(_png(self._picture(i)), "image/png") if isinstance(self.inputs, Images) else "",
                values=self._values(x) if self.columns else (),
                bars=self._bars(i),
                predicted=self._predicted(i),
                truth=self._target(self.arrays["truth"][i]),
                total=float(total[i]),
                epistemic=None if self.is_single else float(epistemic[i]),
            )
            for i, (row, x) in enumerate(zip(self.arrays["row"], self.arrays["inputs"], strict=True))
        )

    def files(self, key: str, cards: Sequence[Card]) -> Iterator[File]:
        """The images as PNG, if they are images without masks, and all rows with their predictions as CSV."""
        if isinstance(self.inputs, Images) and not isinstance(self.targets, Masks):
            pictures = [_pixels(x) for x in self.arrays["inputs"]]
            titles = [f"true: {card.truth}\npredicted: {card.predicted}" for card in cards]
            yield File(f"{key}.png", as_png(gallery_figure(pictures, titles)))
        columns: dict[str, Sequence[Any]] = {
            "row": [card.row for card in cards],
            **{name: [card.values[i] for card in cards] for i, name in enumerate(self.columns)},
            "truth": [card.truth for card in cards],
            "predicted": [card.predicted for card in cards],
            "total_uncertainty": [card.total for card in cards],
            "epistemic_uncertainty": [card.epistemic for card in cards],
        }
        if "probs" in self.arrays:
            columns |= {f"p_{name}": self.arrays["probs"][:, i].tolist() for i, name in enumerate(self.targets.names)}
        yield File(f"{key}.csv", as_csv(columns))

    def _picture(self, i: int) -> np.ndarray:
        """An image (C, H, W); with masks, beside it the true class of each pixel and the predicted one in colours."""
        x: np.ndarray = self.arrays["inputs"][i]
        if not isinstance(self.targets, Masks):
            return x
        image = x if x.shape[0] == 3 else np.repeat(x[:1], 3, 0)
        gap = np.ones((3, x.shape[1], 1))
        truth, label = (_coloured(self.arrays[name][i]) for name in ("truth", "label"))
        return np.concatenate([image, gap, truth, gap, label], 2)

    def _uncertainties(self) -> tuple[np.ndarray, np.ndarray]:
        """Total and epistemic uncertainty: entropies, or standard deviations relative to the target's."""
        if isinstance(self.targets, Reals):
            each = self.arrays["std"].reshape(len(self.arrays["std"]), -1) / np.array(self.targets.std)
            return np.sqrt((each**2).mean(1)), self.arrays["epistemic_std"]
        return self.arrays["entropy"], self.arrays["epistemic"]

    def _values(self, x: np.ndarray) -> tuple[str, ...]:
        """The values of an input, in their own units."""
        if not isinstance(self.inputs, Columns):
            return tuple(f"{value:.4g}" for value in x)
        numbers = zip(x, self.inputs.mean, self.inputs.std, strict=False)
        codes = zip(x[len(self.inputs.numeric) :], self.inputs.categories, strict=True)
        words = (categories[int(code)] if code >= 0 else "unseen" for code, categories in codes)
        shown = (_number(value * std + mean, std) for value, mean, std in numbers)
        return (*shown, *words)

    def _bars(self, i: int) -> tuple[Bar, ...]:
        """The most probable classes, and the true class."""
        if "probs" not in self.arrays:
            return ()
        probs, truth = self.arrays["probs"][i], self.arrays["truth"][i]
        true = np.flatnonzero(truth).tolist() if isinstance(self.targets, Labels) else [int(truth)]
        first = np.argsort(-probs, kind="stable")[:BARS].tolist()
        shown = [*first, *(c for c in true if c not in first)]
        return tuple(Bar(self.targets.names[c], float(probs[c]), c in true) for c in shown)

    def _predicted(self, i: int) -> str:
        if isinstance(self.targets, Masks):
            return f"{(self.arrays['label'][i] == self.arrays['truth'][i]).mean():.0%} of pixels right"
        if isinstance(self.targets, Labels):
            return self._several(self.arrays["probs"][i] >= 0.5)
        if "probs" in self.arrays:
            return self.targets.names[int(self.arrays["probs"][i].argmax())]
        pairs = zip(*(np.ravel(self.arrays[name][i]) for name in ("mean", "std")), strict=True)
        return ", ".join(f"{mean:.4g} ± {std:.2g}" for mean, std in pairs)

    def _target(self, truth: np.ndarray) -> str:
        if isinstance(self.targets, Classes):
            return self.targets.names[int(truth)]
        if isinstance(self.targets, Labels):
            return self._several(truth)
        if isinstance(self.targets, Masks):
            return ", ".join(self.targets.names[c] for c in np.unique(truth))
        return ", ".join(f"{value:.4g}" for value in np.ravel(truth))

    def _several(self, chosen: np.ndarray) -> str:
        """The names of several labels."""
        return ", ".join(self.targets.names[c] for c in np.flatnonzero(chosen)) or "none"


def _number(value: float, std: float) -> str:
    """A number of a column with this standard deviation; NaN is a missing one.

    >>> _number(3.14159, 1.0), _number(1e-9, 1.0), _number(float("nan"), 1.0)
    ('3.142', '0', 'missing')
    """
    return "missing" if np.isnan(value) else f"{value if abs(value) > ROUNDING * std else 0:.4g}"


def _are_classes(arrays: Mapping[str, np.ndarray], targets: Targets) -> bool:
    """Whether the gallery's rows have predictions of as many classes or labels as there are, and true ones of them."""
    truth, count = arrays["truth"], targets.count
    if isinstance(targets, Masks):
        label = arrays["label"]
        return label.shape == truth.shape and truth.ndim == 3 and bool(((truth < count) & (label < count)).all())
    shape, most = ((len(truth), count), 1) if isinstance(targets, Labels) else ((len(truth),), count - 1)
    fits = truth.shape == shape and arrays["probs"].shape == (len(truth), count)
    return fits and bool(((truth >= 0) & (truth <= most)).all())


def _coloured(classes: np.ndarray) -> np.ndarray:
    """Classes of pixels (H, W) as an image (3, H, W): the first is black, others have matplotlib's colours in turn."""
    colours = matplotlib.colormaps["tab10"]((classes.astype(int) - 1) % 10)[..., :3]
    return np.where(classes[..., None] > 0, colours, 0.0).transpose(2, 0, 1)


def _pixels(x: np.ndarray) -> np.ndarray:
    """An image (C, H, W) as matplotlib and Pillow take it; the first channel, unless there are three."""
    return x.transpose(1, 2, 0) if x.shape[0] == 3 else x[0]


def _png(x: np.ndarray) -> bytes:
    image = Image.fromarray((255 * _pixels(x).clip(0, 1)).round().astype(np.uint8))
    image.thumbnail((3 * MOST_PIXELS, MOST_PIXELS))
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()
