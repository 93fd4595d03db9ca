"""`train_recipe`: from a recipe to a trained, evaluated model in a run's folder."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_only
from safetensors import SafetensorError
from torch import Tensor, nn

import bayesify as by
from bayesify.lab.baselines.posthoc import apply_post_hoc, needs_training, require_applicable, snapshot_callbacks
from bayesify.lab.data import Data, Masks, Reals, loader, step
from bayesify.lab.evaluation import evaluate
from bayesify.lab.familiarity import fit_familiarity
from bayesify.lab.recipes import Recipe, RecipeError
from bayesify.lab.recipes.defaults import default_noise
from bayesify.lab.recipes.methods import DeepEnsemblePart
from bayesify.lab.runs import (
    Run,
    RunError,
    build_network,
    device_of,
    load_data,
    make_likelihood,
    number_of_outputs,
    with_precision,
)
from bayesify.lab.training.batches import ShuffledBatches, mix_seeds, training_loader
from bayesify.lab.training.calibrate import calibrate, validation_nll
from bayesify.lab.training.callbacks import KeepEpochs
from bayesify.lab.training.chance_level import warn_if_at_chance_level
from bayesify.lab.training.check_recipe import require_trainable
from bayesify.lab.training.checkpoint_files import read_checkpoint, restoring
from bayesify.lab.training.ensemble import joined
from bayesify.lab.training.lightning_module import BayesianModule
from bayesify.lab.training.lightning_trainer import make_trainer, number_of_processes, quiet_lightning
from bayesify.lab.training.loggers import ended
from bayesify.lab.training.ood_inputs import ood_inputs_of
from bayesify.lab.training.processes import end_with_main_process, followed_by_children, kept_interrupts
from bayesify.layers import bayesian_layers
from bayesify.prediction.likelihood import Likelihood

NOISES: dict[Literal["learned", "input"], str] = {
    "learned": "one noise for all inputs",
    "input": "a noise for each input",
}
"""What `likelihood.precision: auto` chooses from."""
REAL_CLIP = 1.0
"""The largest norm of a gradient for real targets: it grows with their precision, so that training could diverge."""
SEEDS_APART = 1000
"""The distance between the seeds of two ensemble members, so that runs with adjacent seeds share none."""
TRAINED = "trained"
"""The status of a run whose model is saved, and not evaluated yet."""


@dataclass(frozen=True)
class Watchers:
    """What watches the training of every network of a recipe: a progress bar, and callbacks of the user."""

    progress: bool
    callbacks: Sequence[L.Callback] = ()

    def __post_init__(self) -> None:
        """Callbacks are checked before anything is trained."""
        for each in self.callbacks:
            if not isinstance(each, L.Callback):
                found = f"the class {each.__name__}" if isinstance(each, type) else f"a {type(each).__name__}"
                raise RunError(f"callbacks: expected objects of lightning.Callback, got {found}")


def train_recipe(
    recipe: Recipe,
    folder: str | Path,
    *,
    resume: bool = False,
    progress: bool = True,
    evaluated: bool = True,
    callbacks: Sequence[L.Callback] = (),
) -> Run:
    """Train a recipe and evaluate the model, as `train` says."""
    folder, watchers = Path(folder), Watchers(progress, tuple(callbacks))
    end_with_main_process()
    done = ("finished",) if evaluated else ("finished", TRAINED)
    if resume and _open_to_resume(recipe, folder).facts["status"] in done:
        return Run.open(folder, trust=recipe.trust)
    if not resume and _is_main_process():
        Run.require_free(folder)
    began = time.perf_counter()
    data = load_data(recipe)
    torch.manual_seed(mix_seeds(recipe.seed, 0))
    require_trainable(recipe, data)  # raises before the folder is created
    network = bayesian_network(recipe, data)
    require_applicable(recipe, data, network, len(ShuffledBatches(len(data.train), recipe.data.batch_size, seed=0)))
    with _locked(folder):
        run = _create_or_open(recipe, folder, resume)
        if recipe.choices and _is_main_process():
            run.note(choices=[str(choice) for choice in recipe.choices])
        if run.facts["status"] not in (TRAINED, "finished") or not run.model_file.is_file():
            _train_and_save(recipe, run, data, network, watchers, began)
        if evaluated and _is_main_process():
            fit_familiarity(run, data)
            evaluate(run)
            run.note(status="finished")
        return run


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes from training in the folder, and say how to continue if a file can't be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with Run(folder).lock() if _is_main_process() else nullcontext():
            yield
    except (OSError, SafetensorError) as error:
        what = f"{error.filename or folder}: {error.strerror or error}" if isinstance(error, OSError) else str(error)
        raise RunError(
            f"{what}. What is in {folder} is kept; once the cause is removed, continue with `bayesify train --resume "
            f"{folder}`, or without --resume if the folder has no recipe.yaml"
        ) from error


def _train_and_save(recipe: Recipe, run: Run, data: Data, network: nn.Module, watchers: Watchers, began: float) -> None:
    """Train and save the network."""
    spent = float(run.facts.get("seconds") or 0.0)
    if isinstance(data.targets, Reals) and recipe.likelihood.precision == "auto":
        network, likelihood, is_main = _train_with_both_noises(recipe, run, data, watchers)
    else:
        network, likelihood, is_main = _train_network(recipe, run, data, network, watchers)
    if is_main:
        run.save(network, likelihood, data)
        run.note(rows=len(data.train), seconds=spent + time.perf_counter() - began, status=TRAINED)


def _train_network(
    recipe: Recipe, run: Run, data: Data, network: nn.Module, watchers: Watchers
) -> tuple[nn.Module, Likelihood, bool]:
    """Train a network, or the members of an ensemble, and set its noise or temperature by the validation rows."""
    trained_with = recipe.likelihood.training_precision
    likelihood: Likelihood = make_likelihood(recipe, data.targets, precision=trained_with)
    if isinstance(recipe.method, DeepEnsemblePart):
        network, is_main = _train_members(recipe, recipe.method.members, run, data, likelihood, watchers)
    else:
        network, likelihood, is_main = _fit_one(recipe, run, data, network, likelihood, watchers)
    if is_main:
        run.note(**calibrate(recipe, data, network, likelihood))
    return network, likelihood if trained_with is None else make_likelihood(recipe, data.targets), is_main


def _train_with_both_noises(
    recipe: Recipe, run: Run, data: Data, watchers: Watchers
) -> tuple[nn.Module, Likelihood, bool]:
    """Train with one noise for all inputs and with one for each, and return what has the lower validation NLL."""
    found: dict[float, tuple[nn.Module, Likelihood]] = {}
    told: list[str] = []
    is_main = True
    for precision, words in NOISES.items():
        own = with_precision(recipe, precision)
        folder = run.folder / f"noise-{precision}"
        sub = _create_or_open(own, folder, resume=Run(folder).recipe_file.exists())
        if sub.facts["status"] == "finished":
            trained = sub.load()
            network, likelihood = trained.model.cpu(), trained.likelihood.cpu()
        else:
            torch.manual_seed(mix_seeds(own.seed, 0))
            network, likelihood, is_main = _train_network(own, sub, data, bayesian_network(own, data), watchers)
            if is_main:
                sub.save(network, likelihood, data)
                sub.note(status="finished")
        if is_main:
            nll = validation_nll(own, data, network, likelihood)
            found[nll] = network, likelihood
            told.append(f"{words} {nll:.3f}")
    if is_main:
        run.note(noise=f"the one with the lower validation NLL: {', '.join(told)}")
        network, likelihood = found[min(found)]
    return network, likelihood, is_main


def _fit_one(
    recipe: Recipe, run: Run, data: Data, network: nn.Module, likelihood: Likelihood, watchers: Watchers
) -> tuple[nn.Module, Likelihood, bool]:
    """Train a network and apply post-hoc methods; returns also whether this is the main process."""
    snapshots = snapshot_callbacks(recipe, network)
    is_main = _is_main_process()
    if needs_training(recipe):
        is_main = fit(recipe, run, data, network, likelihood, watchers, snapshots)
    if not is_main:
        return network, likelihood, is_main
    result = apply_post_hoc(
        recipe, data, network, likelihood, snapshots, device=device_of(recipe), seed=mix_seeds(recipe.seed, 2)
    )
    run.note(**result.facts)
    return joined(result.networks) if len(result.networks) > 1 else result.networks[0], result.likelihood, is_main


def fit(
    recipe: Recipe,
    run: Run,
    data: Data,
    network: nn.Module,
    likelihood: Likelihood,
    watchers: Watchers,
    snapshots: Sequence[L.Callback] = (),
) -> bool:
    """Train a network and its likelihood in place; returns whether this is the main process."""
    module = BayesianModule(
        network,
        n=len(data.train),
        likelihood=likelihood,
        training=recipe.training,
        prepare=data.inputs.prepare,
        augment=[step(each) for each in recipe.data.augment],
        ood_inputs=ood_inputs_of(recipe, data),
        seed=recipe.seed,
    )
    if recipe.training.precision == "64-true":  # Lightning would do so after it has restored, and rounded, a checkpoint
        module.double()
    checkpoint = run.checkpoint_file if run.checkpoint_file.exists() else None
    world = number_of_processes(recipe)
    per_epoch = len(ShuffledBatches(len(data.train), recipe.data.batch_size, seed=recipe.seed, world=world))
    saved = None if checkpoint is None else read_checkpoint(run, module, per_epoch, bool(watchers.callbacks))
    with quiet_lightning():
        resume_at = None if saved is None else int(saved["global_step"])
        clip = recipe.training.clip or (REAL_CLIP if isinstance(data.targets, Reals) else None)
        trainer = make_trainer(
            recipe, run, batches=per_epoch, clip=clip, resume_at=resume_at, progress=watchers.progress
        )
    kept = [KeepEpochs(run, recipe.training.keep_epochs)]
    trainer.callbacks[:0] = [*snapshots, *watchers.callbacks, *kept]  # type: ignore[attr-defined]  # before the checkpoint callback, which saves their state
    if saved is not None:
        module.batches_done = saved["batches_done"]
        if saved["stopped"]:  # early: nothing is left to train
            with ended(trainer.logger):
                module.load_state_dict(saved["state_dict"])
            module.network.eval()
            return trainer.is_global_zero
    batches = ShuffledBatches(
        len(data.train),
        recipe.data.batch_size,
        seed=recipe.seed,
        rank=trainer.global_rank,
        world=trainer.world_size,
        start=module.batches_done,
    )
    train_batches = training_loader(data.train, batches, recipe.data.workers)
    validation_batches = loader(data.validation, recipe.evaluation.batch_size) if len(data.validation) else None
    restored = restoring(run.checkpoint_file, trainer)
    with quiet_lightning(), ended(trainer.logger), kept_interrupts(), followed_by_children(), restored:
        trainer.fit(module, train_batches, validation_batches, ckpt_path=checkpoint, weights_only=True)
    network.cpu().eval(), likelihood.cpu()
    if "val_nll" in trainer.callback_metrics and trainer.is_global_zero:
        nll = float(trainer.callback_metrics["val_nll"])
        warn_if_at_chance_level(nll, data.validation, data.targets, run.folder, recipe.training.lr)
    return trainer.is_global_zero


def bayesian_network(recipe: Recipe, data: Data) -> nn.Module:
    """The network of a recipe with its weights, converted and ready to train."""
    network = build_network(recipe, data.inputs, data.targets)
    sample = data.inputs.prepare(data.train.raw(torch.arange(min(4, len(data.train)))))
    pixels = tuple(data.train.targets.shape[1:]) if isinstance(data.targets, Masks) else ()
    _check_outputs(recipe, network, sample, (number_of_outputs(recipe, data.targets), *pixels))
    noise = default_noise(recipe.model.is_trained, isinstance(data.targets, Reals))
    if not bayesian_layers(recipe.method.convert(network, noise)):
        return network
    by.check(network, sample)
    if recipe.training.recalibrate:
        by.recalibrate(network, _some_batches(recipe, data))
    if recipe.training.freeze_base:
        _freeze_base(network)
    return network


def _check_outputs(recipe: Recipe, network: nn.Module, x: Tensor, outputs: tuple[int, ...]) -> None:
    """Raise if the network does not take the inputs, or has other outputs than the targets need."""
    network.eval()
    try:
        with torch.no_grad():
            found = tuple(network(x).shape)
    except (RuntimeError, ValueError, TypeError) as error:
        raise RunError(f"{recipe.model.name} does not take inputs of shape {tuple(x.shape)}: {error}") from error
    if found != (len(x), *outputs):
        hint = "; for a class of each pixel use model.name=unet" if len(outputs) > 1 else ""
        raise RunError(f"{recipe.model.name} returns outputs of shape {found}; expected {(len(x), *outputs)}{hint}")
    network.train()


def _some_batches(recipe: Recipe, data: Data) -> list[Tensor]:
    batches = ShuffledBatches(len(data.train), recipe.data.batch_size, seed=recipe.seed)
    rows = [torch.tensor(batch) for _, batch in zip(range(recipe.training.recalibrate), batches, strict=False)]
    return [data.inputs.prepare(data.train.raw(each)) for each in rows]


def _freeze_base(network: nn.Module) -> None:
    """Train the posterior only."""
    for name, p in network.named_parameters():
        p.requires_grad_(".posterior." in f".{name}")
    if not any(p.requires_grad for p in network.parameters()):
        raise RecipeError("training.freeze_base leaves nothing to train: this method adds no parameters")


def _train_members(
    recipe: Recipe, members: int, run: Run, data: Data, likelihood: Likelihood, watchers: Watchers
) -> tuple[nn.Module, bool]:
    """Train plain networks one after another, each in its own folder, and join them into one Ensemble.

    They share one likelihood, which is trained further with each.
    """
    networks: list[nn.Module] = []
    is_main = True
    for member in range(members):
        changes = {"method": {"name": "none"}, "seed": recipe.seed + SEEDS_APART * member}
        own = Recipe.of({**recipe.plain(), **changes}, trust=recipe.trust)
        folder = run.folder / f"member-{member}"
        sub = _create_or_open(own, folder, resume=Run(folder).recipe_file.exists())
        if sub.facts["status"] == "finished":
            found = sub.load()
            networks.append(found.model.cpu())
            likelihood.load_state_dict(found.likelihood.cpu().state_dict())
            continue
        torch.manual_seed(mix_seeds(own.seed, 0))
        networks.append(bayesian_network(own, data))
        is_main = fit(own, sub, data, networks[-1], likelihood, watchers)
        if is_main:
            sub.save(networks[-1], likelihood, data)
            sub.note(status="finished")
    return joined(networks), is_main


def _create_or_open(recipe: Recipe, folder: Path, resume: bool) -> Run:
    """The run to train: a new one, the one to resume, or the one that the main process creates."""
    if not resume and _is_main_process():
        return Run.create(folder, recipe)
    return _open_to_resume(recipe, folder) if _is_main_process() else _wait_for_run(recipe, folder)


def _open_to_resume(recipe: Recipe, folder: Path) -> Run:
    run = Run.open(folder, trust=recipe.trust)
    if run.recipe != recipe:
        raise RunError(
            f"{folder}: its recipe.yaml differs from the given recipe; a run can only be resumed with its own"
        )
    return run


def _wait_for_run(recipe: Recipe, folder: Path) -> Run:
    """Wait until the main process has created the folder."""
    for _ in range(6000):
        if (folder / "run.json").exists():
            break
        time.sleep(0.1)
    return Run.open(folder, trust=recipe.trust)


def _is_main_process() -> bool:
    """Whether this is the main process, by the environment, as there is no trainer yet."""
    if int(os.environ.get("NODE_RANK", "0")):
        return False
    return int(getattr(rank_zero_only, "rank", 0) or 0) == 0
