"""The networks of BayesAdapter's experiments: a trained ResNet, fine-tuned by its methods, or one from scratch."""

from __future__ import annotations

from typing import Any

from bayesify.lab.recipes import Recipe

SMALL, CIFAR, IMAGENET = "CIFAR-10, ResNet-20", "CIFAR-10, WideResNet-28-10", "ImageNet, ResNet-50"
MAP = "MAP"
REGULARISED = {"alpha": 3.0, "gamma": 0.75, "draws": 2, "epsilon": 0.031}
MFG, PSE = "BayesAdapter (MFG)", "BayesAdapter (PSE)"
MFG_REG, PSE_REG = "BayesAdapter w/ reg (MFG)", "BayesAdapter w/ reg (PSE)"
METHODS: dict[str, dict[str, Any]] = {
    MAP: {"method": {"name": "temperature"}},  # leaves the weights as they are; its temperature is not used
    "Laplace approximation": {"method": {"name": "laplace", "posterior": "all_diagonal", "fisher": "empirical"}},
    "MC dropout": {"method": {"name": "MCDropout", "layers": ["*conv2"], "p": 0.3}},
    "SWAG": {"method": {"name": "swag"}},
    "VBNN (MFG)": {"method": {"name": "MeanField"}, "scratch": True},
    "VBNN (PSE)": {"method": {"name": "LowRankEnsemble"}, "scratch": True},
    MFG: {"method": {"name": "MeanField"}},
    PSE: {"method": {"name": "LowRankEnsemble"}},
    MFG_REG: {"method": {"name": "MeanField"}, "training": {"regulariser": REGULARISED}},
    PSE_REG: {"method": {"name": "LowRankEnsemble"}, "training": {"regulariser": REGULARISED}},
    **{
        f"BayesAdapter w/ reg (MFG), γ = {gamma}": {
            "method": {"name": "MeanField"},
            "training": {"regulariser": {**REGULARISED, "gamma": gamma}},
        }
        for gamma in (0.25, 0.5, 1.0, 1.5)
    },
    "iBNN-4": {"method": {"name": "IBNN", "components": 4}},
    "iBNN-8": {"method": {"name": "IBNN", "components": 8}},
}
"""Each row's method and training, and whether it starts from scratch."""
NORMALISED = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
PGD = {"name": "pgd", "epsilon": 0.031, "steps": 20, "step_size": 0.003, "samples": 20}
PGD_IMAGENET = {**PGD, "epsilon": 16 / 255, "step_size": 1 / 255}


def recipe_of(setting: str, row: str, seed: int) -> Recipe:
    """The recipe of a row: at the small scale with the paper's rates and epochs on 2,000 images."""
    given, small = METHODS[row], setting == SMALL
    scratch = bool(given.get("scratch"))
    data: dict[str, Any] = {"name": "cifar10", "augment": ["pad_crop", "flip"]}
    model: dict[str, Any] = {"name": "wide_resnet_28_10"}
    training: dict[str, Any] = dict(given.get("training", {}))
    method = dict(given["method"])
    if small:
        data |= {"validation": "test:5000", "options": NORMALISED, "limit": 10_000 if scratch else 2000}
        model = {"name": "resnet20", "weights": "$BAYESIFY_DATA/weights/resnet20-12fca82f.th"}
        training |= {"epochs": 15} if scratch else {}
    elif setting == CIFAR:
        model["weights"] = "$BAYESIFY_DATA/weights/wide_resnet_28_10.safetensors"
    else:
        data = {"name": "folder", "path": "$BAYESIFY_DATA/imagenet", "options": {"size": 224}, "augment": ["flip"]}
        model = {"name": "torchvision:resnet50", "pretrained": True}
        training |= {"epochs": 90 if scratch else 4}
        if method["name"] == "MeanField":
            method["prior_std"] = 0.0883
    if scratch:
        model = {key: value for key, value in model.items() if key == "name"}
    return Recipe.of(
        {
            "defaults": "papers",
            "data": data,
            "model": model,
            "method": method,
            "likelihood": {"calibrate": False},
            "training": training,
            "evaluation": {
                "samples": 20,
                "rows": 200 if small else 10_000,
                "attack": PGD_IMAGENET if setting == IMAGENET else PGD,
            },
            "seed": seed,
        }
    )
