"""The images that a model is most and least certain of, with their predictions (iBNN, figure 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from bayesify.lab.analyses.analysis import Analysis, AnalysisError
from bayesify.lab.analyses.style import INK, STYLE, colour
from bayesify.prediction.results import Classification, Prediction

MOST = ("most certain", "least certain")


@dataclass(frozen=True)
class Extremes(Analysis):
    """Two rows of n images, the most and the least certain; arrays (2, n, …), `pictures` (2, n, H, W) or (…, 3).

    `spread` is the standard deviation of the draws' probabilities, if draws were kept; `row` is the row in the data.
    """

    pictures: np.ndarray
    probs: np.ndarray
    spread: np.ndarray | None
    entropy: np.ndarray
    row: np.ndarray
    truth: np.ndarray | None
    names: tuple[str, ...]

    def columns(self) -> dict[str, np.ndarray]:
        names = np.array(self.names)
        table = {
            "certainty": np.repeat(MOST, self.row.shape[1]),
            "row": self.row.ravel(),
            "entropy": self.entropy.ravel(),
            "predicted": names[self.probs.argmax(-1)].ravel(),
        }
        table |= {} if self.truth is None else {"truth": names[self.truth].ravel()}
        return table | {f"p_{name}": self.probs[..., c].ravel() for c, name in enumerate(self.names)}

    @matplotlib.rc_context({**STYLE, "axes.grid": False})
    def figure(self) -> Figure:
        """Each image above its predicted distribution, with the true class in another colour."""
        count = self.row.shape[1]
        size = (1.55 * count + 0.7, 5.4)
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(4, count, squeeze=False, gridspec_kw={"height_ratios": [1.3, 1, 1.3, 1]})
        for extreme in (0, 1):
            for i in range(count):
                self._picture(grid[2 * extreme, i], extreme, i)
                self._bars(grid[2 * extreme + 1, i], extreme, i)
            grid[2 * extreme, 0].set_ylabel(MOST[extreme])
            grid[2 * extreme + 1, 0].set_ylabel("probability")
        return figure

    def _picture(self, axes: Axes, extreme: int, i: int) -> None:
        axes.imshow(self.pictures[extreme, i], cmap="gray", vmin=0, vmax=1)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        title = f"{self.entropy[extreme, i]:.2f} nats"
        if self.truth is not None:
            title = f"{self.names[self.truth[extreme, i]]}\n{title}"
        axes.set_title(title, fontsize=8)

    def _bars(self, axes: Axes, extreme: int, i: int) -> None:
        probs = self.probs[extreme, i]
        true = None if self.truth is None else self.truth[extreme, i]
        colours = [colour(1) if c == true else colour(0) for c in range(len(probs))]
        error: dict[str, Any] = {}
        if self.spread is not None:
            high = np.minimum(self.spread[extreme, i], 1 - probs)
            low = np.minimum(self.spread[extreme, i], probs)
            error = {"yerr": [low, high], "error_kw": {"lw": 0.8, "ecolor": INK}}
        axes.bar(np.arange(len(probs)), probs, color=colours, **error)
        axes.set(ylim=(0, 1.02), yticks=[0, 1] if i == 0 else [])
        short = max(map(len, self.names)) <= 2
        axes.set_xticks(
            np.arange(len(probs)), self.names, fontsize=6 if len(probs) > 4 else 7, rotation=0 if short else 90
        )
        axes.tick_params(length=0)


def extremes(
    p: Prediction,
    images: Tensor,
    y: Tensor | None = None,
    *,
    by: Literal["class", "all"] = "class",
    count: int = 4,
    names: Sequence[str] | None = None,
) -> Extremes:
    """The images with the lowest and the highest predictive entropy.

    Args:
        p: A prediction of classes.
        images: The raw images, bytes or floats from 0 to 1, (N, 1 or 3, H, W).
        y: The true labels, if known.
        by: "class" takes one image of each of the first `count` classes (true ones if `y` is given, else predicted
            ones); "all" takes the `count` most extreme images of all.
        count: The number of images of each kind.
        names: The names of the classes.

    Returns:
        The images with their predictions.

    Raises:
        AnalysisError: If the prediction is not of classes, or an argument does not fit it.

    >>> from bayesify import Categorical
    >>> p = Categorical().predictive(torch.tensor([[[9.0, 0.0], [1.0, 0.0], [5.0, 0.0]]]))
    >>> extremes(p, torch.rand(3, 1, 8, 8), by="all", count=1).row
    array([[0],
           [1]])

    """
    if not isinstance(p, Classification):
        raise AnalysisError(f"{type(p).__name__}: expected a prediction of classes")
    pictures, classes = _pictures(images, len(p.log_probs)), p.log_probs.shape[-1]
    rows = _choose_rows(p, y, by, count, classes)
    spread = None if p.draws is None or p.samples < 2 else p.draws[:, rows].softmax(-1).std(0, correction=0)
    return Extremes(
        pictures[rows].numpy(),
        p.probs[rows].cpu().numpy(),
        None if spread is None else spread.cpu().numpy(),
        p.entropy[rows].cpu().numpy(),
        rows.numpy(),
        None if y is None else y.cpu()[rows].numpy(),
        _names(names, classes),
    )


def _choose_rows(p: Classification, y: Tensor | None, by: str, count: int, classes: int) -> Tensor:
    """The chosen rows (2, n)."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise AnalysisError(f"count={count!r}: expected an integer >= 1")
    if y is not None and y.shape != p.label.shape:
        raise AnalysisError(f"the prediction has {len(p.label)} rows, so y must have shape {tuple(p.label.shape)}")
    order = p.entropy.cpu().argsort(stable=True)
    if by == "all":
        if 2 * count > len(order):
            raise AnalysisError(f"count={count}: expected at most {len(order) // 2}, for {len(order)} rows")
        return torch.stack([order[:count], order.flip(0)[:count]])
    if by != "class":
        raise AnalysisError(f"by={by!r}: expected 'class' or 'all'")
    label = (p.label if y is None else y).cpu()[order]
    kinds = [order[label == c] for c in range(classes)]
    some = [rows for rows in kinds if len(rows) > 1][:count]
    if not some:
        raise AnalysisError("no class has two rows; use by='all'")
    return torch.stack([torch.stack([rows[0] for rows in some]), torch.stack([rows[-1] for rows in some])])


def _pictures(images: Tensor, rows: int) -> Tensor:
    """Images as floats from 0 to 1, with channels last or without a channel."""
    if images.dim() != 4 or images.shape[1] not in (1, 3) or len(images) != rows:
        raise AnalysisError(
            f"images have shape {tuple(images.shape)}: expected ({rows}, 1 or 3 channels, height, width), one image "
            "for each row of the prediction"
        )
    unit = images.cpu().float() / 255 if images.dtype == torch.uint8 else images.cpu().float()
    if unit.numel() and not -1e-4 <= float(unit.min()) <= float(unit.max()) <= 1 + 1e-4:
        raise AnalysisError(
            f"images range from {float(unit.min()):.3g} to {float(unit.max()):.3g}: expected raw images, bytes or "
            "floats from 0 to 1, before normalisation"
        )
    return unit.squeeze(1) if unit.shape[1] == 1 else unit.movedim(1, -1)


def _names(names: Sequence[str] | None, classes: int) -> tuple[str, ...]:
    given = tuple(map(str, range(classes) if names is None else names))
    if len(given) != classes:
        raise AnalysisError(f"{len(given)} names for {classes} classes: expected one for each")
    return given
