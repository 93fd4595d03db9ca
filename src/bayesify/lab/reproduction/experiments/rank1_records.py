"""Rank-1's table 4: recurrent networks for records of intensive care; here PhysioNet 2012 in place of MIMIC-III.

The networks are those of recipes/physionet2012, with as many epochs for every method: settings were chosen on set b,
and the results are on set c.
"""

from __future__ import annotations

from typing import Any

from bayesify.lab.comparison.columns import Column
from bayesify.lab.data import Data
from bayesify.lab.evaluation.evaluate import task_metrics
from bayesify.lab.recipes import Recipe
from bayesify.lab.reproduction.experiment import Exhibit, Expectation, Experiment, Measured, Published, Scale
from bayesify.lab.reproduction.measures import SCALED, predicted, scaled, temperature_of
from bayesify.lab.trained import Trained

SETTING = "PhysioNet 2012"
NORMAL = {"name": "MeanField", "prior_std": 0.1, "estimator": "flipout", "init_log_std": [-3.5, -3.5]}
ROWS: dict[str, tuple[dict[str, Any], int]] = {
    "deterministic": ({"name": "none"}, 1),
    "BatchEnsemble": ({"name": "BatchEnsemble", "components": 4, "mean_std": 0.1}, 4),
    "Bayesian embeddings": ({"name": "mixed", "layers": {"*embedding": NORMAL}}, 25),
    "fully Bayesian": ({"name": "mixed", "layers": {"*": NORMAL}}, 25),
    "Rank-1 Normal": (
        {
            "name": "mixed",
            "layers": {
                "*embedding": NORMAL,
                "*": {"name": "Rank1", "components": 4, "mean_std": 0.1, "dropout_rate": 0.001, "prior_std": 0.1},
            },
        },
        25,
    ),
    "Rank-1 Cauchy": (
        {
            "name": "mixed",
            "layers": {
                "*embedding": NORMAL,
                "*": {"name": "Rank1", "components": 4, "posterior": "cauchy", "prior_std": 0.01, "mean_std": 0.1},
            },
        },
        25,
    ),
    "deep ensemble": ({"name": "deep_ensemble", "members": 4}, 4),
}
TABLE: Published = {
    SETTING: {
        "deterministic": {"nll": "0.213", "average_precision": "0.390", "ece": "0.0135"},
        "BatchEnsemble": {"nll": "0.215", "average_precision": "0.391", "ece": "0.0162"},
        "Bayesian embeddings": {"nll": "0.212", "average_precision": "0.391", "ece": "0.0160"},
        "fully Bayesian": {"nll": "0.221", "average_precision": "0.373", "ece": "0.0161"},
        "Rank-1 Normal": {"nll": "0.209", "average_precision": "0.391", "ece": "0.0132"},
        "Rank-1 Cauchy": {"nll": "0.211", "average_precision": "0.383", "ece": "0.0130"},
        "deep ensemble": {"nll": "0.206", "average_precision": "0.396", "ece": "0.0103"},
    }
}
"""On MIMIC-III, another set with fewer deaths: the order is to be compared, not the figures."""
SMALL_LSTM = {"hidden": 32, "bins": 5, "embedding": 8}
PAPER_LSTM = {"hidden": 512, "bins": 5, "embedding": 32}


def _recipe(row: str, seed: int, epochs: int, network: dict[str, int]) -> Recipe:
    method, draws = ROWS[row]
    return Recipe.of(
        {
            "data": {"name": "physionet2012", "batch_size": 128},
            "model": {"name": "lstm", "options": network},
            "method": method,
            "likelihood": {"calibrate": False},
            "training": {
                "epochs": epochs,
                "optimizer": "adam",
                "lr": 0.003 if network == SMALL_LSTM else 0.0003,
                "posterior_lr": 0.01 if network == SMALL_LSTM else 0.001,
                "weight_decay": 0.0,
                "clip": 1.0,
                "anneal": 0.6667,
                "kl_weight": 0.1 if row == "fully Bayesian" else 1.0,
                "validation_samples": 1,
            },
            "evaluation": {"samples": draws, "batch_size": 128},
            "seed": seed,
        }
    )


def _measure(trained: Trained, data: Data) -> Measured:
    p, found = predicted(trained, data.test), {}
    for added, temperature in (("", 1.0), (SCALED, temperature_of(trained, data))):
        metrics = task_metrics(scaled(p, temperature), data.test.targets, trained)
        found[added] = {column.key: float(metrics[column.key] or 0.0) for column in COLUMNS}
    return found


COLUMNS = (
    Column("nll", "NLL", ("nll",), min, 4),
    Column("average_precision", "AUC-PR", ("average_precision",), max, 4),
    Column("ece", "ECE", ("ece",), min, 4),
)
_BASELINES = ("deterministic", "BatchEnsemble", "Bayesian embeddings", "fully Bayesian")
RANK1_RECORDS = Experiment(
    name="rank1-records",
    exhibits=(
        Exhibit(
            "Rank-1",
            "table 4",
            "The Gaussian Rank-1 BNN is best of all single models by NLL, AUC-PR and ECE",
            tuple(Expectation(column.key, "Rank-1 Normal", other) for column in COLUMNS for other in _BASELINES),
            TABLE,
        ),
    ),
    rows=tuple(ROWS),
    columns=COLUMNS,
    measure=_measure,
    small=Scale(
        seeds={SETTING: 10},
        recipe=lambda setting, row, seed: _recipe(row, seed, 6, SMALL_LSTM),
        words="An LSTM with 32 units, six epochs for every method, 25 draws; the paper's figures are on MIMIC-III, "
        "and its best two are 0.001 apart in AUC-PR.",
        minutes=40,
    ),
    paper=Scale(
        seeds={SETTING: 25},
        recipe=lambda setting, row, seed: _recipe(row, seed, 50, PAPER_LSTM),
        words="An LSTM with 512 units on PhysioNet 2012, as MIMIC-III is not public; Adam at 0.0003 (table 7), 25 "
        "seeds.",
        minutes=5000,
        machine="one GPU",
    ),
)
