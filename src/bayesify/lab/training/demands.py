"""What a recipe must not ask for, as far as that shows before training."""

from __future__ import annotations

from bayesify.lab.data import Data, Reals
from bayesify.lab.evaluation.robustness import require_measurable
from bayesify.lab.recipes import Recipe, RecipeError
from bayesify.lab.recipes.methods import DeepPart, PlainPart
from bayesify.lab.training.strange import strange_inputs
from bayesify.lab.training.trainer import world


def require_trainable(recipe: Recipe, data: Data) -> None:
    """Raise where a recipe asks for what can't be, as far as that shows before training."""
    options = recipe.training
    if options.bound == "mixture" and options.mixture == "assign":
        raise RecipeError("training.bound='mixture' needs training.mixture='replicate': every row in every component")
    if options.patience is not None and not len(data.validation):
        raise RecipeError("training.patience needs validation rows to judge by; set data.validation")
    if options.regulariser is not None and isinstance(recipe.method, (PlainPart, DeepPart)):
        raise RecipeError("training.regulariser needs a Bayesian network: one draw has no mutual information")
    if options.regulariser is not None and isinstance(data.targets, Reals):
        raise RecipeError("training.regulariser needs classes: it is of the draws' mutual information")
    if (options.freeze_base or options.recalibrate) and isinstance(recipe.method, (PlainPart, DeepPart)):
        raise RecipeError("training.freeze_base and training.recalibrate need a Bayesian method, not a plain network")
    if isinstance(recipe.method, DeepPart) and recipe.model.is_trained:
        raise RecipeError(
            "the members of a deep ensemble must begin apart; leave out model.weights and model.pretrained"
        )
    if not len(data.validation) and not len(data.test):
        raise RecipeError("no row is left to evaluate the model on; set data.validation or data.test above 0")
    require_measurable(recipe.evaluation, data.inputs, data.targets)
    strange_inputs(recipe, data)
    _require_even(recipe, data)


def _require_even(recipe: Recipe, data: Data) -> None:
    """Every device needs as many rows of a batch, two at least where there are several."""
    devices = world(recipe)
    size = recipe.data.batch_size
    if size % devices:
        near = max(size // devices, 1) * devices
        raise RecipeError(
            f"data.batch_size={size} can't be shared evenly by {devices} devices; use {near} or {near + devices}"
        )
    if devices > 1 and min(size, len(data.train)) < 2 * devices:
        raise RecipeError(f"{devices} devices need batches of {2 * devices} rows or more: two for each")
