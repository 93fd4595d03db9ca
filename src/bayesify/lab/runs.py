"""A run's folder: the resolved recipe, versions, logs, the checkpoint while it trains, the model and its metrics."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import bayesify as by
from bayesify.errors import BayesifyError
from bayesify.lab.data import Data, Inputs, Reals, Targets, inputs_from_dict, load, targets_from_dict
from bayesify.lab.models import build, load_weights
from bayesify.lab.recipes import Recipe
from bayesify.layers import bayesian_layers
from bayesify.likelihood import Likelihood

try:
    import fcntl
except ImportError:  # Windows has no such locks; there a person must not train one run twice at once
    fcntl = None  # type: ignore[assignment]

PACKAGES = ("bayesify", "torch", "lightning", "torchmetrics", "numpy", "safetensors")


class RunError(BayesifyError):
    """A run's folder that can't be used as asked."""


@dataclass(frozen=True)
class Run:
    """A run by its folder.

    `recipe.yaml` says everything that was asked for, `run.json` versions, status and times, `metrics.csv` the course
    of training, `checkpoint.ckpt` where it stands, `model.safetensors` and `preprocessing.json` what prediction needs,
    `metrics.json` how good it is.
    """

    folder: Path

    @classmethod
    def create(cls, folder: str | Path, recipe: Recipe) -> Run:
        """A new run in a folder that holds none yet."""
        cls.require_free(folder)
        run = cls(Path(folder))
        run.folder.mkdir(parents=True, exist_ok=True)
        run.note(status="started", **about())
        recipe.write(run.recipe_file)  # last: where there is a recipe there is a run
        return run

    @classmethod
    def require_free(cls, folder: str | Path) -> None:
        """Raise where a folder holds a run."""
        if cls(Path(folder)).recipe_file.exists():
            raise RunError(f"{folder}: holds a run already; resume it with --resume, or give another folder")

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """A run that exists."""
        run = cls(Path(folder))
        if not run.recipe_file.is_file():
            raise RunError(f"{folder}: no run there (no recipe.yaml); `bayesify train` makes one")
        return run

    @property
    def recipe_file(self) -> Path:
        """The resolved recipe."""
        return self.folder / "recipe.yaml"

    @property
    def model_file(self) -> Path:
        """The trained model."""
        return self.folder / "model.safetensors"

    @property
    def checkpoint_file(self) -> Path:
        """The state of training."""
        return self.folder / "checkpoint.ckpt"

    @property
    def log_file(self) -> Path:
        """The course of training."""
        return self.folder / "metrics.csv"

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    @property
    def recipe(self) -> Recipe:
        """The recipe as it was run."""
        return Recipe.read(self.recipe_file)

    @property
    def facts(self) -> dict[str, Any]:
        """Versions, status and times."""
        return read_json(self.folder / "run.json")

    @property
    def metrics(self) -> dict[str, Any]:
        """How good the model is, by split."""
        return read_json(self.folder / "metrics.json")

    def note(self, **facts: Any) -> None:
        """Add to the facts."""
        known = read_json(self.folder / "run.json") if (self.folder / "run.json").exists() else {}
        write_json(self.folder / "run.json", {**known, **facts})

    @contextmanager
    def held(self) -> Iterator[None]:
        """No other process trains the run meanwhile; the hold ends with the process, however that ends."""
        with (self.folder / ".hold").open("w") as file:
            if fcntl is not None:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise RunError(f"{self.folder}: another process is training this run; wait for it") from None
            yield

    def data(self) -> Data:
        """The data of the recipe, split as it was."""
        return load_data(self.recipe)

    def save(self, model: nn.Module, likelihood: Likelihood, data: Data) -> None:
        """The model and what turns raw inputs into its inputs."""
        if bayesian_layers(model):
            by.save(model, self.model_file)
        else:
            part = self.model_file.with_suffix(".part")
            save_file({name: t.contiguous().clone() for name, t in model.state_dict().items()}, part)
            os.replace(part, self.model_file)
        description: dict[str, Any] = {"inputs": data.inputs.to_dict(), "targets": data.targets.to_dict()}
        if isinstance(likelihood, by.Gaussian):
            description["precision"] = (
                "input" if likelihood.per_input else float(likelihood.log_precision.detach().exp())
            )
        if isinstance(likelihood, by.Categorical):
            description["temperature"] = likelihood.temperature
        write_json(self.folder / "preprocessing.json", description)

    def load(self) -> Trained:
        """The trained model with all that prediction needs."""
        if not self.model_file.is_file():
            raise RunError(f"{self.folder}: its training has not finished; continue it with `bayesify train --resume`")
        description = read_json(self.folder / "preprocessing.json")
        inputs, targets = inputs_from_dict(description["inputs"]), targets_from_dict(description["targets"])
        recipe = self.recipe
        likelihood = make_likelihood(recipe, targets, description.get("precision"), description.get("temperature", 1.0))
        network = build_network(recipe, inputs, targets, weights=False)
        if _is_bayesian(self.model_file):
            by.load(network, self.model_file)
        else:
            load_weights(network, self.model_file)
        device = device_of(recipe)
        return Trained(network.eval().to(device), likelihood.to(device), inputs, targets, recipe)


@dataclass(frozen=True)
class Trained:
    """A model with what its inputs and outputs mean."""

    model: nn.Module
    likelihood: Likelihood
    inputs: Inputs
    targets: Targets
    recipe: Recipe


def device_of(recipe: Recipe) -> torch.device:
    """Where the model was trained, if that is here."""
    graphics = recipe.training.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    return torch.device("cuda" if graphics else "cpu")


def load_data(recipe: Recipe) -> Data:
    """The data that a recipe names."""
    part = recipe.data
    shared = {"validation": part.validation, "test": part.test, "seed": recipe.seed, "limit": part.limit}
    path = None if part.path is None else expanded(part.path)
    return load(part.name, path=path, **shared, **part.options)  # type: ignore[arg-type]


def build_network(recipe: Recipe, inputs: Inputs, targets: Targets, *, weights: bool = True) -> nn.Module:
    """The plain network that a recipe names, fitted to the data, with its weights."""
    part = recipe.model
    pretrained = part.pretrained and weights
    outputs = outputs_of(recipe, targets)
    network = build(part.name, shape=inputs.shape, outputs=outputs, pretrained=pretrained, **part.options)
    if part.weights and weights:
        load_weights(network, expanded(part.weights), ignore=part.ignore)
    for p in network.parameters() if recipe.training.channels_last else ():
        if p.dim() == 4:  # `Module.to` would refuse what has another dimension, such as K copies of a kernel
            p.data = p.data.contiguous(memory_format=torch.channels_last)
    return network


def expanded(path: str) -> Path:
    """A recipe's path, with `~` and environment variables such as $BAYESIFY_DATA replaced."""
    return Path(os.path.expandvars(path)).expanduser()


def make_likelihood(
    recipe: Recipe, targets: Targets, precision: float | str | None = None, temperature: float = 1.0
) -> Likelihood:
    """What the network's outputs mean: by the targets, unless the recipe says."""
    real = isinstance(targets, Reals)
    name = recipe.likelihood.name
    if name == "auto":
        name = "gaussian" if real else "categorical"
    if real != (name == "gaussian"):
        raise RunError(
            f"likelihood.name={name!r} does not fit targets that are {'real numbers' if real else 'classes'}"
        )
    if name == "bernoulli":
        raise RunError("likelihood.name='bernoulli' needs yes-or-no targets; two classes are 'categorical' here")
    if real:
        return by.Gaussian(precision or recipe.likelihood.precision)  # type: ignore[arg-type]
    return by.Categorical(temperature=temperature)


def outputs_of(recipe: Recipe, targets: Targets) -> int:
    """The outputs that a network needs: a mean, or a mean and a log-precision, for each real target."""
    per_input = isinstance(targets, Reals) and recipe.likelihood.precision == "input"
    return targets.count * (2 if per_input else 1)


def _is_bayesian(path: Path) -> bool:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return "bayesify" in (file.metadata() or {})


def about() -> dict[str, Any]:
    """The versions and the machine, as far as a run depends on them."""
    return {
        "versions": {name: _version(name) for name in PACKAGES} | {"python": platform.python_version()},
        "platform": f"{sys.platform} {platform.machine()}",
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "began": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    if not path.is_file():
        raise RunError(f"{path}: no such file")
    try:
        values: dict[str, Any] = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise RunError(f"{path}: not a JSON file: {error}") from None
    return values


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(values, indent=1) + "\n")
    os.replace(part, path)
