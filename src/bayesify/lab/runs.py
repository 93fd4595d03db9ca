"""A run's folder: the resolved recipe, versions, logs, the checkpoint, the model and its metrics."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

import bayesify as by
from bayesify.errors import CheckpointError
from bayesify.files.checkpoint import require_fit
from bayesify.lab.data import Data, DataError, inputs_from_dict, targets_from_dict
from bayesify.lab.from_recipe import build_network as build_network
from bayesify.lab.from_recipe import expand_path as expand_path
from bayesify.lab.from_recipe import load_data as load_data
from bayesify.lab.from_recipe import make_likelihood as make_likelihood
from bayesify.lab.from_recipe import number_of_outputs as number_of_outputs
from bayesify.lab.from_recipe import prepared_for_method as prepared_for_method
from bayesify.lab.from_recipe import with_precision as with_precision
from bayesify.lab.models import load_weights
from bayesify.lab.models.weights import require_same_shapes
from bayesify.lab.recipes import Recipe
from bayesify.lab.run_files import RunError as RunError
from bayesify.lab.run_files import read_facts, read_metrics, read_preprocessing
from bayesify.lab.run_files import read_json as read_json
from bayesify.lab.run_files import write_json as write_json
from bayesify.lab.trained import Trained
from bayesify.layers import bayesian_layers
from bayesify.prediction.likelihood import Likelihood
from bayesify.tensor_files import write_tensors

try:
    import fcntl
except ImportError:  # Windows has no such locks; there, two processes can train the same run at once
    fcntl = None  # type: ignore[assignment]

PARTS = {"data", "model", "method", "likelihood", "training", "evaluation", "seed"}
"""What the recipe in a run's folder always has."""
LEARNT = ("precision", "precision_factor", "temperature")
"""What `preprocessing.json` may have of the likelihood."""
PACKAGES = ("bayesify", "torch", "lightning", "torchmetrics", "numpy", "safetensors")


@dataclass(frozen=True, init=False)
class Run:
    """A run, known by its folder.

    `recipe.yaml` is the recipe with all defaults, `run.json` has versions, status and times, `metrics.csv` is the
    training log, `checkpoint.ckpt` the state of training, `model.safetensors`, `preprocessing.json` and
    `familiarity.safetensors` are what prediction needs, `metrics.json` is the evaluation.

    Args:
        folder: The run's folder. `Run.open` also checks that it holds a run.
        trust: A Python file of yours, if the run's network is a function of it. It runs when the model is loaded;
            without it, nothing in the folder is ever executed.
    """

    folder: Path
    trust: Path | None = field(default=None, compare=False, repr=False)

    def __init__(self, folder: str | Path, *, trust: str | Path | None = None) -> None:
        object.__setattr__(self, "folder", Path(folder))
        object.__setattr__(self, "trust", None if trust is None else Path(trust))

    @classmethod
    def create(cls, folder: str | Path, recipe: Recipe) -> Run:
        """Create a run in a folder that holds none yet."""
        cls.require_free(folder)
        run = cls(folder, trust=recipe.trust)
        run.folder.mkdir(parents=True, exist_ok=True)
        run.require_no_links()
        run.note(status="started", **environment())
        recipe.write(run.recipe_file)  # last, because a folder with a recipe counts as a run
        return run

    @classmethod
    def require_free(cls, folder: str | Path) -> None:
        """Raise if a folder holds a run, or a part of one that training would continue from."""
        run = cls(folder)
        if run.recipe_file.exists():
            raise RunError(f"{folder}: already holds a run; resume it with --resume, or choose another folder")
        if run.checkpoint_file.exists() or run.model_file.exists():
            raise RunError(
                f"{folder}: holds a part of a run without its recipe.yaml; delete it, or choose another folder"
            )

    @classmethod
    def open(cls, folder: str | Path, *, trust: str | Path | None = None) -> Run:
        """Open a run that exists.

        Args:
            folder: The run's folder.
            trust: A Python file of yours, if the run's network is a function of it. It runs when the model is loaded.

        Returns:
            The run.

        Raises:
            RunError: If the folder holds no run, or links to other places.
        """
        run = cls(folder, trust=trust)
        run._require_recipe()
        run.require_no_links()
        return run

    def _require_recipe(self) -> None:
        if not self.recipe_file.is_file():
            raise RunError(f"{self.folder}: not a run (it has no recipe.yaml); create one with `bayesify train`")

    def require_no_links(self) -> None:
        """Raise if there is a symbolic link in the folder or below, which could lead what is written elsewhere."""
        links = sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_symlink())
        if links:
            raise RunError(
                f"{self.folder}: {links[0]} is a symbolic link; a run's files must be in its folder: copy the file"
            )

    @property
    def recipe_file(self) -> Path:
        """The resolved recipe."""
        return self.folder / "recipe.yaml"

    @property
    def model_file(self) -> Path:
        """The trained model."""
        return self.folder / "model.safetensors"

    @property
    def familiarity_file(self) -> Path:
        """How familiar inputs are to the model; runs of earlier versions have none."""
        return self.folder / "familiarity.safetensors"

    def epoch_file(self, epoch: int) -> Path:
        """The model after an epoch, counted from 1, if `training.keep_epochs` kept it."""
        return self.folder / f"epoch-{epoch:04d}.safetensors"

    @property
    def kept_epochs(self) -> list[int]:
        """The epochs of which the model was kept."""
        numbers = (path.stem.removeprefix("epoch-") for path in self.folder.glob("epoch-*.safetensors"))
        return sorted(int(number) for number in numbers if number.isdecimal())

    @property
    def conformal_file(self) -> Path:
        """The calibrated sets or intervals; runs without calibration rows have none."""
        return self.folder / "conformal.json"

    @property
    def checkpoint_file(self) -> Path:
        """The state of training."""
        return self.folder / "checkpoint.ckpt"

    @property
    def log_file(self) -> Path:
        """The training log."""
        return self.folder / "metrics.csv"

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    @property
    def recipe(self) -> Recipe:
        """The recipe that was run."""
        recipe = Recipe.read(self.recipe_file, trust=self.trust)
        missing = PARTS - recipe.model_fields_set
        if missing:
            raise RunError(
                f"{self.recipe_file}: lacks {', '.join(sorted(missing))}; it is truncated: get the file again"
            )
        return recipe

    @property
    def facts(self) -> dict[str, Any]:
        """Versions, status and times."""
        return read_facts(self.folder / "run.json")

    @property
    def metrics(self) -> dict[str, Any]:
        """The evaluation: metrics by split."""
        return read_metrics(self.folder / "metrics.json")

    def note(self, **facts: Any) -> None:
        """Add facts to `run.json`."""
        known = self.facts if (self.folder / "run.json").exists() else {}
        write_json(self.folder / "run.json", {**known, **facts})

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes from training the run; the lock ends with the process, however that ends."""
        with (self.folder / ".hold").open("a") as file:
            if fcntl is not None:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise RunError(f"{self.folder}: another process is training this run; wait for it") from None
            yield

    def data(self) -> Data:
        """The data of the recipe, with the splits that the run was trained on."""
        return load_data(self.recipe)

    def save(self, model: nn.Module, likelihood: Likelihood, data: Data) -> None:
        """Save the model, and how its inputs are prepared."""
        description: dict[str, Any] = {"inputs": data.inputs.to_dict(), "targets": data.targets.to_dict()}
        if isinstance(likelihood, by.Gaussian):
            precision = float(likelihood.log_precision.detach().double().exp())
            per_input = {"precision": "input", "precision_factor": precision}
            description |= per_input if likelihood.per_input else {"precision": precision}
        if isinstance(likelihood, by.Categorical):
            description["temperature"] = likelihood.temperature
        write_json(self.folder / "preprocessing.json", description)
        for file in (self.familiarity_file, self.conformal_file):
            file.unlink(missing_ok=True)  # that of another model
        save_network(model, self.model_file)

    def load(self) -> Trained:
        """Load the trained model.

        Returns:
            The model with everything that prediction needs: `run.load().predict(inputs)`.

        Raises:
            RunError: If the folder holds no run, training has not finished, or a file is damaged.
        """
        self._require_recipe()
        if not self.model_file.is_file():
            raise RunError(
                f"{self.folder}: training has not finished; continue with `bayesify train --resume {self.folder}`"
            )
        description = read_preprocessing(self.folder / "preprocessing.json")
        try:
            inputs, targets = inputs_from_dict(description["inputs"]), targets_from_dict(description["targets"])
        except DataError as error:
            raise RunError(f"{self.folder / 'preprocessing.json'}: {error}") from error
        recipe = _with_chosen_noise(self.recipe, description)
        saved = {name: description[name] for name in LEARNT if name in description}
        likelihood = make_likelihood(recipe, targets, **saved)
        is_bayesian = _is_bayesian(self.model_file)
        if ":" not in recipe.model.name:  # its sizes are from files: nothing is allocated before they are compared
            with torch.device("meta"):
                outline = build_network(recipe, inputs, targets, weights=False)
            require_fit(outline, self.model_file) if is_bayesian else require_same_shapes(outline, self.model_file)
        network = _filled(build_network(recipe, inputs, targets, weights=False), self.model_file)
        device = device_of(recipe)
        known = self._familiarity(network)
        return Trained(network.eval().to(device), likelihood.to(device), inputs, targets, recipe, known)

    def predict(
        self,
        data: Any,
        samples: int | by.Adaptive | None = None,
        *,
        seed: int = 0,
        batch_size: int | None = None,
    ) -> by.Prediction:
        """Predict new inputs. The model is loaded at each call: for many, keep `run.load()` and call its `predict`.

        Args:
            data: A path or several, a DataFrame, a tensor or an array: whatever `run.load().predict` takes.
            samples: The number of draws, or a `by.Adaptive` rule; the recipe's by default.
            seed: The seed of the draws.
            batch_size: Inputs per batch; by default the recipe's.

        Returns:
            The prediction, on the CPU.
        """
        return self.load().predict(data, samples, seed=seed, batch_size=batch_size)

    def report(self, path: str | Path | None = None) -> Path:
        """Write a page about the run, as `lab.write_report` does.

        Args:
            path: The page; by default report.html in the run's folder.

        Returns:
            The page.
        """
        from bayesify.lab.report import write_report  # needs runs itself

        page = self.folder / "report.html" if path is None else Path(path)
        write_report([self], page)
        return page

    def load_epoch(self, epoch: int) -> Trained:
        """Load the model as it was after an epoch; its likelihood is that of the trained model.

        Args:
            epoch: One of `kept_epochs`.

        Returns:
            The model, without familiarity.

        Raises:
            RunError: If the epoch was not kept.
        """
        if epoch not in self.kept_epochs:
            raise RunError(f"{self.folder}: epoch {epoch} was not kept; there are {self.kept_epochs}. Set keep_epochs")
        final = self.load()
        network = build_network(final.recipe, final.inputs, final.targets, weights=False)
        network = _filled(network, self.epoch_file(epoch)).eval().to(device_of(final.recipe))
        return replace(final, model=network, familiarity=None)

    def _familiarity(self, network: nn.Module) -> by.Familiarity | None:
        """The familiarity, if the run has one; raises unless it can be that of the network."""
        file = self.familiarity_file
        if not file.exists():
            return None
        advice = f"get the file again, or remove the file and run `bayesify evaluate {self.folder}`"
        try:
            found = by.Familiarity.load(file)
        except CheckpointError as error:
            raise RunError(f"{error}; {advice}") from error
        if lost := set(found.layers) - dict(network.named_modules()).keys():
            raise RunError(f"{file}: it belongs to another network, as this one has no layer {min(lost)!r}; {advice}")
        return found


def save_network(network: nn.Module, path: Path) -> None:
    """Save a Bayesian or plain network."""
    if bayesian_layers(network):
        by.save(network, path)
    else:
        write_tensors({name: t.contiguous().clone() for name, t in network.state_dict().items()}, path)


def _filled(network: nn.Module, path: Path) -> nn.Module:
    """A plain network, converted as the saved one was, with its tensors."""
    if _is_bayesian(path):
        return by.load(network, path)
    load_weights(network, path)
    return network


def device_of(recipe: Recipe) -> torch.device:
    """The GPU if the recipe asks for one and there is one, else the CPU."""
    use_gpu = recipe.training.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    return torch.device("cuda" if use_gpu else "cpu")


def _with_chosen_noise(recipe: Recipe, description: dict[str, Any]) -> Recipe:
    """The recipe with the kind of noise that training chose, if it was left to it."""
    if recipe.likelihood.precision != "auto":
        return recipe
    return with_precision(recipe, "input" if description.get("precision") == "input" else "learned")


def _is_bayesian(path: Path) -> bool:
    try:
        with safe_open(path, "pt") as file:
            return "bayesify" in (file.metadata() or {})
    except (SafetensorError, OSError, ValueError) as error:
        raise RunError(f"{path}: not a complete model ({error}); train the run again, or get the file again") from error


def environment() -> dict[str, Any]:
    """The versions of packages and the machine."""
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
