"""BayesAdapter's tables 3, 7 and 8: faces of people that the network has never seen, and attacks on known ones.

A network learns to tell twenty people apart and is then fine-tuned; twenty others are verified by the distance of their
features, averaged over draws (appendix B).
"""

from __future__ import annotations

from typing import Any

import torch

from bayesify.lab.analyses.verification import mean_features, verification
from bayesify.lab.comparison.columns import Column, percent
from bayesify.lab.data import Data, load
from bayesify.lab.recipes import Recipe
from bayesify.lab.reproduction.experiment import BASE, Exhibit, Expectation, Experiment, Measured, Published, Scale
from bayesify.lab.reproduction.experiments.adapter_networks import MAP, MFG, MFG_REG, PGD_IMAGENET, PSE, PSE_REG
from bayesify.lab.reproduction.measures import detection
from bayesify.lab.runs import expand_path
from bayesify.lab.trained import Trained

SMALL, PAPER = "ORL, ResNet-8", "CASIA and LFW, MobileNetV2"
SIZE, DRAWS = 32, 20
KNOWN, UNKNOWN = [0, 20], [20, 40]
"""The people to train on, and those to verify."""
REGULARISER = {"alpha": 3.0, "gamma": 0.75, "draws": 2, "epsilon": 4 / 255}
"""The noise of training is a quarter of the attack's."""
LAST = {SMALL: "linear", PAPER: "classifier*"}
METHODS: dict[str, dict[str, Any]] = {
    MAP: {"method": {"name": "temperature"}},  # leaves the weights as they are; its temperature is not used
    "MC dropout": {"method": {"name": "MCDropout", "p": 0.2}},
    MFG: {"method": {"name": "MeanField"}},
    PSE: {"method": {"name": "LowRankEnsemble"}},
    MFG_REG: {"method": {"name": "MeanField"}, "training": {"regulariser": REGULARISER}},
    PSE_REG: {"method": {"name": "LowRankEnsemble"}, "training": {"regulariser": REGULARISER}},
}
TABLES: Published = {
    PAPER: {
        MAP: {"verified": "98.2", "ap_pgd": "0.191"},
        "MC dropout": {"verified": "98.2", "ap_pgd": "0.965"},
        MFG: {"verified": "98.4", "ap_pgd": "0.232"},
        PSE: {"verified": "98.4", "ap_pgd": "0.939"},
        MFG_REG: {"verified": "98.4", "ap_pgd": "0.998"},
        PSE_REG: {"verified": "98.0", "ap_pgd": "1.000"},
    }
}
"""The column LFW of tables 3 and 7."""


def _data(small: bool) -> dict[str, Any]:
    if small:
        return {"name": "orl_faces", "options": {"people": KNOWN, "size": SIZE}, "augment": ["flip"], "batch_size": 32}
    return {"name": "folder", "path": "$BAYESIFY_DATA/casia", "options": {"size": 112}, "augment": ["flip"]}


def _base(setting: str, seed: int) -> Recipe:
    small = setting == SMALL
    return Recipe.of(
        {
            "data": _data(small),
            "model": {"name": "resnet8" if small else "torchvision:mobilenet_v2"},
            "method": "none",
            "likelihood": {"calibrate": False},
            "training": {"epochs": 60 if small else 90, "lr": 0.05},
            "seed": seed,
        }
    )


def _recipe(setting: str, row: str, seed: int) -> Recipe:
    given, base = METHODS[row], _base(setting, seed).plain()
    where = {"layers": [LAST[setting]]} if row == "MC dropout" else {}
    return Recipe.of(
        {
            "defaults": "papers",
            "data": base["data"],
            "model": {"name": base["model"]["name"], "weights": BASE},
            "method": {**given["method"], **where},
            "likelihood": {"calibrate": False},
            "training": {"epochs": 60 if setting == SMALL else 4, **given.get("training", {})},
            "evaluation": {"samples": DRAWS, "rows": 40 if setting == SMALL else 1000, "attack": PGD_IMAGENET},
            "seed": seed,
        }
    )


def _measure(trained: Trained, data: Data) -> Measured:
    if trained.recipe.data.name == "orl_faces":
        others = load("orl_faces", people=UNKNOWN, size=SIZE, validation=0, test=0).train
    else:
        others = load("folder", path=expand_path("$BAYESIFY_DATA/lfw"), size=112, validation=0, test=0).train
    x = trained.inputs.prepare(others.raw(torch.arange(len(others))))
    found = verification(mean_features(trained.model, x, DRAWS, batch_size=100), others.targets)
    return {"": {"verified": found.accuracy, "auroc": found.auroc, **detection(trained, data, [])}}


ADAPTER_FACES = Experiment(
    name="adapter-faces",
    exhibits=(
        Exhibit(
            "BayesAdapter",
            "table 3",
            "PSE verifies unknown faces better than the network it starts from, and than MC dropout",
            tuple(Expectation("verified", PSE, other) for other in (MAP, "MC dropout")),
            TABLES,
        ),
        Exhibit(
            "BayesAdapter",
            "tables 7 and 8",
            "With the regulariser mutual information detects attacks on faces",
            (
                Expectation("ap_pgd", MFG_REG, MFG),
                Expectation("ap_pgd", MFG_REG, MAP),
                Expectation("ap_pgd", PSE_REG, MAP),
                Expectation("ap_pgd", MFG_REG, 0.9),
            ),
        ),
    ),
    rows=tuple(METHODS),
    columns=(
        percent("verified", "verified", ["verified"], max),
        Column("auroc", "AUROC, pairs", ("auroc",), max, 4),
        Column("ap_pgd", "AP, PGD", ("ap_pgd",), max, 3),
    ),
    measure=_measure,
    small=Scale(
        seeds={SMALL: 5},
        recipe=_recipe,
        words="A ResNet-8 tells twenty people of ORL apart, 32×32 pixels; it is fine-tuned for 60 epochs of five steps "
        "at the paper's rates, and twenty other people are verified in ten folds. No fakes of faces are at hand.",
        minutes=20,
        base=_base,
    ),
    paper=Scale(
        seeds={PAPER: 3},
        recipe=_recipe,
        words="MobileNetV2 trained on CASIA and verified on LFW, one folder per person in $BAYESIFY_DATA/casia and "
        "$BAYESIFY_DATA/lfw, without the fakes of table 8.",
        minutes=10_000,
        machine="eight GPUs",
        base=_base,
    ),
)
