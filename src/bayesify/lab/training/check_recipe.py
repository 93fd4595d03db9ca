"""Check before training that a recipe can be trained on its data."""

from __future__ import annotations

from bayesify.lab.conformal import require_calibration_rows
from bayesify.lab.data import Classes, Data, Labels, Masks, Reals
from bayesify.lab.evaluation.robustness import require_measurable
from bayesify.lab.models.user_networks import is_user_network
from bayesify.lab.recipes import Recipe, RecipeError
from bayesify.lab.recipes.methods import DeepEnsemblePart, PlainPart, PostHocPart
from bayesify.lab.runs import make_likelihood
from bayesify.lab.training.lightning_trainer import number_of_processes
from bayesify.lab.training.loggers import require_logger
from bayesify.lab.training.ood_inputs import ood_inputs_of


def require_trainable(recipe: Recipe, data: Data) -> None:
    """Raise if a recipe's options contradict each other or don't fit the data."""
    options = recipe.training
    if options.bound == "mixture" and options.mixture == "assign":
        raise RecipeError("training.bound='mixture' needs training.mixture='replicate', every row in every component")
    if options.patience is not None and not len(data.validation):
        raise RecipeError("training.patience needs validation rows; set data.validation")
    if options.regulariser is not None and isinstance(recipe.method, (PlainPart, DeepEnsemblePart)):
        raise RecipeError("training.regulariser needs a Bayesian network: one draw has no mutual information")
    if options.regulariser is not None and not isinstance(data.targets, Classes):
        raise RecipeError("training.regulariser needs classes: it uses the mutual information of draws")
    if (options.freeze_base or options.recalibrate) and isinstance(recipe.method, (PlainPart, DeepEnsemblePart)):
        raise RecipeError("training.freeze_base and training.recalibrate need a Bayesian method, not a plain network")
    require_logger(options.logger)
    _require_one_answer(recipe, data)
    make_likelihood(recipe, data.targets)  # raises unless it fits
    if recipe.likelihood.precision == "auto" and isinstance(data.targets, Reals):
        _require_choice_of_noise(recipe, data)
    if isinstance(recipe.method, DeepEnsemblePart) and recipe.model.is_trained:
        raise RecipeError(
            "the members of a deep ensemble start from different weights; leave out model.weights and model.pretrained"
        )
    if not len(data.validation) and not len(data.test):
        raise RecipeError("there are no rows to evaluate on; set data.validation or data.test above 0")
    require_measurable(recipe.evaluation, data.inputs, data.targets)
    require_calibration_rows(recipe, data)
    ood_inputs_of(recipe, data)
    _require_even_batches(recipe, data)


def _require_one_answer(recipe: Recipe, data: Data) -> None:
    """Raise if a recipe has what several labels, or masks, can't have."""
    if isinstance(recipe.method, PostHocPart) and isinstance(data.targets, (Labels, Masks)):
        raise RecipeError(f"method.name={recipe.method.name!r} is for one class or real numbers; use another method")
    if recipe.data.augment and isinstance(data.targets, Masks):
        raise RecipeError("data.augment changes images but not their masks; leave it out for segmentation")


def _require_choice_of_noise(recipe: Recipe, data: Data) -> None:
    """Raise unless a network can be trained with either kind of noise, and there are rows to choose by."""
    instead = "set likelihood.precision to 'learned' or 'input'"
    if not len(data.validation):
        raise RecipeError(f"likelihood.precision='auto' is chosen by validation rows, but there are none; {instead}")
    if recipe.model.is_trained or is_user_network(recipe.model.name):
        what = "trained weights have" if recipe.model.is_trained else f"{recipe.model.name} has"
        raise RecipeError(
            f"likelihood.precision='auto' trains a second network with twice the outputs, but {what} a fixed number; "
            f"{instead}"
        )


def _require_even_batches(recipe: Recipe, data: Data) -> None:
    """Raise unless every device gets equally many rows of a batch, at least two if there are several devices."""
    devices = number_of_processes(recipe)
    size = recipe.data.batch_size
    if size % devices:
        near = max(size // devices, 1) * devices
        raise RecipeError(
            f"data.batch_size={size} can't be divided evenly among {devices} devices; use {near} or {near + devices}"
        )
    if devices > 1 and min(size, len(data.train)) < 2 * devices:
        raise RecipeError(f"{devices} devices need batches of at least {2 * devices} rows, two for each")
