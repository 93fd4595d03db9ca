"""iBNN's figure 4: the error on Fashion-MNIST as a LeNet gets wider, of iBNN and of mean-field inference.

The paper's LeNets have 42K to 2.6M parameters, ours 62K to 0.9M; twice the width is four times the parameters.
"""

from __future__ import annotations

from typing import Any

from bayesify.lab.recipes import Recipe
from bayesify.lab.reproduction.experiment import Exhibit, Expectation, Experiment, Scale
from bayesify.lab.reproduction.measures import FIT, classes

SETTING = "Fashion-MNIST"
METHODS = {"IBNN": {"name": "IBNN"}, "MeanField": {"name": "MeanField"}}
SMALL, PAPER = (1, 4, 16), (1, 4, 16, 64)
"""How many times as many parameters."""
PLACES = {f"{method} ×{times}": (method, times) for method in METHODS for times in PAPER}


def _recipe(row: str, seed: int, **changes: Any) -> Recipe:
    method, times = PLACES[row]
    return Recipe.of(
        {
            "data": {"name": "fashion-mnist", "limit": changes.get("limit")},
            "model": {"name": "lenet", "options": {"width": times**0.5}},
            "method": METHODS[method],
            "likelihood": {"calibrate": False},
            "training": {"epochs": changes["epochs"], "lr": 0.02, "anneal": 0.6667},
            "evaluation": {"samples": 20},
            "seed": seed,
        }
    )


IBNN_WIDTH = Experiment(
    name="ibnn-width",
    exhibits=(
        Exhibit(
            "iBNN",
            "figure 4",
            "A wider LeNet makes iBNN better and mean-field inference worse",
            (
                Expectation("error", "IBNN ×16", "IBNN ×1"),
                Expectation("error", "MeanField ×1", "MeanField ×16"),
                Expectation("error", "IBNN ×16", "MeanField ×16"),
            ),
        ),
    ),
    rows=tuple(PLACES),
    columns=FIT,
    measure=classes,
    small=Scale(
        seeds={SETTING: 3},
        recipe=lambda setting, row, seed: _recipe(row, seed, epochs=15, limit=6000),
        words="6,000 training images and 15 epochs of the lab's default schedule from scratch, at a rate of 0.02; "
        "the widest network, 64 times the parameters, only with `--only`. The paper does not say how it "
        "trained.",
        minutes=60,
    ),
    paper=Scale(
        seeds={SETTING: 5},
        recipe=lambda setting, row, seed: _recipe(row, seed, epochs=100),
        words="All images and 100 epochs. The paper does not say how it trained.",
        minutes=600,
        machine="one GPU",
    ),
)
