"""`train_side_by_side`: train many small networks of one kind at once, each on its own data, by `torch.vmap`.

A step of a small network is nearly all overhead, which the networks then share: twenty perceptrons on twenty splits of
a data set take about twice as long as one. Their noise comes from one random stream, so that a result depends on which
networks are trained together; initial values and batches are those of `train`. (There the members of a deep ensemble
also learn one precision of real targets, here each its own, of which the first is kept; the validation rows set it.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, stack_module_state

from bayesify.lab.data import Data, Reals
from bayesify.lab.recipes import Recipe, RecipeError
from bayesify.lab.recipes.methods import DeepEnsemblePart, PostHocPart
from bayesify.lab.runs import load_data, make_likelihood
from bayesify.lab.trained import Trained
from bayesify.lab.training.batches import ShuffledBatches, mix_seeds
from bayesify.lab.training.calibrate import calibrate
from bayesify.lab.training.ensemble import joined
from bayesify.lab.training.lightning_module import BayesianModule
from bayesify.lab.training.refuse_not_finite import require_finite_state
from bayesify.lab.training.train_recipe import REAL_CLIP, SEEDS_APART, bayesian_network

MAY_DIFFER = {"data", "seed", "likelihood"}
"""The parts in which recipes may differ that are trained side by side."""


def train_side_by_side(recipes: Sequence[Recipe]) -> list[tuple[Trained, Data]]:
    """Train several recipes at once that differ in their data and seeds only; nothing is written to files.

    Args:
        recipes: The recipes. Their training sets must have equally many rows, and fit in memory together.

    Returns:
        For each recipe the trained model, and its data.

    Raises:
        RecipeError: If recipes differ in more, or use what needs `train`: a regulariser, augmentation, early stopping,
            accumulated gradients, or a method that is applied after training.

    >>> given = {"data": {"name": "digits", "limit": 40}, "method": "IBNN", "training": {"epochs": 1}}
    >>> found = train_side_by_side([Recipe.of({**given, "seed": seed}) for seed in range(3)])
    >>> [trained.predict(data.test, 4).samples for trained, data in found]
    [4, 4, 4]
    """
    _require_trainable(recipes)
    method = recipes[0].method
    members = method.members if isinstance(method, DeepEnsemblePart) else 1
    datas = [load_data(recipe) for recipe in recipes]
    if len(sizes := {len(data.train) for data in datas}) > 1:
        raise RecipeError(f"training sets of {sorted(sizes)} rows can't be trained side by side; give equally many")
    every = [(_member(recipe, i), data) for recipe, data in zip(recipes, datas, strict=True) for i in range(members)]
    modules = [_module(recipe, data) for recipe, data in every]
    _fit(modules, every)
    found = []
    for i, (recipe, data) in enumerate(zip(recipes, datas, strict=True)):
        own = modules[i * members : (i + 1) * members]
        network = joined([module.network for module in own]) if members > 1 else own[0].network
        likelihood = own[0].likelihood
        calibrate(recipe, data, network, likelihood)
        if recipe.likelihood.training_precision is not None:
            likelihood = make_likelihood(recipe, data.targets)
        found.append((Trained(network.eval(), likelihood, data.inputs, data.targets, recipe), data))
    return found


def _require_trainable(recipes: Sequence[Recipe]) -> None:
    first, training = recipes[0], recipes[0].training
    for recipe in recipes[1:]:
        differing = [part for part in Recipe.model_fields if getattr(recipe, part) != getattr(first, part)]
        if wrong := sorted(set(differing) - MAY_DIFFER):
            raise RecipeError(f"recipes to train side by side differ in {', '.join(wrong)}: give all the same")
    unsuited = {
        "data.augment": first.data.augment,
        "method.name": isinstance(first.method, PostHocPart),
        "likelihood.precision=auto": first.likelihood.precision == "auto",
        **{f"training.{name}": getattr(training, name) for name in ("regulariser", "patience", "freeze_base")},
        "training.accumulate": training.accumulate > 1,
    }
    if wrong := [name for name, value in unsuited.items() if value]:
        raise RecipeError(f"{', '.join(wrong)}: not possible side by side; train each recipe by itself")


def _member(recipe: Recipe, place: int) -> Recipe:
    """The recipe of a member of a deep ensemble, with the seed that `train` gives it; any other recipe as it is."""
    if not isinstance(recipe.method, DeepEnsemblePart):
        return recipe
    return Recipe.of({**recipe.plain(), "method": {"name": "none"}, "seed": recipe.seed + SEEDS_APART * place})


class _Module(BayesianModule):
    """The lab's loss, schedules and parameter groups, as a module whose state can be stacked with that of others."""

    stacked: dict[str, Tensor]
    """The tensors of all networks by their names in this one, which are optimized in place of its own."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of a batch."""
        return (self._objective(x, y) if self.bayesian else self._plain(x, y))[0]

    def parameter_groups(self) -> list[dict[str, Any]]:
        names = {p: name for name, p in self.named_parameters()}
        fused = {} if self.options.optimizer == "sgd" else {"fused": True}  # one call in place of ten for each tensor
        groups = super().parameter_groups()
        return [{**group, **fused, "params": [self.stacked[names[p]] for p in group["params"]]} for group in groups]

    def of_length(self, batches: int) -> None:
        """Tell it how long training is, as Lightning's trainer would."""
        steps = batches * self.options.epochs
        self._trainer = SimpleNamespace(  # type: ignore[assignment]
            num_training_batches=batches, estimated_stepping_batches=steps
        )


def _module(recipe: Recipe, data: Data) -> _Module:
    torch.manual_seed(mix_seeds(recipe.seed, 0))
    options = recipe.training
    options = options.model_copy(update={"kl": "loss"}) if options.kl == "gradient" else options  # has this gradient
    network = bayesian_network(recipe, data)
    likelihood = make_likelihood(recipe, data.targets, precision=recipe.likelihood.training_precision)
    return _Module(network, n=len(data.train), likelihood=likelihood, training=options, prepare=data.inputs.prepare)


def _fit(modules: Sequence[_Module], every: Sequence[tuple[Recipe, Data]]) -> None:
    """Train all networks, and write what was learnt into each."""
    first, (recipe, data) = modules[0], every[0]
    for module in modules:
        module.train()
    first.stacked, buffers = stack_module_state(list(modules))
    x = torch.stack([data.inputs.prepare(data.train.raw(torch.arange(first.n))) for _, data in every])
    y = torch.stack([data.train.targets for _, data in every])
    batches = [ShuffledBatches(first.n, recipe.data.batch_size, seed=recipe.seed) for recipe, _ in every]
    first.of_length(len(batches[0]))
    made: Any = first.configure_optimizers()
    optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
    clip = recipe.training.clip or (REAL_CLIP if isinstance(data.targets, Reals) else math.inf)

    def loss(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = functional_call(first, (parameters, buffers), (x, y))
        return found

    losses = torch.vmap(loss, randomness="different")
    own = torch.arange(len(modules)).unsqueeze(1)
    torch.manual_seed(mix_seeds(*(recipe.seed for recipe, _ in every), 1))
    for epoch in range(recipe.training.epochs):
        for each in batches:
            each.set_epoch(epoch)
        for rows in zip(*batches, strict=True):
            index = torch.tensor(rows)
            optimizer.zero_grad()
            first.beta_now = first.beta
            losses(first.stacked, buffers, x[own, index], y[own, index]).sum().backward()
            _clip(list(first.stacked.values()), clip)
            optimizer.step()
            schedule.step()
            first.batches_done += 1
    learnt = {**first.stacked, **buffers}
    for i, module in enumerate(modules):
        module.load_state_dict({name: tensor[i] for name, tensor in learnt.items()})
        require_finite_state(module, module.network, first.batches_done)


def _clip(tensors: Sequence[Tensor], most: float) -> None:
    """Clip each network's gradient by its own norm, as `torch.nn.utils.clip_grad_norm_` does for one."""
    grads = [tensor.grad for tensor in tensors if tensor.grad is not None]
    if math.isinf(most) or not grads:
        return
    norms = torch.stack([grad.reshape(len(grad), -1).square().sum(1) for grad in grads]).sum(0).sqrt()
    factor = (most / (norms + 1e-6)).clamp_max(1.0)
    for grad in grads:
        grad.mul_(factor.view(-1, *[1] * (grad.dim() - 1)))
