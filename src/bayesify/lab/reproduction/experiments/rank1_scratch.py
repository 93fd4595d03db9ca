"""Rank-1's tables 2 and 3, iBNN's tables 3 to 5: networks trained from scratch, and their corrupted test images.

Settings are those of the papers (`defaults: papers`), with fewer epochs and images at the small scale.
"""

from __future__ import annotations

from typing import Any

from bayesify.lab.recipes import Recipe
from bayesify.lab.reproduction.experiment import Exhibit, Expectation, Experiment, Published, Scale
from bayesify.lab.reproduction.measures import CORRUPTED, DIVERSITY, FIT, corrupted_classes

FASHION, SMALL_CIFAR = "Fashion-MNIST, LeNet", "CIFAR-10, ResNet-8"
CIFAR10, CIFAR100 = "CIFAR-10, WideResNet-28-10", "CIFAR-100, WideResNet-28-10"
METHODS: dict[str, tuple[dict[str, Any], int]] = {
    "deterministic": ({"name": "none"}, 1),
    "MC dropout": ({"name": "MCDropout", "p": 0.1}, 20),
    "mean field": ({"name": "MeanField"}, 20),
    "BatchEnsemble": ({"name": "BatchEnsemble"}, 4),
    "Rank-1 Normal": ({"name": "Rank1"}, 4),
    "Rank-1 Cauchy": ({"name": "Rank1", "posterior": "cauchy"}, 16),
    "iBNN-4": ({"name": "IBNN", "components": 4}, 20),
    "iBNN-8": ({"name": "IBNN", "components": 8}, 40),
    "deep ensemble": ({"name": "deep_ensemble", "members": 4}, 4),
}
"""Each row's method, and its draws: one of each component, four for Cauchy, five for iBNN."""
RANK1 = ("Rank-1 Normal", "Rank-1 Cauchy")
IMAGES = {
    FASHION: ("fashion-mnist", "lenet", {"norm": "batch"}),
    SMALL_CIFAR: ("cifar10", "resnet8", {}),
    CIFAR10: ("cifar10", "wide_resnet_28_10", {}),
    CIFAR100: ("cifar100", "wide_resnet_28_10", {}),
}
TABLES = {
    CIFAR10: """
deterministic 0.159 4.0 2.3 1.05 23.9 15.3
BatchEnsemble 0.143 3.8 2.0 1.02 22.5 12.9
MC dropout 0.160 4.1 2.4 1.27 31.2 16.6
mean field 0.214 5.3 2.9 1.46 28.7 18.1
Rank-1 Normal 0.128 3.7 0.8 0.84 23.3 8.0
Rank-1 Cauchy 0.120 3.5 0.9 0.74 19.5 9.0
deep ensemble 0.114 3.4 1.0 0.81 22.1 8.7
iBNN-4 0.1122 3.29 0.93
iBNN-8 0.1093 3.38 0.64
""",
    CIFAR100: """
deterministic 0.875 20.2 8.5 2.70 48.7 23.9
BatchEnsemble 0.734 18.5 3.3 2.49 45.9 19.1
MC dropout 0.830 20.4 5.0 2.33 48.5 14.8
mean field 1.030 22.7 11.1 3.48 52.0 29.9
Rank-1 Normal 0.692 18.7 1.8 2.24 46.2 11.7
Rank-1 Cauchy 0.689 17.6 1.2 2.04 42.2 14.2
deep ensemble 0.666 17.3 2.1 2.27 45.9 13.8
iBNN-4 0.6818 17.79 2.84
iBNN-8 0.6601 17.52 2.74
""",
}
"""Rank-1's tables 2 and 3 with errors for accuracies, all in percent; iBNN's rows are from its tables 3 to 5."""
KEYS = ("nll", "error", "ece", "cnll", "cerror", "cece")


def _published(setting: str) -> Published:
    rows = {}
    for line in TABLES[setting].strip().splitlines():
        words = line.split()
        start = next(i for i, word in enumerate(words) if word[0].isdigit() and "." in word)
        rows[" ".join(words[:start])] = dict(zip(KEYS, words[start:], strict=False))
    return {setting: rows}


def recipe_of(setting: str, row: str, seed: int, *, epochs: int | None = None, limit: int | None = None) -> Recipe:
    """The recipe of a network from scratch; all epochs and images unless given fewer."""
    data, model, options = IMAGES[setting]
    method, draws = METHODS[row]
    augment = [] if data == "fashion-mnist" else ["pad_crop", "flip"]
    training: dict[str, Any] = {} if epochs is None else {"epochs": epochs}
    if data == "fashion-mnist":
        training["lr"] = 0.05  # at 0.1 one LeNet in five stays untrained
    if model == "wide_resnet_28_10" and row.startswith("iBNN"):  # iBNN's table 2
        method = {**method, "mean_std": 0.5, "prior_std": 0.1}
        training |= {"lr": 0.1, "posterior_lr": 2.4 if data == "cifar10" else 4.8}
    if data == "cifar100" and row in RANK1:  # Rank-1 v1, table 5
        method = {**method, "mean_std": 1.0, **({"prior_std": 0.01} if "posterior" in method else {})}
        training["weight_decay"] = 6e-4
    return Recipe.of(
        {
            "defaults": "papers",
            "data": {"name": data, "augment": augment, "limit": limit},
            "model": {"name": model, "options": options},
            "method": method,
            "likelihood": {"calibrate": False},
            "training": training,
            "evaluation": {"samples": draws, "rows": 500 if limit else 10_000},
            "seed": seed,
        }
    )


def small(setting: str, row: str, seed: int) -> Recipe:
    """The recipe at the small scale, whose networks other experiments use too."""
    return recipe_of(setting, row, seed, epochs=30 if setting == FASHION else 15, limit=10_000)


def _beats(measures: tuple[str, ...], ours: tuple[str, ...], theirs: tuple[str, ...]) -> tuple[Expectation, ...]:
    return tuple(Expectation(measure, own, other) for measure in measures for own in ours for other in theirs)


_BASELINES = ("deterministic", "BatchEnsemble", "MC dropout", "mean field")
RANK1_SCRATCH = Experiment(
    name="rank1-scratch",
    exhibits=(
        Exhibit(
            "Rank-1",
            "tables 2 and 3",
            "Rank-1 BNNs have a lower NLL, ECE, cNLL and cECE than the baselines with as many parameters",
            _beats(("nll", "ece", "cnll", "cece"), RANK1, _BASELINES),
            {**_published(CIFAR10), **_published(CIFAR100), SMALL_CIFAR: _published(CIFAR10)[CIFAR10]},
        ),
        Exhibit(
            "Rank-1",
            "figure 5",
            "Members of Rank-1 BNNs are more diverse than those of BatchEnsemble",
            (Expectation("diversity", "Rank-1 Normal", "BatchEnsemble"),),
        ),
        Exhibit(
            "iBNN",
            "tables 3 to 5, figure 5",
            "iBNN has a lower error, NLL and ECE than plain networks, MC dropout and mean-field inference",
            _beats(("error", "nll", "ece"), ("iBNN-8",), ("deterministic", "MC dropout", "mean field")),
        ),
    ),
    rows=tuple(METHODS),
    columns=(*FIT, *CORRUPTED, DIVERSITY),
    measure=corrupted_classes,
    small=Scale(
        seeds={FASHION: 5, SMALL_CIFAR: 2},
        recipe=small,
        words="LeNet with norms on 10,000 images of Fashion-MNIST, 30 epochs at a rate of 0.05, and ResNet-8 on "
        "10,000 of CIFAR-10, 15 epochs; all else as in the papers. Corruptions are of 500 test images. The "
        "paper's figures beside the ResNet-8 are those of its WideResNet-28-10.",
        minutes=240,
    ),
    paper=Scale(
        seeds={CIFAR10: 10, CIFAR100: 10},
        recipe=recipe_of,
        words="The settings of the papers (Rank-1 v1, table 5; iBNN, table 2). Dropout has a rate of 0.1.",
        minutes=60_000,
        machine="one GPU",
    ),
)
