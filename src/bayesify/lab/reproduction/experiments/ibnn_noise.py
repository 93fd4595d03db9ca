"""iBNN's figure 8: how entropy grows with noise, and how much of it is epistemic, on the networks of rank1-scratch."""

from __future__ import annotations

from itertools import pairwise

from bayesify.lab.comparison.columns import Column, percent
from bayesify.lab.data import Data
from bayesify.lab.reproduction.experiment import Exhibit, Expectation, Experiment, Measured, Scale
from bayesify.lab.reproduction.experiments.rank1_scratch import CIFAR10, CIFAR100, FASHION, METHODS, recipe_of, small
from bayesify.lab.reproduction.measures import noise_curve
from bayesify.lab.trained import Trained

ROWS = ("deterministic", "MC dropout", "iBNN-8")
KINDS = {"mixing": (0.0, 0.2, 0.4, 0.6, 0.8, 1.0), "salt_and_pepper": (0.1, 0.2, 0.3, 0.4)}


def _measure(trained: Trained, data: Data) -> Measured:
    found = {}
    for kind, levels in KINDS.items():
        word = "noise" if kind == "mixing" else "salt and pepper"
        for added, values in noise_curve(trained, data, kind, levels).items():
            found[f"{added.replace(', ', f', {word} ')}"] = values
    return found


def _rising(row: str) -> tuple[Expectation, ...]:
    """More noise, more entropy: each intensity against the one before."""
    levels = [f"{row}, noise {level:g}" for level in KINDS["mixing"]]
    return tuple(Expectation("entropy", more, less) for less, more in pairwise(levels))


assert set(ROWS) <= set(METHODS)
IBNN_NOISE = Experiment(
    name="ibnn-noise",
    exhibits=(
        Exhibit(
            "iBNN",
            "figure 8",
            "The entropy of iBNN grows with noise, and more of it is epistemic than with MC dropout",
            (
                *_rising("iBNN-8"),
                *(
                    Expectation("share", f"iBNN-8, noise {level:g}", f"MC dropout, noise {level:g}")
                    for level in KINDS["mixing"][1:]
                ),
            ),
        ),
    ),
    rows=ROWS,
    columns=(
        Column("entropy", "entropy, nats", ("entropy",), max, 3),
        percent("share", "epistemic", ["share"], max),
    ),
    measure=_measure,
    small=Scale(
        seeds={FASHION: 5},
        recipe=small,
        words="The networks of `rank1-scratch` on Fashion-MNIST, 500 test images. The paper has WideResNet-28-10 on "
        "CIFAR.",
        minutes=20,
    ),
    paper=Scale(
        seeds={CIFAR10: 5, CIFAR100: 5},
        recipe=recipe_of,
        words="WideResNet-28-10 on CIFAR-10 and CIFAR-100, the networks of `rank1-scratch`.",
        minutes=120,
        machine="one GPU",
    ),
)
