"""Loggers by name, and callbacks of the user: what they get, what is refused, and that a resumed run continues."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.loggers import CSVLogger

from bayesify import lab
from bayesify.lab.recipes import RecipeError
from bayesify.lab.run_files import RunError
from bayesify.lab.runs import Run
from bayesify.lab.training import lightning_trainer, loggers
from bayesify.lab.training.callbacks import Interrupted

GIVEN: dict[str, Any] = {
    "data": {"name": "digits", "limit": 60, "batch_size": 20},
    "model": {"name": "mlp", "options": {"hidden": [8]}},
    "method": "BatchEnsemble",
    "training": {"epochs": 2, "validation_samples": 4},
    "evaluation": {"samples": 4},
}
STEPS = 6


def recipe(*changes: str) -> lab.Recipe:
    return lab.Recipe.of(GIVEN, changes)


def train(folder: Path, *changes: str, **options: Any) -> Run:
    return lab.train(recipe(*changes), folder, progress=False, evaluated=False, **options)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The trackers write to files only."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()  # it reads the environment once


# Loggers.


def test_csv_is_the_runs_own_log_alone(tmp_path: Path) -> None:
    run = train(tmp_path / "run", "training.logger=csv")
    assert len(run.log_file.read_text().splitlines()) > 2
    assert not (run.folder / "tensorboard").exists()


def test_tensorboard_is_the_default_and_was_before_there_was_a_choice(tmp_path: Path) -> None:
    run = train(tmp_path / "run")
    assert run.recipe.training.logger == "tensorboard" and list((run.folder / "tensorboard").glob("events.*"))


def test_an_unknown_logger_names_the_known_ones() -> None:
    with pytest.raises(RecipeError, match=r"training\.logger: must be 'csv', 'tensorboard', 'wandb' or 'mlflow'"):
        recipe("training.logger=weights_and_biases")


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(RecipeError, match=rf"training\.logger='{name}' needs the package {name} .*pip install {name}$"):
        train(tmp_path / "run", f"training.logger={name}")
    assert not (tmp_path / "run").exists()


def test_a_logger_gets_every_term_of_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightning_trainer, "make_logger", lambda recipe, run: CSVLogger(run.folder, "", "mine"))
    train(tmp_path / "run", "method=Rank1")
    head = (tmp_path / "run" / "mine" / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"loss", "log_likelihood", "kl", "beta", "lr", "posterior_lr", "val_nll", "val_accuracy"} <= set(head)


def test_a_tracker_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(CSVLogger):
        def log_hyperparams(self, params: Any = None) -> None:
            raise OSError("nobody answers")

    monkeypatch.setattr(loggers, "require_logger", lambda name: None)
    monkeypatch.setattr("bayesify.lab.training.check_recipe.require_logger", lambda name: None)
    monkeypatch.setattr(loggers, "_mlflow_logger", lambda run: Broken(run.folder))
    with pytest.raises(RecipeError, match=r"training\.logger='mlflow': nobody answers"):
        train(tmp_path / "run", "training.logger=mlflow")


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
@pytest.mark.usefixtures("offline")
class TestWandb:
    def test_a_run_is_logged_and_can_be_opened(self, tmp_path: Path) -> None:
        run = train(tmp_path / "run", "training.logger=wandb", "method={name: deep_ensemble, members: 2}")
        ids = [Run(run.folder / f"member-{i}").facts[loggers.TRACKED] for i in range(2)]
        assert len(set(ids)) == 2
        for name in ids:
            assert list((tmp_path / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb"))
        assert Run.open(run.folder).load().model is not None  # which refuses symbolic links

    def test_without_an_account_it_asks_for_one(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WANDB_MODE", "online")
        sys.modules["wandb"].teardown() if "wandb" in sys.modules else None
        with pytest.raises(RecipeError, match=r"run `wandb login`, or set WANDB_MODE=offline"):
            train(tmp_path / "run", "training.logger=wandb")
        assert not (tmp_path / "run").exists()


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed")
@pytest.mark.usefixtures("offline")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of mlflow's own packages
def test_mlflow_continues_a_run_that_is_resumed(tmp_path: Path) -> None:
    import mlflow

    changes = ("training.logger=mlflow", "method=Rank1")
    with pytest.raises(Interrupted):
        train(tmp_path / "run", *changes, callbacks=[Stop(at=2)])
    first = Run(tmp_path / "run").facts[loggers.TRACKED]
    run = train(tmp_path / "run", *changes, resume=True)
    assert run.facts[loggers.TRACKED] == first
    client = mlflow.MlflowClient(f"sqlite:///{run.folder / 'mlflow.db'}")
    found = client.get_run(first)
    assert found.data.params["method/name"] == "Rank1" and found.info.status == "FINISHED"
    assert {"loss", "kl", "val_nll"} <= set(found.data.metrics)
    assert len(client.get_metric_history(first, "val_nll")) == 2


# Callbacks.


class Stop(L.Callback):
    """Asks for an interruption after some batches."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        if module.batches_done == self.at:
            signal.raise_signal(signal.SIGTERM)


class Count(L.Callback):
    """Counts steps, also those before a resume."""

    def __init__(self) -> None:
        self.steps = self.fits = 0

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.fits += 1

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]


def test_a_callback_sees_every_step(tmp_path: Path) -> None:
    count = Count()
    train(tmp_path / "run", callbacks=[count])
    assert (count.steps, count.fits) == (STEPS, 1)


def test_a_callback_sees_every_member_of_an_ensemble(tmp_path: Path) -> None:
    count = Count()
    train(tmp_path / "run", "method={name: deep_ensemble, members: 2}", callbacks=[count])
    assert (count.steps, count.fits) == (2 * STEPS, 2)


def test_a_callback_has_its_state_again_after_a_resume(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train(tmp_path / "run", callbacks=[Count(), Stop(at=4)])
    count = Count()
    train(tmp_path / "run", resume=True, callbacks=[count])
    assert count.steps == STEPS


def test_a_callback_can_end_training_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    class Enough(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            trainer.should_stop = True

    run = train(tmp_path / "run", callbacks=[Enough()])
    assert {row.split(",")[1] for row in run.log_file.read_text().splitlines()[1:]} == {"0"}
    run.model_file.unlink()  # as if it had been stopped before the model was written
    run.note(status="started")
    again = train(tmp_path / "run", resume=True, callbacks=[Enough()])
    assert again.model_file.is_file()


@pytest.mark.parametrize(("wrong", "found"), [(Count, "the class Count"), (print, "a builtin_function_or_method")])
def test_what_is_no_callback_is_refused(tmp_path: Path, wrong: Any, found: str) -> None:
    with pytest.raises(RunError, match=f"expected objects of lightning.Callback, got {found}"):
        train(tmp_path / "run", callbacks=[wrong])
    assert not (tmp_path / "run").exists()
