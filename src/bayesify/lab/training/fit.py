"""From a recipe to a trained, evaluated model in a run's folder."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, RichProgressBar
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
from bayesify.lab.training.callbacks import Checkpoint, CsvLog
from bayesify.lab.training.ensemble import joined
from bayesify.lab.training.module import BayesianModule
from bayesify.lab.training.strange import strange_inputs
from bayesify.likelihood import Likelihood

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
    run = _run(recipe, Path(folder), resume)
    if run.facts["status"] == "finished":
        return run
    began = time.perf_counter()
    spent = float(run.facts.get("seconds", 0.0))
    data = load_data(recipe)
    torch.manual_seed(mixed(recipe.seed, 0))
    if isinstance(recipe.method, DeepPart):
        network, likelihood, first = _members(recipe, recipe.method.members, run, data, progress)
    else:
        network, likelihood, first = fit(recipe, run, data, progress)
    if first:
        run.save(network, likelihood, data)
        run.note(rows=len(data.train), seconds=spent + time.perf_counter() - began)
        evaluate(run)
        run.note(status="finished")
    return run


def fit(recipe: Recipe, run: Run, data: Data, progress: bool) -> tuple[nn.Module, Likelihood, bool]:
    """The trained network and likelihood, and whether this process is the first of all ranks."""
    network = bayesian_network(recipe, data)
    likelihood = make_likelihood(recipe, data.targets)
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
    return network.cpu().eval(), likelihood.cpu(), trainer.is_global_zero


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


def _members(recipe: Recipe, members: int, run: Run, data: Data, progress: bool) -> tuple[nn.Module, Likelihood, bool]:
    """Train plain networks one after another, each in a folder of its own, and join them into one Ensemble."""
    trained = []
    first = True
    for member in range(members):
        plain = {**recipe.plain(), "method": {"name": "none"}, "seed": recipe.seed + 1000 * member}
        own = Recipe.of(plain)
        sub = _run(own, run.folder / f"member-{member}", resume=(run.folder / f"member-{member}").exists())
        if sub.facts["status"] == "finished":
            found = sub.load()
            trained.append((found.model, found.likelihood))
            continue
        torch.manual_seed(mixed(own.seed, 0))
        network, likelihood, first = fit(own, sub, data, progress)
        trained.append((network, likelihood))
        if first:
            sub.save(network, likelihood, data)
            sub.note(status="finished")
    return joined([network for network, _ in trained]), trained[0][1], first


def _run(recipe: Recipe, folder: Path, resume: bool) -> Run:
    """The run to train: a new one, the one to resume, or on other ranks the one that the first has made."""
    if not resume and _is_first():
        return Run.create(folder, recipe)
    run = Run.open(folder) if _is_first() else _when_there(folder)
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
        callbacks.append(RichProgressBar(leave=True))
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
