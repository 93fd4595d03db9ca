"""From a recipe to a trained, evaluated model in a run's folder."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

import bayesify as by
from bayesify.lab.baselines.posthoc import finish, require_possible, trains, watchers
from bayesify.lab.data import Data, loader, step
from bayesify.lab.evaluation import evaluate
from bayesify.lab.recipes import Recipe, RecipeError
from bayesify.lab.recipes.methods import DeepPart
from bayesify.lab.runs import Run, RunError, build_network, device_of, load_data, make_likelihood, outputs_of
from bayesify.lab.training.batches import ShuffledBatches, mixed, training_loader
from bayesify.lab.training.chance import warn_of_chance
from bayesify.lab.training.demands import require_trainable
from bayesify.lab.training.ensemble import joined
from bayesify.lab.training.module import BayesianModule
from bayesify.lab.training.strange import strange_inputs
from bayesify.lab.training.trainer import make_trainer, quiet
from bayesify.likelihood import Likelihood

SEEDS_APART = 1000
"""Between the seeds of two members of a deep ensemble, so that runs with seeds side by side share none."""


def train(recipe: Recipe, folder: str | Path, *, resume: bool = False, progress: bool = True) -> Run:
    """Train what a recipe says and evaluate it; everything is in the run's folder.

    With `resume` the run that is in the folder goes on where its last checkpoint was, and ends as it would have ended
    without an interruption. Lightning's other ranks return from here too, with the same run.
    """
    folder = Path(folder)
    if resume and _resumed(recipe, folder).facts["status"] == "finished":
        return Run.open(folder)
    if not resume and _is_first():
        Run.require_free(folder)
    began = time.perf_counter()
    data = load_data(recipe)
    torch.manual_seed(mixed(recipe.seed, 0))
    require_trainable(recipe, data)  # whatever is wrong is said before there is a folder
    network = bayesian_network(recipe, data)
    require_possible(recipe, data, network, len(ShuffledBatches(len(data.train), recipe.data.batch_size, seed=0)))
    run = _run(recipe, folder, resume)
    with run.held() if _is_first() else nullcontext():
        return _trained(recipe, run, data, network, progress, began)


def _trained(recipe: Recipe, run: Run, data: Data, network: nn.Module, progress: bool, began: float) -> Run:
    """The run with its network trained and evaluated."""
    spent = float(run.facts.get("seconds", 0.0))
    likelihood: Likelihood = make_likelihood(recipe, data.targets)
    if isinstance(recipe.method, DeepPart):
        network, first = _members(recipe, recipe.method.members, run, data, likelihood, progress)
    else:
        network, likelihood, first = _fitted(recipe, run, data, network, likelihood, progress)
    if first:
        run.save(network, likelihood, data)
        run.note(rows=len(data.train), seconds=spent + time.perf_counter() - began)
        evaluate(run)
        run.note(status="finished")
    return run


def _fitted(
    recipe: Recipe, run: Run, data: Data, network: nn.Module, likelihood: Likelihood, progress: bool
) -> tuple[nn.Module, Likelihood, bool]:
    """The network and its likelihood as the method leaves them, and whether this process is the first of all ranks."""
    seen = watchers(recipe, network)
    first = fit(recipe, run, data, network, likelihood, progress, seen) if trains(recipe) else _is_first()
    if not first:
        return network, likelihood, first
    done = finish(recipe, data, network, likelihood, seen, device=device_of(recipe), seed=mixed(recipe.seed, 2))
    run.note(**done.facts)
    return joined(done.networks) if len(done.networks) > 1 else done.networks[0], done.likelihood, first


def fit(
    recipe: Recipe,
    run: Run,
    data: Data,
    network: nn.Module,
    likelihood: Likelihood,
    progress: bool,
    callbacks: Sequence[L.Callback] = (),
) -> bool:
    """Train a network and its likelihood in place; whether this process is the first of all ranks."""
    module = BayesianModule(
        network,
        n=len(data.train),
        likelihood=likelihood,
        training=recipe.training,
        prepare=data.inputs.prepare,
        augment=[step(each) for each in recipe.data.augment],
        strange=strange_inputs(recipe, data),
        seed=recipe.seed,
    )
    checkpoint = run.checkpoint_file if run.checkpoint_file.exists() else None
    done = module.batches_done = _batches_done(checkpoint)
    steps = max(len(data.train) // recipe.data.batch_size, 1)
    with quiet():
        trainer = make_trainer(recipe, run, batches=steps, done=done, progress=progress)
    trainer.callbacks[:0] = callbacks  # type: ignore[attr-defined]  # before the one that saves what they hold
    if checkpoint is not None and _stopped(checkpoint, module):
        return trainer.is_global_zero
    batches = ShuffledBatches(
        len(data.train),
        recipe.data.batch_size,
        seed=recipe.seed,
        rank=trainer.global_rank,
        world=trainer.world_size,
        start=module.batches_done,
    )
    shuffled = training_loader(data.train, batches, recipe.data.workers)
    judged = loader(data.validation, recipe.evaluation.batch_size) if len(data.validation) else None
    with quiet():
        trainer.fit(module, shuffled, judged, ckpt_path=checkpoint, weights_only=True)
    network.cpu().eval(), likelihood.cpu()
    if "val_nll" in trainer.callback_metrics and trainer.is_global_zero:
        nll = float(trainer.callback_metrics["val_nll"])
        warn_of_chance(nll, data.validation, data.targets, run.folder, recipe.training.lr)
    return trainer.is_global_zero


def bayesian_network(recipe: Recipe, data: Data) -> nn.Module:
    """The recipe's network with its weights, made Bayesian, ready to train."""
    network = build_network(recipe, data.inputs, data.targets)
    first = data.inputs.prepare(data.train.raw(torch.arange(min(4, len(data.train)))))
    _check_outputs(recipe, network, first, outputs_of(recipe, data.targets))
    families = recipe.method.families()
    if families is None:
        return network
    network = by.convert(network, families)
    by.check(network, first)
    if recipe.training.recalibrate:
        by.recalibrate(network, _some_batches(recipe, data))
    if recipe.training.freeze_base:
        _freeze_base(network)
    return network


def _check_outputs(recipe: Recipe, network: nn.Module, x: Tensor, outputs: int) -> None:
    """A network of the user's own may not fit the data."""
    network.eval()
    try:
        with torch.no_grad():
            found = tuple(network(x).shape)
    except (RuntimeError, ValueError, TypeError) as error:
        raise RunError(f"{recipe.model.name} does not take inputs of shape {tuple(x.shape)}: {error}") from error
    if found != (len(x), outputs):
        raise RunError(f"{recipe.model.name} gives outputs of shape {found} where {(len(x), outputs)} is needed")
    network.train()


def _some_batches(recipe: Recipe, data: Data) -> list[Tensor]:
    batches = ShuffledBatches(len(data.train), recipe.data.batch_size, seed=recipe.seed)
    rows = [torch.tensor(batch) for _, batch in zip(range(recipe.training.recalibrate), batches, strict=False)]
    return [data.inputs.prepare(data.train.raw(each)) for each in rows]


def _freeze_base(network: nn.Module) -> None:
    """Only the posteriors are trained."""
    for name, p in network.named_parameters():
        p.requires_grad_(".posterior." in f".{name}")
    if not any(p.requires_grad for p in network.parameters()):
        raise RecipeError("training.freeze_base leaves nothing to train: this method adds no parameters")


def _members(
    recipe: Recipe, members: int, run: Run, data: Data, likelihood: Likelihood, progress: bool
) -> tuple[nn.Module, bool]:
    """Train plain networks one after another, each in a folder of its own, and join them into one Ensemble.

    The likelihood is shared and goes on learning.
    """
    networks: list[nn.Module] = []
    first = True
    for member in range(members):
        own = Recipe.of({**recipe.plain(), "method": {"name": "none"}, "seed": recipe.seed + SEEDS_APART * member})
        folder = run.folder / f"member-{member}"
        sub = _run(own, folder, resume=folder.exists())
        if sub.facts["status"] == "finished":
            found = sub.load()
            networks.append(found.model.cpu())
            likelihood.load_state_dict(found.likelihood.cpu().state_dict())
            continue
        torch.manual_seed(mixed(own.seed, 0))
        networks.append(bayesian_network(own, data))
        first = fit(own, sub, data, networks[-1], likelihood, progress)
        if first:
            sub.save(networks[-1], likelihood, data)
            sub.note(status="finished")
    return joined(networks), first


def _run(recipe: Recipe, folder: Path, resume: bool) -> Run:
    """The run to train: a new one, the one to resume, or on other ranks the one that the first has made."""
    if not resume and _is_first():
        return Run.create(folder, recipe)
    return _resumed(recipe, folder) if _is_first() else _when_there(folder)


def _resumed(recipe: Recipe, folder: Path) -> Run:
    run = Run.open(folder)
    if run.recipe != recipe:
        raise RunError(f"{folder}: its recipe.yaml differs from the one given; a run resumes with its own recipe")
    return run


def _when_there(folder: Path) -> Run:
    """Another rank makes the folder; wait for it."""
    for _ in range(6000):
        if (folder / "run.json").exists():
            break
        time.sleep(0.1)
    return Run.open(folder)


def _is_first() -> bool:
    """Whether this process is the first of all; before there is a trainer, the environment says."""
    if int(os.environ.get("NODE_RANK", "0")):
        return False
    return int(getattr(rank_zero_only, "rank", 0) or 0) == 0


def _stopped(checkpoint: Path, module: BayesianModule) -> bool:
    """Whether training had ended early; then its last state is loaded and nothing is left to train."""
    saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
    if saved["stopped"]:
        module.load_state_dict(saved["state_dict"])
        module.network.eval()
    return bool(saved["stopped"])


def _batches_done(checkpoint: Path | None) -> int:
    if checkpoint is None:
        return 0
    return int(torch.load(checkpoint, map_location="cpu", weights_only=True)["batches_done"])
