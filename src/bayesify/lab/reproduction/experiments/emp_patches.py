"""EMP's tables 4 to 11 and figures 4 to 7: which layers are patched, how many draws, and corrupted images."""

from __future__ import annotations

from typing import Any

from bayesify.lab.comparison.columns import percent
from bayesify.lab.data import Data
from bayesify.lab.recipes import Recipe
from bayesify.lab.reproduction.experiment import Exhibit, Expectation, Experiment, Measured, Published, Scale
from bayesify.lab.reproduction.measures import CORRUPTED, FIT, RELATIVE, corrupted_classes, draws_of, relative_errors
from bayesify.lab.trained import Trained

SMALL, PYRAMID, IMAGENET = "CIFAR-10, ResNet-8", "CIFAR-100, PyramidNet-110", "ImageNet, ResNet-18"
PLAIN, DROPOUT = "vanilla", "dropout"
BEST = ("EMP, norms and output", "ECMP, norms and output")
ROWS: dict[str, dict[str, Any]] = {
    PLAIN: {"name": "none"},
    DROPOUT: {"name": "own_dropout", "before_norms": 0.005},
    "EMP, norms": {"name": "EMP", "patches": ["norm"]},
    BEST[0]: {"name": "EMP", "patches": ["norm", "output"]},
    "ECMP, norms": {"name": "ECMP", "patches": ["norm"]},
    BEST[1]: {"name": "ECMP", "patches": ["norm", "output"]},
}
DRAWS = {"small": 100, "paper": 200}
SIZES = (1, 20, 100)
ADAM = {"optimizer": "adam", "lr": 0.001, "schedule": "constant", "kl": "none", "decay": "all"}
"""C.1: on every tensor and copy 0.001 / batch size, which as weight decay is twice that."""
FIGURES: Published = {
    IMAGENET: {
        PLAIN: {"error": "33.9", "ece": "8.09", "mce_plain": "100"},
        DROPOUT: {"error": "34.1", "ece": "7.61", "mce_plain": "100"},
        "EMP, norms": {"error": "33.4", "ece": "5.74", "mce_plain": "98.8"},
        BEST[0]: {"error": "33.0", "ece": "3.91", "mce_plain": "97.8"},
        "ECMP, norms": {"error": "33.6", "ece": "4.62", "mce_plain": "99.8"},
        BEST[1]: {"error": "32.9", "ece": "1.65", "mce_plain": "99.5"},
    },
    PYRAMID: {
        PLAIN: {"error": "27.4", "ece": "21.6"},
        DROPOUT: {"error": "28.0", "ece": "21.1"},
        BEST[0]: {"error": "26.0", "ece": "13.6"},
        BEST[1]: {"error": "26.5", "ece": "8.73"},
    },
}


def _recipe(setting: str, row: str, seed: int) -> Recipe:
    small = setting == SMALL
    data: dict[str, Any] = {"name": "cifar10" if small else "cifar100", "augment": ["pad_crop", "flip"]}
    model, epochs, batch = ("resnet8", 15, 128) if small else ("pyramidnet110_270", 400, 256)
    if small:
        data["limit"] = 10_000
    if setting == IMAGENET:
        data = {"name": "folder", "path": "$BAYESIFY_DATA/imagenet", "options": {"size": 224}, "augment": ["flip"]}
        model, epochs, batch = "torchvision:resnet18", 100, 256
    return Recipe.of(
        {
            "data": {**data, "batch_size": batch},
            "model": {"name": model},
            "method": {**ROWS[row], **({"init_copies": "random"} if "patches" in ROWS[row] else {})},
            "likelihood": {"calibrate": False},
            "training": {**ADAM, "epochs": epochs, "weight_decay": 0.002 / batch},
            "evaluation": {"samples": DRAWS["small" if small else "paper"], "rows": 500 if small else 10_000},
            "seed": seed,
        }
    )


def _measure(trained: Trained, data: Data) -> Measured:
    found = dict(corrupted_classes(trained, data))
    method = trained.recipe.plain()["method"]
    if method.get("patches") == ["norm", "output"] or method["name"] == "own_dropout":
        found |= draws_of(trained, data, SIZES)
    return found


_OTHERS = (PLAIN, DROPOUT)
EMP_PATCHES = Experiment(
    name="emp-patches",
    exhibits=(
        Exhibit(
            "EMP",
            "tables 4 and 6, figures 4, 5 and 7",
            "EMP and ECMP, with norms and output patched, have a lower error and ECE than vanilla and dropout networks",
            tuple(Expectation(m, ours, other) for m in ("error", "ece") for ours in BEST for other in _OTHERS),
            FIGURES,
        ),
        Exhibit(
            "EMP",
            "tables 5, 7 and 8",
            "EMP and ECMP are more robust to common corruptions: mCE below 100",
            tuple(Expectation("mce_plain", ours, 1.0) for ours in BEST),
        ),
        Exhibit(
            "EMP",
            "tables 9 and 10, figure 6",
            "More draws are better calibrated",
            tuple(Expectation("ece", f"{ours}, {SIZES[-1]} draws", f"{ours}, {SIZES[0]} draws") for ours in BEST),
        ),
        Exhibit(
            "EMP",
            "table 11",
            "More draws calibrate dropout better, by little",
            (Expectation("ece", f"{DROPOUT}, {SIZES[-1]} draws", f"{DROPOUT}, {SIZES[0]} draws"),),
        ),
    ),
    rows=tuple(ROWS),
    columns=(*FIT, *RELATIVE, *CORRUPTED, percent("top5", "top-5", ["top5"], max)),
    measure=_measure,
    small=Scale(
        seeds={SMALL: 3},
        recipe=_recipe,
        words="ResNet-8 on 10,000 images of CIFAR-10, 15 epochs of Adam at 0.001, 100 draws, the decay of C.1.",
        minutes=60,
    ),
    paper=Scale(
        seeds={PYRAMID: 3, IMAGENET: 3},
        recipe=_recipe,
        words="PyramidNet(110, α = 270) on CIFAR-100, 400 epochs; ResNet-18 on ImageNet, 100 epochs; 200 draws.",
        minutes=100_000,
        machine="one GPU",
    ),
    derive=lambda rows: relative_errors(rows, PLAIN),
)
