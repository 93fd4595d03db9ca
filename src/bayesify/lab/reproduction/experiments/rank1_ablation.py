"""Rank-1's figures 2 to 4 and 9, table 8; iBNN's table 6 and figure 6: what each choice is worth."""

from __future__ import annotations

from typing import Any

from bayesify.lab.data import Data
from bayesify.lab.recipes import Recipe
from bayesify.lab.reproduction.experiment import Exhibit, Expectation, Experiment, Measured, Scale
from bayesify.lab.reproduction.experiments.rank1_scratch import FASHION
from bayesify.lab.reproduction.measures import CORRUPTED, FIT, corrupted_classes, draws_of
from bayesify.lab.trained import Trained

WIDE = "CIFAR-10, WideResNet-28-10"
BEST = "Rank-1"
IBNN_COMPONENTS = (4, 8, 16, 24, 32)
CHANGES: dict[str, dict[str, Any]] = {
    BEST: {},
    "inputs only": {"method": {"factors": "input"}},
    "outputs only": {"method": {"factors": "output"}},
    "one component": {"method": {"components": 1}},
    "two components": {"method": {"components": 2}},
    "log-mixture": {"training": {"bound": "mixture"}},
    **{f"dropout rate {rate}": {"method": {"dropout_rate": rate}} for rate in (0.1, 0.3)},
    "positive scales": {"method": {"posterior": "lognormal"}},
    **{f"iBNN-{count}": {"method": {"name": "IBNN", "components": count}} for count in IBNN_COMPONENTS},
}
"""How each row differs from a Rank-1 BNN with four Gaussian components."""
DRAWS = (4, 16, 100)
"""For four components: 1, 4 and 25 of each."""


def _recipe(row: str, seed: int, wide: bool) -> Recipe:
    changes = CHANGES[row]
    method = {"name": "Rank1", **changes.get("method", {})}
    epochs = {} if wide else {"epochs": 20, "lr": 0.05}
    components = int(method.get("components", 4))
    return Recipe.of(
        {
            "defaults": "papers",
            "data": {
                "name": "cifar10" if wide else "fashion-mnist",
                "augment": ["pad_crop", "flip"] if wide else [],
                "limit": None if wide else 6000,
            },
            "model": {"name": "wide_resnet_28_10"} if wide else {"name": "lenet", "options": {"norm": "batch"}},
            "method": method,
            "likelihood": {"calibrate": False},
            "training": {**epochs, **changes.get("training", {})},
            "evaluation": {"samples": components * (5 if row.startswith("iBNN") else 1), "rows": 500},
            "seed": seed,
        }
    )


def _measure(trained: Trained, data: Data) -> Measured:
    found = dict(corrupted_classes(trained, data))
    method = trained.recipe.plain()["method"]
    if (method["name"], method.get("components"), method.get("factors")) == ("Rank1", 4, "both"):
        found |= draws_of(trained, data, DRAWS)
    return found


RANK1_ABLATION = Experiment(
    name="rank1-ablation",
    exhibits=(
        Exhibit(
            "Rank-1",
            "figure 2",
            "Distributions over both factors generalise better to corrupted images than over either",
            tuple(Expectation("cnll", BEST, other) for other in ("inputs only", "outputs only")),
        ),
        Exhibit(
            "Rank-1",
            "figure 3",
            "More components are better",
            tuple(Expectation("nll", BEST, other) for other in ("one component", "two components")),
        ),
        Exhibit(
            "Rank-1",
            "figure 4",
            "Training with the mean of the components' log-likelihoods generalises better than with the log-mixture",
            (Expectation("nll", BEST, "log-mixture"), Expectation("error", BEST, "log-mixture")),
        ),
        Exhibit(
            "Rank-1",
            "figure 5 (v1)",
            "A larger initial dropout rate costs accuracy and improves calibration",
            (
                Expectation("error", BEST, "dropout rate 0.1"),
                Expectation("error", BEST, "dropout rate 0.3"),
                Expectation("ece", "dropout rate 0.3", BEST),
            ),
        ),
        Exhibit(
            "Rank-1",
            "figure 9 (v1)",
            "Real-valued factors have a lower NLL and ECE than positive ones",
            (Expectation("nll", BEST, "positive scales"), Expectation("ece", BEST, "positive scales")),
        ),
        Exhibit(
            "Rank-1",
            "table 8 (v1)",
            "More draws of each component are better",
            (
                Expectation("nll", f"{BEST}, {DRAWS[1]} draws", f"{BEST}, {DRAWS[0]} draws"),
                Expectation("nll", f"{BEST}, {DRAWS[2]} draws", f"{BEST}, {DRAWS[0]} draws"),
            ),
        ),
        Exhibit(
            "iBNN",
            "table 6, figure 6",
            "Up to 16 components are better, 32 are worse",
            (
                Expectation("nll", "iBNN-16", "iBNN-4"),
                Expectation("error", "iBNN-16", "iBNN-4"),
                Expectation("nll", "iBNN-16", "iBNN-32"),
            ),
        ),
    ),
    rows=tuple(CHANGES),
    columns=(*FIT, *CORRUPTED),
    measure=_measure,
    small=Scale(
        seeds={FASHION: 3},
        recipe=lambda setting, row, seed: _recipe(row, seed, wide=False),
        words="LeNet with norms on 6,000 images of Fashion-MNIST, 20 epochs, all else as in the papers (there CIFAR).",
        minutes=60,
    ),
    paper=Scale(
        seeds={WIDE: 3},
        recipe=lambda setting, row, seed: _recipe(row, seed, wide=True),
        words="WideResNet-28-10 on CIFAR-10; iBNN's own figures are of VGG-16 on CIFAR-100.",
        minutes=30_000,
        machine="one GPU",
    ),
)
