"""From a recipe to a trained, evaluated model in a run's folder."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

import bayesify as by
from bayesify.lab.data import Data, loader, step
from bayesify.lab.evaluation import evaluate
from bayesify.lab.recipes import Recipe, RecipeError
from bayesify.lab.recipes.methods import DeepPart
from bayesify.lab.runs import Run, RunError, build_network, load_data, make_likelihood, outputs_of
from bayesify.lab.training.batches import ShuffledBatches, mixed, training_loader
from bayesify.lab.training.callbacks import Checkpoint, CsvLog, ProgressBar
from bayesify.lab.training.ensemble import joined
from bayesify.lab.training.module import BayesianModule
from bayesify.lab.training.strange import strange_inputs
from bayesify.likelihood import Likelihood

SEEDS_APART = 1000
"""Between the seeds of two members of a deep ensemble, so that runs with seeds side by side share none."""
ADVICE = (
    ".*does not have many workers",  # data in memory need none
    ".*is smaller than the logging interval",
    ".*have no `val_dataloader`",  # a recipe may have no validation rows
    ".*ended before the epoch ended and your dataloader is not resumable",  # ours is: see ShuffledBatches
    ".*LeafSpec",
)
"""What Lightning warns of that does not hold here."""


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
    network = bayesian_network(recipe, data)  # whatever is wrong with it is said before there is a folder
    run = _run(recipe, folder, resume)
    spent = float(run.facts.get("seconds", 0.0))
    likelihood: Likelihood = make_likelihood(recipe, data.targets)
    if isinstance(recipe.method, DeepPart):
        network, first = _members(recipe, recipe.method.members, run, data, likelihood, progress)
    else:
        first = fit(recipe, run, data, network, likelihood, progress)
    if first:
        run.save(network, likelihood, data)
        run.note(rows=len(data.train), seconds=spent + time.perf_counter() - began)
        evaluate(run)
        run.note(status="finished")
    return run


def fit(recipe: Recipe, run: Run, data: Data, network: nn.Module, likelihood: Likelihood, progress: bool) -> bool:
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
    with _quiet():
        trainer = _trainer(recipe, run, data, progress)
    checkpoint = run.checkpoint_file if run.checkpoint_file.exists() else None
    module.batches_done = _batches_done(checkpoint)
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
    with _quiet():
        trainer.fit(module, shuffled, judged, ckpt_path=checkpoint, weights_only=True)
    network.cpu().eval(), likelihood.cpu()
    return trainer.is_global_zero


def bayesian_network(recipe: Recipe, data: Data) -> nn.Module:
    """The recipe's network with its weights, made Bayesian, ready to train."""
    network = build_network(recipe, data.inputs, data.targets)
    if recipe.training.channels_last:
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
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
    for _ in range(600):
        if (folder / "run.json").exists():
            break
        time.sleep(0.1)
    return Run.open(folder)


def _is_first() -> bool:
    """Whether this process is the first of all; before there is a trainer, the environment says."""
    if int(os.environ.get("NODE_RANK", "0")):
        return False
    return int(getattr(rank_zero_only, "rank", 0) or 0) == 0


def _trainer(recipe: Recipe, run: Run, data: Data, progress: bool) -> L.Trainer:
    options = recipe.training
    done = _batches_done(run.checkpoint_file if run.checkpoint_file.exists() else None)
    callbacks: list[L.Callback] = [Checkpoint(run.checkpoint_file, options.checkpoint_steps)]
    if options.patience is not None:
        if not len(data.validation):
            raise RecipeError("training.patience needs validation rows to judge by; set data.validation")
        callbacks.append(EarlyStopping("val_nll", patience=options.patience, verbose=False))
    bar = progress and sys.stderr.isatty()
    if bar:
        callbacks.append(ProgressBar(leave=True))
    steps = max(len(data.train) // recipe.data.batch_size, 1)
    return L.Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        num_nodes=options.nodes,
        strategy=options.strategy,
        precision=options.precision,
        max_epochs=options.epochs,
        gradient_clip_val=options.clip,
        accumulate_grad_batches=options.accumulate,
        sync_batchnorm=options.sync_batchnorm,
        logger=[CsvLog(run.log_file, done or None), TensorBoardLogger(run.folder, name="", version="tensorboard")],
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_progress_bar=bar,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        log_every_n_steps=min(10, steps),
        default_root_dir=run.folder,
    )


def _batches_done(checkpoint: Path | None) -> int:
    if checkpoint is None:
        return 0
    return int(torch.load(checkpoint, map_location="cpu", weights_only=True)["batches_done"])


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Lightning's advice that does not fit here."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for advice in ADVICE:
                warnings.filterwarnings("ignore", advice)
            yield
    finally:
        logger.setLevel(level)
