"""Interrupted training: signals, damaged and missing files, full disks; every run continues to the same end."""

from __future__ import annotations

import csv
import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted import at_batch, saved_part_of_a_run, small

from bayesify.cli import main
from bayesify.lab.runs import Run, RunError
from bayesify.lab.training import BayesianModule, Checkpoint, Interrupted, train
from bayesify.lab.training.processes import MAIN_VARIABLE
from benchmarks import faults, faults_page

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An uninterrupted run of the small recipe."""
    return train(small(), tmp_path_factory.mktemp("whole") / "run", progress=False)


def losses(run: Run) -> list[tuple[str, str]]:
    with run.log_file.open(newline="") as file:
        return [(row["step"], row["loss"]) for row in csv.DictReader(file) if row["loss"]]


def batches_done(folder: Path) -> int:
    return int(torch.load(folder / "checkpoint.ckpt", weights_only=True)["batches_done"])


# Signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("batch", [6, 14, 15], ids=["inside an epoch", "last of an epoch", "first of an epoch"])
def test_sigterm_checkpoints_as_ctrl_c_does(
    number: signal.Signals, batch: int, whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    at_batch(batch, lambda: signal.raise_signal(number), monkeypatch)
    with pytest.raises(Interrupted, match=rf"stopped after {batch + 1} batches; continue with.*--resume") as caught:
        train(small(), tmp_path / "run", progress=False)
    assert caught.value.signal_number == number and batches_done(tmp_path / "run") == batch + 1
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    resumed = train(small(), tmp_path / "run", resume=True, progress=False)
    assert resumed.model_file.read_bytes() == whole.model_file.read_bytes()
    assert losses(resumed) == losses(whole) and resumed.metrics == whole.metrics


def test_a_process_killed_right_after_a_checkpoint_was_saved_loses_no_row_of_the_log(
    whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning would call its loggers only after the checkpoint of a step was saved."""

    class Killed(BaseException):
        pass

    save = Checkpoint._save

    def save_and_die(self: Checkpoint, trainer: Any) -> None:
        save(self, trainer)
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Checkpoint, "_save", save_and_die)
        train(small("training.checkpoint_steps=10"), tmp_path / "run", progress=False)
    assert batches_done(tmp_path / "run") == 10  # the step that the log has a row of
    resumed = train(small("training.checkpoint_steps=10"), tmp_path / "run", resume=True, progress=False)
    assert resumed.log_file.read_bytes() == whole.log_file.read_bytes()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_command_ends_with_the_code_of_the_signal_and_says_how_to_continue(
    number: signal.Signals,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small().write(tmp_path / "recipe.yaml")
    at_batch(3, lambda: signal.raise_signal(number), monkeypatch)
    assert main(["train", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "run"), "--quiet"]) == code
    message = " ".join(capsys.readouterr().err.split())
    assert "stopped after 4 batches" in message and "--resume" in message


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_outside_of_training_ends_the_command_with_a_message(
    number: signal.Signals,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The model is saved by then; a traceback would look like a bug."""
    monkeypatch.setattr("bayesify.lab.training.train_recipe.evaluate", lambda run: signal.raise_signal(number))
    small("training.epochs=1").write(tmp_path / "recipe.yaml")
    assert main(["train", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "run"), "--quiet"]) == code
    assert "stopped" in capsys.readouterr().err and (tmp_path / "run" / "model.safetensors").exists()


def test_ctrl_c_while_the_command_starts_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(app: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("typer.main.get_command", interrupted)
    assert main(["schema"]) == 130


def test_ctrl_c_before_the_first_batch_is_no_error_and_does_not_switch_ctrl_c_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def early(self: BayesianModule) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(BayesianModule, "on_fit_start", early)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(small(), tmp_path / "run", progress=False)
    assert signal.getsignal(signal.SIGINT) is handler
    small().write(tmp_path / "recipe.yaml")
    assert main(["train", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "other"), "--quiet"]) == 130


def test_sigterm_that_is_sent_twice_still_saves_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout` sends it to the process and then to its group."""

    def twice() -> None:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)

    at_batch(6, twice, monkeypatch)
    with pytest.raises(Interrupted, match="stopped after 7 batches"):
        train(small(), tmp_path / "run", progress=False)
    assert batches_done(tmp_path / "run") == 7


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    at_batch(6, twice, monkeypatch)
    with pytest.raises(Interrupted, match="stopped at once; continue with") as caught:
        train(small(), tmp_path / "run", progress=False)
    assert caught.value.signal_number == signal.SIGINT and not (tmp_path / "run" / "checkpoint.ckpt").exists()


def test_a_signal_after_the_last_batch_is_not_swallowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(self: BayesianModule) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(BayesianModule, "on_train_end", late, raising=False)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        train(small(), tmp_path / "run", progress=False)
    assert batches_done(tmp_path / "run") == 30


def test_an_accumulated_step_is_finished_before_training_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the log has every step once, though steps are fewer than batches."""
    recipe = small("training.accumulate=4", "training.epochs=6")
    expected = train(recipe, tmp_path / "whole", progress=False)

    def crash() -> None:
        raise MemoryError

    at_batch(16, lambda: signal.raise_signal(signal.SIGTERM), monkeypatch)
    with pytest.raises(Interrupted, match="stopped after 19 batches"):
        train(recipe, tmp_path / "cut", progress=False)
    at_batch(70, crash, monkeypatch)
    with pytest.raises(MemoryError):
        train(recipe, tmp_path / "cut", resume=True, progress=False)
    resumed = train(recipe, tmp_path / "cut", resume=True, progress=False)
    assert resumed.model_file.read_bytes() == expected.model_file.read_bytes() and losses(resumed) == losses(expected)


def test_sigterm_to_one_of_two_processes_stops_both_after_the_same_batch(tmp_path: Path) -> None:
    """Started by the command line; the signal goes to the second process only."""
    recipe = small("training.devices=2", "training.epochs=400", "data.batch_size=16")
    recipe.write(tmp_path / "recipe.yaml")
    command = [sys.executable, "-m", "bayesify", "train", "recipe.yaml", "--out", "run", "--quiet"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        while process.poll() is None and not (tmp_path / "run" / "checkpoint.ckpt").exists():
            time.sleep(0.05)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGTERM)
        message = process.communicate(timeout=60)[1]
        assert process.returncode == 143, message
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert message.count("stopped after") == 1 and "--resume run" in " ".join(message.split())
    assert f"stopped after {batches_done(tmp_path / 'run')} batches" in " ".join(message.split())


def test_a_second_process_ends_when_the_main_one_was_killed_before_they_met() -> None:
    """The process that started it is no longer its parent."""
    code = (
        "import time; from bayesify.lab.training.processes import end_with_main_process as end; end(); time.sleep(60)"
    )
    environment = {**os.environ, MAIN_VARIABLE: str(os.getppid())}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        assert process.wait(timeout=30) == 1
    finally:
        process.kill()


# Files that are missing, damaged or of another run


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "step,epoch\nfirst,0\n"], ids=["other columns", "no steps"])
def test_a_log_of_something_else_is_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved_part_of_a_run(tmp_path, monkeypatch)
    (folder / "metrics.csv").write_text(text)
    with pytest.raises(RunError, match=r"metrics\.csv: not the log of this run.*Delete it"):
        train(small(), folder, resume=True, progress=False)


def test_a_log_without_its_last_newline_loses_that_line_only(
    whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that ends while it writes `12,…` may leave `1`, which is another step."""
    folder = saved_part_of_a_run(tmp_path, monkeypatch)
    with (folder / "metrics.csv").open("a") as file:
        file.write("1")
    assert losses(train(small(), folder, resume=True, progress=False)) == losses(whole)


def test_a_log_that_was_deleted_begins_again_with_its_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved_part_of_a_run(tmp_path, monkeypatch)
    (folder / "metrics.csv").unlink()
    assert losses(train(small(), folder, resume=True, progress=False))


def test_training_does_not_continue_from_the_checkpoint_of_a_deleted_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved_part_of_a_run(tmp_path, monkeypatch)
    (folder / "recipe.yaml").unlink()
    with pytest.raises(RunError, match=r"holds a part of a run without its recipe\.yaml; delete it, or choose another"):
        train(small("training.lr=0.5"), folder, progress=False)


def test_an_ensemble_resumes_whose_member_was_being_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = small("method={name: deep_ensemble, members: 2}")
    expected = train(recipe, tmp_path / "whole", progress=False)
    at_batch(3, lambda: signal.raise_signal(signal.SIGTERM), monkeypatch)
    with pytest.raises(Interrupted):
        train(recipe, tmp_path / "cut", progress=False)
    (tmp_path / "cut" / "member-1").mkdir()  # killed before its recipe was written
    resumed = train(recipe, tmp_path / "cut", resume=True, progress=False)
    assert resumed.model_file.read_bytes() == expected.model_file.read_bytes()


def test_two_processes_that_create_the_same_run_do_not_mix_their_recipes(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with Run(tmp_path / "run").lock(), pytest.raises(RunError, match="another process is training this run"):
        train(small(), tmp_path / "run", progress=False)
    assert not (tmp_path / "run" / "recipe.yaml").exists()


# Disks


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EROFS, errno.EIO], ids=errno.errorcode.get)
def test_a_checkpoint_that_cannot_be_written_is_named_and_the_run_resumes(
    number: int, whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, calls = os.fsync, [0]

    def full(descriptor: int) -> None:
        is_checkpoint = os.readlink(f"/proc/self/fd/{descriptor}").endswith("checkpoint.part")
        calls[0] += is_checkpoint
        if is_checkpoint and calls[0] == 3:
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    recipe = small("training.checkpoint_steps=4")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RunError, match=rf"checkpoint\.part: {os.strerror(number)}.*--resume") as caught:
            train(recipe, tmp_path / "run", progress=False)
    assert isinstance(caught.value.__cause__, OSError)
    assert batches_done(tmp_path / "run") == 8 and not list((tmp_path / "run").glob("*.part"))
    resumed = train(recipe, tmp_path / "run", resume=True, progress=False)
    assert resumed.model_file.read_bytes() == whole.model_file.read_bytes()


def test_checkpoints_do_not_pass_through_the_folder_for_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is often small, and in memory."""

    def full(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    at_batch(6, lambda: monkeypatch.setattr(tempfile, "mkstemp", full), monkeypatch)
    at_batch(7, lambda: signal.raise_signal(signal.SIGTERM), monkeypatch)
    with pytest.raises(Interrupted, match="stopped after 8 batches"):
        train(small(), tmp_path / "run", progress=False)


# The script that interrupts training at random, and the page that shows its results


def test_the_script_finds_runs_that_differ(whole: Run, tmp_path: Path) -> None:
    assert faults.differences(whole.folder, whole.folder) == []
    other = train(small("seed=1"), tmp_path / "other", progress=False)
    assert faults.differences(other.folder, whole.folder) == ["model.safetensors", "metrics.json", "metrics.csv"]


def test_the_page_about_reliability_has_the_figures_of_the_script() -> None:
    results = json.loads(faults_page.RESULTS.read_text())
    text = faults_page.PAGE.read_text(encoding="utf-8")
    start, end = (text.index(mark) for mark in faults_page.MARKS)
    assert text[start + len(faults_page.MARKS[0]) + 1 : end] == faults_page.table(results)
    assert faults_page.RESULTS.with_suffix(".md").read_text(encoding="utf-8") == faults_page.page(results)
    assert results["kinds"] == list(faults.KINDS) and {row["kind"] for row in results["trials"]} == set(faults.KINDS)
    assert sum(row["interruptions"] for row in results["trials"]) >= 500
    assert {row["outcome"] for row in results["trials"]} == {"same"}
