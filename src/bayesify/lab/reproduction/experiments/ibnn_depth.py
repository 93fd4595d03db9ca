"""iBNN's figure 1: 30 points of y = x³, and networks of one to five hidden layers of 256 units.

The paper shows curves; here the error and the coverage of 90% intervals are measured, at 1,000 evenly spread points
with new noise. The curve is the same for all seeds, which are those of initial values and noise. The paper says neither
its noise nor how it trained: the noise is that of Hernández-Lobato and Adams (2015), 3, and known; training is by Adam.
"""

from __future__ import annotations

from bayesify.lab.comparison.columns import Column, percent
from bayesify.lab.data import Data
from bayesify.lab.evaluation.evaluate import task_metrics
from bayesify.lab.recipes import Recipe
from bayesify.lab.reproduction.experiment import Exhibit, Expectation, Experiment, Measured, Scale
from bayesify.lab.trained import Trained

CURVE = "y = x³"
DEPTHS = (1, 2, 3, 4, 5)
UNITS, NOISE, DRAWS, SEEDS, TARGET = 256, 3.0, 200, 5, 0.9
METHODS = {
    "IBNN": {"name": "IBNN", "components": 4, "mean_std": 0.5, "prior_std": 0.3},
    "MeanField": {"name": "MeanField", "prior_std": 1.0},
}
EPOCHS = {"small": 2000, "paper": 10_000}


def _row(method: str, depth: int) -> str:
    return f"{method}, {depth} layer{'s' if depth > 1 else ''}"


PLACES = {_row(method, depth): (method, depth) for method in METHODS for depth in DEPTHS}


def _recipe(row: str, seed: int, epochs: int) -> Recipe:
    method, depth = PLACES[row]
    return Recipe.of(
        {
            "data": {"name": "cubic", "options": {"noise": NOISE}, "validation": 0, "batch_size": 30},
            "model": {"name": "mlp", "options": {"hidden": [UNITS] * depth}},
            "method": METHODS[method],
            "likelihood": {"precision": NOISE**-2, "units": "target"},
            "training": {
                "epochs": epochs,
                "optimizer": "adam",
                "lr": 0.001,
                "posterior_lr": 0.01 if method == "IBNN" else None,
                "schedule": "constant",
                "weight_decay": 0.0,
                "kl": "loss",
                "anneal": 0.6667,
            },
            "evaluation": {"samples": DRAWS},
            "seed": seed,
        }
    )


def _measure(trained: Trained, data: Data) -> Measured:
    found = task_metrics(trained.predict(data.test), data.test.targets, trained)
    values = {key: float(found[key] or 0.0) for key in ("rmse", "log_density", "coverage")}
    return {"": {**values, "off_coverage": abs(values["coverage"] - TARGET)}}


COLUMNS = (
    Column("rmse", "RMSE", ("rmse",), min, 2),
    percent("coverage", "in 90% interval", ["coverage"], None),
    Column("log_density", "log density", ("log_density",), max, 2),
    percent("off_coverage", "off 90%", ["off_coverage"], min),
)
_SHALLOW, _DEEP = DEPTHS[0], DEPTHS[-1]
IBNN_DEPTH = Experiment(
    name="ibnn-depth",
    exhibits=(
        Exhibit(
            "iBNN",
            "figure 1",
            "With more layers mean-field inference collapses; iBNN keeps a good fit and good uncertainty",
            (
                *(Expectation("rmse", _row("IBNN", depth), _row("MeanField", depth)) for depth in DEPTHS[2:]),
                Expectation("rmse", _row("MeanField", _SHALLOW), _row("MeanField", _DEEP)),
                Expectation("rmse", _row("IBNN", _DEEP), 2 * NOISE),
                Expectation("off_coverage", _row("IBNN", _DEEP), 0.1),
            ),
        ),
    ),
    rows=tuple(PLACES),
    columns=COLUMNS,
    measure=_measure,
    small=Scale(
        seeds={CURVE: SEEDS},
        recipe=lambda setting, row, seed: _recipe(row, seed, EPOCHS["small"]),
        words=f"The networks of the figure, with {EPOCHS['small']:,} full-batch steps of Adam at 0.001 (0.01 for the "
        "posterior of iBNN), the KL growing over the first two thirds. A good fit is taken to be an error below twice "
        "the noise, 6, and good uncertainty a coverage of 80% or more.",
        minutes=5,
        together=True,
    ),
    paper=Scale(
        seeds={CURVE: SEEDS},
        recipe=lambda setting, row, seed: _recipe(row, seed, EPOCHS["paper"]),
        words=f"The same with {EPOCHS['paper']:,} steps.",
        minutes=25,
        together=True,
    ),
    least=3,
)
