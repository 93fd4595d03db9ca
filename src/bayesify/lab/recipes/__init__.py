"""Recipes: everything about a run in one validated object, with the default training of each method."""

from bayesify.lab.recipes.defaults import default_training
from bayesify.lab.recipes.error_messages import RecipeError
from bayesify.lab.recipes.parts import (
    AdaptivePart,
    AttackPart,
    ConformalPart,
    DataPart,
    EvaluationPart,
    LikelihoodPart,
    ModelPart,
    RegulariserPart,
    TrainingPart,
)
from bayesify.lab.recipes.recipe import Recipe, apply_overrides, read_yaml

__all__ = [
    "AdaptivePart",
    "AttackPart",
    "ConformalPart",
    "DataPart",
    "EvaluationPart",
    "LikelihoodPart",
    "ModelPart",
    "Recipe",
    "RecipeError",
    "RegulariserPart",
    "TrainingPart",
    "apply_overrides",
    "default_training",
    "read_yaml",
]
