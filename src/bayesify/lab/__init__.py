"""The laboratory, `bayesify[lab]`: data, networks, training, evaluation and comparison, from recipes or from Python.

>>> from bayesify import lab
>>> print(lab.load("digits", limit=100))
digits: 100 train, 144 validation, 359 test; images (1, 8, 8), 10 classes
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bayesify.lab.comparison.compare_recipes import compare
    from bayesify.lab.data import Data, load
    from bayesify.lab.evaluation import evaluate
    from bayesify.lab.hub import from_pretrained, push_to_hub
    from bayesify.lab.models import build, load_weights
    from bayesify.lab.prediction_files import predict_files
    from bayesify.lab.recipe_for_data import recipe_for
    from bayesify.lab.recipes import Recipe
    from bayesify.lab.report import write_report
    from bayesify.lab.runs import Run
    from bayesify.lab.trained import predictive
    from bayesify.lab.training import BayesianModule, joined, train
    from bayesify.lab.tuning.choose import choose
    from bayesify.lab.tuning.tune_recipe import tune

_HOMES = {
    "comparison.compare_recipes": ("compare",),
    "data": ("Data", "load"),
    "evaluation": ("evaluate",),
    "hub": ("from_pretrained", "push_to_hub"),
    "models": ("build", "load_weights"),
    "prediction_files": ("predict_files",),
    "recipe_for_data": ("recipe_for",),
    "recipes": ("Recipe",),
    "report": ("write_report",),
    "runs": ("Run",),
    "trained": ("predictive",),
    "training": ("BayesianModule", "joined", "train"),
    "tuning.choose": ("choose",),
    "tuning.tune_recipe": ("tune",),
}
"""The module that holds each public name. Each is imported on first use: importing all of them takes seconds."""

__all__ = [
    "BayesianModule",
    "Data",
    "Recipe",
    "Run",
    "build",
    "choose",
    "compare",
    "evaluate",
    "from_pretrained",
    "joined",
    "load",
    "load_weights",
    "predict_files",
    "predictive",
    "push_to_hub",
    "recipe_for",
    "train",
    "tune",
    "write_report",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
