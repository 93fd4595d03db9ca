"""Recipes: what a run is, validated; and how each method is trained unless a recipe says otherwise."""

from bayesify.lab.recipes.defaults import training_of
from bayesify.lab.recipes.parts import (
    AdaptivePart,
    AttackPart,
    DataPart,
    EvaluationPart,
    LikelihoodPart,
    ModelPart,
    RegulariserPart,
    TrainingPart,
)
from bayesify.lab.recipes.recipe import Recipe, changed, read_yaml
from bayesify.lab.recipes.wording import RecipeError

__all__ = [
    "AdaptivePart",
    "AttackPart",
    "DataPart",
    "EvaluationPart",
    "LikelihoodPart",
    "ModelPart",
    "Recipe",
    "RecipeError",
    "RegulariserPart",
    "TrainingPart",
    "changed",
    "read_yaml",
    "training_of",
]
