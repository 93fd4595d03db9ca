"""Checkpoints that are damaged, edited or of another run are refused when training is resumed."""

from __future__ import annotations

import os
import pickle
import resource
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted import saved_part_of_a_run, small

from bayesify.lab.runs import Run, RunError
from bayesify.lab.training import train


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An uninterrupted run of the small recipe."""
    return train(small(), tmp_path_factory.mktemp("whole") / "run", progress=False)


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was interrupted after 7 batches."""
    with pytest.MonkeyPatch.context() as patch:
        return saved_part_of_a_run(tmp_path_factory.mktemp("cut"), patch)


@pytest.fixture
def part_of_a_run(cut: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return shutil.copytree(cut, tmp_path / "run")


class Payload:
    """Code that a pickle would run."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, ("executed",)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def one_bit(path: Path) -> None:
    """Of a weight, which would train on from there without a word."""
    saved = torch.load(path, weights_only=True)
    weight = next(tensor for name, tensor in saved["state_dict"].items() if name.endswith("weight"))
    content = bytearray(path.read_bytes())
    content[content.index(weight.numpy().tobytes())] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def code(path: Path) -> None:
    path.write_bytes(pickle.dumps(Payload()))


def another_object(path: Path) -> None:
    torch.save([1, 2], path)


def compressed(path: Path) -> None:
    """As a bomb would be, whose few bytes become many."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)


def hungry(path: Path) -> None:
    """Asks for 20 GB of memory in a few bytes, by the one function of Python that torch allows."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\x00\xc8\x17\xa8\x04\x85R.")
        archive.writestr("archive/version", b"3\n")
        archive.writestr("archive/byteorder", b"little")


def stack_underflow(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02\x85R.")
        archive.writestr("archive/version", b"3\n")


REFUSED = r"checkpoint\.ckpt: not a checkpoint of this run: .*delete it to train from"


@pytest.mark.parametrize(
    "damage",
    [truncated, one_bit, empty, code, another_object, compressed, hungry, stack_underflow],
    ids=lambda damage: damage.__name__,
)
def test_a_checkpoint_that_is_damaged_is_refused(
    damage: Callable[[Path], None], part_of_a_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(part_of_a_run / "checkpoint.ckpt")
    monkeypatch.chdir(tmp_path)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RunError, match=REFUSED):
        train(small(), part_of_a_run, resume=True, progress=False)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most < 300_000  # kB
    assert not (tmp_path / "executed").exists()


def at(*keys: Any) -> Callable[[Any], Callable[[dict[str, Any]], None]]:
    """Sets an entry at a path of keys."""

    def setting(value: Any) -> Callable[[dict[str, Any]], None]:
        def change(saved: Any) -> None:
            for key in keys[:-1]:
                saved = saved[key]
            saved[keys[-1]] = value(saved[keys[-1]]) if callable(value) else value

        return change

    return setting


def without(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda saved: saved.pop(key)


WEIGHT = "network.layers.linear1.weight"
FIT = ("loops", "fit_loop")
STEPS = (*FIT, "epoch_loop.automatic_optimization.optim_progress", "optimizer", "step", "total", "completed")
KEYS = ("batches_done", "global_step", "epoch", "stopped", "state_dict", "loops", "callbacks", "optimizer_states")
EDITS: dict[str, Callable[[dict[str, Any]], None]] = {
    **{f"no {key}": without(key) for key in (*KEYS, "lr_schedulers", "pytorch-lightning_version")},
    **{f"{key} 5": at(key)("5") for key in (*KEYS, "lr_schedulers")},
    "another recipe": at("recipe_hash")("0" * 64),
    "shape": at("state_dict", WEIGHT)(torch.zeros(3, 5)),
    "integers": at("state_dict", WEIGHT)(lambda weight: weight.long()),
    "other precision": at("state_dict", WEIGHT)(lambda weight: weight.double()),
    "NaN": at("state_dict", WEIGHT)(lambda weight: weight * float("nan")),
    "no tensor": at("state_dict", WEIGHT)("weight"),
    "meta tensor": at("state_dict", WEIGHT)(lambda weight: weight.to("meta")),
    "one weight more": at("state_dict")(lambda state: {**state, "more": torch.zeros(1)}),
    "too many batches": at("batches_done")(10**12),
    "all batches": at("batches_done")(30),
    "no batches": at("batches_done")(0),
    "negative batches": at("batches_done")(-7),
    "true batches": at("batches_done")(True),
    "other steps": at("global_step")(6),
    "other epoch": at("epoch")(1),
    "stopped": at("stopped")(True),
    "no optimizer": at("optimizer_states")([]),
    "two optimizers": at("optimizer_states")(lambda states: states * 2),
    "empty optimizer": at("optimizer_states")([{}]),
    "optimizer without state": at("optimizer_states", 0, "state")({}),
    "optimizer of integers": at("optimizer_states", 0, "state", 0)({"momentum_buffer": torch.zeros(8, 64).long()}),
    "optimizer of other shapes": at("optimizer_states", 0, "state", 0)({"momentum_buffer": torch.zeros(2)}),
    "optimizer of another parameter": at("optimizer_states", 0, "state", 99)({}),
    "no groups": at("optimizer_states", 0, "param_groups")([]),
    "other groups": at("optimizer_states", 0, "param_groups", 0, "params")([0, 1, 2, 99]),
    "other weight decay": at("optimizer_states", 0, "param_groups", 0, "weight_decay")(0.5),
    "no scheduler": at("lr_schedulers")([]),
    "empty scheduler": at("lr_schedulers")([{}]),
    "scheduler of other rates": at("lr_schedulers", 0, "base_lrs")([9.0, 9.0]),
    "scheduler of other steps": at("lr_schedulers", 0, "last_epoch")(3),
    "scheduler with an optimizer": at("lr_schedulers", 0, "optimizer")(5),
    "empty loops": at("loops")({}),
    "no training loop": at(*FIT)(3),
    "other epochs in the loop": at(*FIT, "epoch_progress", "current", "processed")(2),
    "other batches in the loop": at(*FIT, "epoch_loop.batch_progress", "current", "ready")(15),
    "other steps in the loop": at(*STEPS)(30),
    "a number for validation": at(*FIT, "epoch_loop.val_loop.batch_progress")(5),
    "callbacks of numbers": at("callbacks")({"EarlyStopping": 5}),
    "strange version": at("pytorch-lightning_version")("<evil>"),
}


@pytest.mark.parametrize("change", EDITS.values(), ids=EDITS.keys())
def test_a_checkpoint_that_was_edited_is_refused(change: Callable[[dict[str, Any]], None], part_of_a_run: Path) -> None:
    path = part_of_a_run / "checkpoint.ckpt"
    saved = torch.load(path, weights_only=True)
    change(saved)
    torch.save(saved, path)
    with pytest.raises(RunError, match=REFUSED):
        train(small(), part_of_a_run, resume=True, progress=False)


def test_a_checkpoint_of_another_run_is_refused(
    part_of_a_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same network, with another seed."""
    other = saved_part_of_a_run(tmp_path / "other", monkeypatch, "seed=1")
    shutil.copy(other / "checkpoint.ckpt", part_of_a_run / "checkpoint.ckpt")
    with pytest.raises(RunError, match=r"it was written for another recipe\.yaml"):
        train(small(), part_of_a_run, resume=True, progress=False)


def test_a_checkpoint_of_an_earlier_version_without_the_hash_of_its_recipe_resumes(
    part_of_a_run: Path, whole: Run
) -> None:
    path = part_of_a_run / "checkpoint.ckpt"
    saved = torch.load(path, weights_only=True)
    del saved["recipe_hash"]
    torch.save(saved, path)
    resumed = train(small(), part_of_a_run, resume=True, progress=False)
    assert resumed.model_file.read_bytes() == whole.model_file.read_bytes()


@pytest.mark.parametrize(
    "changes",
    [
        ("training.optimizer=adam", "training.lr=0.01"),
        ("training.optimizer=sgd", "training.momentum=0", "training.lr=0.01"),
        ("training.precision=64-true",),
        ("training.patience=3", "training.accumulate=2"),
        ("method={name: swag}",),
        ("method={name: MeanField}", "training.freeze_base=true"),
    ],
    ids=lambda changes: changes[0],
)
def test_a_sound_checkpoint_resumes(changes: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved_part_of_a_run(tmp_path, monkeypatch, *changes)
    expected = train(small(*changes), tmp_path / "whole", progress=False)
    resumed = train(small(*changes), folder, resume=True, progress=False)
    assert resumed.model_file.read_bytes() == expected.model_file.read_bytes()
