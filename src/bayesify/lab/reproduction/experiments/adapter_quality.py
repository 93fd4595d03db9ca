"""BayesAdapter's tables 1, 2 and 4, performance and calibration; iBNN's table 7, from trained weights too."""

from __future__ import annotations

from bayesify.lab.data import Data
from bayesify.lab.reproduction.experiment import Exhibit, Expectation, Experiment, Measured, Published, Scale
from bayesify.lab.reproduction.experiments.adapter_networks import CIFAR, IMAGENET, MAP, MFG, PSE, SMALL, recipe_of
from bayesify.lab.reproduction.measures import FIT, REJECTION, classes, draws_of
from bayesify.lab.trained import Trained

ROWS = (
    MAP,
    MFG,
    PSE,
    "MC dropout",
    "SWAG",
    "Laplace approximation",
    "VBNN (MFG)",
    "VBNN (PSE)",
    "iBNN-4",
    "iBNN-8",
)
_ON_CIFAR = {
    MAP: {"error": "3.08", "nll": "0.1312", "ece": "1.98"},
    "Laplace approximation": {"error": "3.59", "nll": "0.1204", "ece": "1.06"},
    "MC dropout": {"error": "3.05", "nll": "0.1151", "ece": "1.19"},
    "SWAG": {"error": "3.68", "nll": "0.1122", "ece": "0.88"},
    "VBNN (MFG)": {"error": "3.05", "nll": "0.0994", "ece": "0.74"},
    "VBNN (PSE)": {"error": "3.12", "nll": "0.1328", "ece": "1.88"},
    MFG: {"error": "2.90", "nll": "0.1007", "ece": "0.91"},
    PSE: {"error": "2.87", "nll": "0.0936", "ece": "0.58"},
}
_ON_IMAGENET = {
    MAP: {"error": "23.87", "nll": "0.9618", "ece": "3.73"},
    "Laplace approximation": {"error": "24.11", "nll": "0.9739", "ece": "3.75"},
    "MC dropout": {"error": "25.12", "nll": "0.9884", "ece": "1.52"},
    "VBNN (MFG)": {"error": "24.03", "nll": "0.9435", "ece": "1.83"},
    "VBNN (PSE)": {"error": "24.88", "nll": "0.9865", "ece": "2.02"},
    MFG: {"error": "23.55", "nll": "0.9303", "ece": "2.89"},
    PSE: {"error": "23.20", "nll": "0.9159", "ece": "1.29"},
    "iBNN-4": {"error": "23.22", "nll": "0.9310", "ece": "3.50"},
    "iBNN-8": {"error": "23.15", "nll": "0.9237", "ece": "3.23"},
}
SIZES = (1, 20, 100)


def _measure(trained: Trained, data: Data) -> Measured:
    found = dict(classes(trained, data))
    if trained.recipe.plain()["method"]["name"] == "MeanField":
        found |= draws_of(trained, data, SIZES)
    return found


TABLES: Published = {SMALL: _ON_CIFAR, CIFAR: _ON_CIFAR, IMAGENET: _ON_IMAGENET}
ADAPTER_QUALITY = Experiment(
    name="adapter-quality",
    exhibits=(
        Exhibit(
            "BayesAdapter",
            "tables 1 and 2, performance",
            "Bayesian fine-tuning has a lower error and NLL than the network it starts from, and than from scratch",
            (
                *(Expectation(m, ours, MAP) for m in ("error", "nll") for ours in (MFG, PSE)),
                *(Expectation("error", ours, f"VBNN ({kind})") for ours, kind in ((MFG, "MFG"), (PSE, "PSE"))),
            ),
            TABLES,
        ),
        Exhibit(
            "BayesAdapter",
            "table 4",
            "Bayesian fine-tuning is better calibrated than the network it starts from, PSE more than MFG",
            (Expectation("ece", MFG, MAP), Expectation("ece", PSE, MAP), Expectation("ece", PSE, MFG)),
        ),
        Exhibit(
            "BayesAdapter",
            "figure 5a",
            "20 draws have a lower error than one",
            (Expectation("error", f"{MFG}, {SIZES[1]} draws", f"{MFG}, {SIZES[0]} draws"),),
        ),
        Exhibit(
            "BayesAdapter",
            "figure 5b",
            "The inputs of less mutual information have a lower error",
            (Expectation("rejection", MFG, 0.0), Expectation("rejection", PSE, 0.0)),
        ),
        Exhibit(
            "iBNN",
            "table 7",
            "iBNN from trained weights has a lower error, NLL and ECE than they have",
            tuple(Expectation(m, ours, MAP) for m in ("error", "nll", "ece") for ours in ("iBNN-4", "iBNN-8")),
        ),
    ),
    rows=ROWS,
    columns=(*FIT, REJECTION),
    measure=_measure,
    small=Scale(
        seeds={SMALL: 3},
        recipe=recipe_of,
        words="A public ResNet-20, fine-tuned for 12 epochs at the paper's rates, on 2,000 images in place of "
        "50,000, which the network has seen; 5,000 test images are for validation. VBNN is from scratch on "
        "10,000 images. The paper's figures are those of its WideResNet-28-10, and of ImageNet for iBNN.",
        minutes=120,
    ),
    paper=Scale(
        seeds={CIFAR: 3, IMAGENET: 3},
        recipe=recipe_of,
        words="The paper's settings. CIFAR-10 needs trained weights in "
        "$BAYESIFY_DATA/weights/wide_resnet_28_10.safetensors.",
        minutes=30_000,
        machine="eight GPUs",
    ),
)
