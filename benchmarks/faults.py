"""Interrupt training at random points, resume it, and compare the final model with that of an uninterrupted run.

A trial trains a small recipe with `bayesify train`, interrupts it at a random time, repeats that with `--resume`, and
lets the last attempt finish. It succeeds if the model file has the same bytes as that of an uninterrupted run, and the
metrics and the losses in the log are the same. Training with one process is forked from a process that has
imported everything already, so that most interruptions hit training and not imports; training with two processes is
started as a user would.

Writes benchmarks/results/faults.json and faults.md and the table of docs/reliability.md after every trial; trials that
are in the file are not repeated. `--trials N` runs as many trials of each kind (default: see KINDS), `--only KIND`
one kind. The kind that needs root, for a file system of its own, is left out for other users.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import bayesify as by
from bayesify.cli import app, error_handling  # noqa: F401  # imported here, once
from bayesify.cli import main as bayesify_command
from bayesify.lab import evaluation, training  # noqa: F401
from bayesify.lab.recipes import Recipe
from benchmarks.faults_page import RESULTS, table, write

DEADLINE = 120.0
"""Seconds after which an attempt counts as hanging."""
CODES = {
    signal.SIGTERM: (143, -signal.SIGTERM),
    signal.SIGINT: (130, -signal.SIGINT),
    signal.SIGKILL: (-signal.SIGKILL,),
}

SMALL = {
    "data": {"limit": 120, "batch_size": 8},
    "model": {"name": "mlp", "options": {"hidden": [8]}},
    "training": {"epochs": 6, "checkpoint_steps": 4, "accelerator": "cpu"},
    "evaluation": {"samples": 2, "rows": 20},
}
RECIPES: dict[str, list[str]] = {
    "Rank1": ["method={name: Rank1, components: 2}"],
    "MeanField, accumulated steps": ["method=MeanField", "training.kl=gradient", "training.accumulate=2"],
    "ECMP, batch norm": ["method=ECMP", "model={name: cnn, options: {channels: [4, 4]}}", "data.batch_size=16"],
    "SWAG": ["method={name: swag, snapshots: 2, rank: 4, draws: 2, start: 0.3}"],
    "deep ensemble": ["method={name: deep_ensemble, members: 2}", "training.epochs=3"],
    "Rank1, stopped early": [
        *("method={name: Rank1, components: 2}", "training.patience=1", "training.epochs=12"),
        *("training.lr=1.0", "training.clip=1", "training.schedule=constant"),
    ],
}


@dataclass
class Process:
    """A process that trains, its exit code as in `subprocess`, and what it printed."""

    pid: int
    log: Path
    popen: subprocess.Popen[bytes] | None = None
    code: int | None = None

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        if self.code is None and self.popen is not None:
            self.code = self.popen.poll()
        elif self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self, seconds: float) -> int | None:
        """Wait for its end, at most some seconds."""
        end = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < end:
            time.sleep(0.005)
        return self.code

    def others_end(self, seconds: float = 60.0) -> bool:
        """Whether all processes that it started end soon after it; those that don't are killed."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                os.killpg(self.pid, 0)
            except ProcessLookupError:
                return True
            time.sleep(0.05)
        os.killpg(self.pid, signal.SIGKILL)
        return False

    @property
    def said(self) -> str:
        """What it printed."""
        return self.log.read_text(errors="replace").strip()


@dataclass
class Trial:
    """One trial: where it happens, and what was seen."""

    recipe: Path
    folder: Path
    reference: Path
    seconds: float
    random: random.Random
    processes: int = 1
    limit: int | None = None
    attempts: int = 0
    seen: dict[str, Any] = field(default_factory=lambda: {"interruptions": 0, "at": [], "problems": []})

    def start(self) -> Process:
        """Start training, or resume it if the folder holds a run."""
        resume = (self.folder / "recipe.yaml").exists()
        words = ["--resume", str(self.folder)] if resume else [str(self.recipe), "--out", str(self.folder)]
        self.attempts += 1
        log = self.recipe.parent / f"log-{self.attempts}.txt"
        log.write_text("")
        if self.processes > 1:
            command = [sys.executable, "-m", "bayesify", "train", *words, "--quiet"]
            with log.open("wb") as out:
                popen = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
            return Process(popen.pid, log, popen)
        signal.pthread_sigmask(signal.SIG_BLOCK, CODES)
        pid = os.fork()
        if pid == 0:
            self._train(["train", *words, "--quiet"], log)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, CODES)
        return Process(pid, log)

    def _train(self, words: list[str], log: Path) -> None:
        """What the forked process does; it never returns."""
        code = 1
        try:
            os.setsid()
            out = os.open(log, os.O_WRONLY | os.O_APPEND)
            os.dup2(out, 1)
            os.dup2(out, 2)
            if self.limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, resource.RLIM_INFINITY))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, CODES)
            code = bayesify_command(words)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def wait_at_random(self, process: Process) -> None:
        """Wait up to the time that training takes, or half of the time for less after the first checkpoint.

        Two processes spend most of their time on imports, one on the evaluation.
        """
        if self.random.random() < 0.5:
            process.wait(self.random.uniform(0, self.seconds))
            return
        while process.poll() is None and self.stage() in ("before the run exists", "before the first checkpoint"):
            time.sleep(0.005)
        process.wait(self.random.uniform(0, 0.4 if self.processes == 1 else 1.5))

    def stage(self) -> str:
        """How far training has got, by the files that are there."""
        if not (self.folder / "recipe.yaml").exists():
            return "before the run exists"
        if not any(self.folder.rglob("checkpoint.ckpt")):
            return "before the first checkpoint"
        if not (self.folder / "model.safetensors").exists():
            return "training"
        done = json.loads((self.folder / "run.json").read_text())["status"] == "finished"
        return "finished" if done else "evaluation"

    def interrupted(self, stage: str | None = None) -> None:
        """Note an interruption."""
        self.seen["interruptions"] += 1
        self.seen["at"].append(stage or self.stage())

    def problem(self, text: str) -> None:
        """Note something that should not be."""
        self.seen["problems"].append(text)

    def expect_clear_error(self, process: Process) -> bool:
        """Whether the process failed; if so, it must have said why, with the exit code of an error of the user's."""
        if process.wait(DEADLINE) is None:
            self.problem(f"hangs: {process.said[-300:]}")
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(DEADLINE)
        elif process.code not in (0, 2) or (process.code == 2 and "Traceback" in process.said):
            self.problem(f"exit code {process.code}: {process.said[-600:]}")
        elif process.code == 2:
            self.seen.setdefault("said", process.said[-400:].replace(str(self.folder), "RUN"))
        return process.code != 0

    def finish(self) -> dict[str, Any]:
        """Let the run finish, and compare it."""
        process = self.start()
        if process.wait(DEADLINE) != 0:
            self.problem(f"can't be resumed, exit code {process.code}: {process.said[-600:]}")
            if process.code is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(DEADLINE)
            return {**self.seen, "outcome": "lost"}
        differ = differences(self.folder, self.reference)
        if differ:
            self.problem(f"differs: {', '.join(differ)}")
        return {**self.seen, "outcome": "different" if differ else "same"}


def differences(folder: Path, reference: Path) -> list[str]:
    """The files of a run whose contents are not those of the reference: the model, the metrics and the losses."""
    differ = []
    if (folder / "model.safetensors").read_bytes() != (reference / "model.safetensors").read_bytes():
        differ.append("model.safetensors")
    if json.loads((folder / "metrics.json").read_text()) != json.loads((reference / "metrics.json").read_text()):
        differ.append("metrics.json")
    logs = [
        sorted(reference.rglob("metrics.csv")),
        [folder / p.relative_to(reference) for p in sorted(reference.rglob("metrics.csv"))],
    ]
    if [losses(log) for log in logs[0]] != [losses(log) for log in logs[1]]:
        differ.append("metrics.csv")
    return differ


def losses(log: Path) -> list[tuple[str, str]]:
    """The losses of a log, by step."""
    with log.open(newline="") as file:
        return [(row["step"], row["loss"]) for row in csv.DictReader(file) if row["loss"]]


# What is done to training


def killed(number: signal.Signals, whom: str = "main") -> Callable[[Trial], dict[str, Any]]:
    """Send a signal, up to three times with one process, once or twice with two; then resume."""

    def run(trial: Trial) -> dict[str, Any]:
        for _ in range(3 if trial.processes == 1 else trial.random.choice((1, 1, 2))):
            process = trial.start()
            trial.wait_at_random(process)
            if process.poll() is None:
                trial.interrupted()
                send(process, number, whom)
            code = process.wait(DEADLINE)
            if code is None:
                trial.problem(f"hangs after {number.name}: {process.said[-600:]}")
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(DEADLINE)
            elif code not in (0, *CODES[number]) and whom == "main":
                trial.problem(f"exit code {code}: {process.said[-600:]}")
            if not process.others_end():
                trial.problem("a process did not end with the main one")
            if trial.stage() == "finished":
                break
        return trial.finish()

    return run


def send(process: Process, number: signal.Signals, whom: str) -> None:
    """Send a signal to the main process, to all, or to the second one, if it has been started."""
    if whom == "all":
        os.killpg(process.pid, number)
        return
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    others = [int(pid) for pid in children.read_text().split()] if whom == "second" else []
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(others[0] if others else process.pid, number)


def disk_full(trial: Trial) -> dict[str, Any]:
    """Train in a file system that is too small, make it larger, and resume."""
    disk = trial.recipe.parent / "disk"
    disk.mkdir()
    size = trial.random.randint(2, max(files_size(trial.reference) // 4096, 3)) * 4096
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(disk)], check=True)
    try:
        trial.folder = disk / "run"
        if trial.expect_clear_error(trial.start()):
            trial.interrupted()
        subprocess.run(["mount", "-o", "remount,size=50m", str(disk)], check=True)
        return trial.finish()
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def file_too_large(trial: Trial) -> dict[str, Any]:
    """Train under a limit on the size of files, lift it, and resume."""
    largest = max(path.stat().st_size for path in trial.reference.rglob("*") if path.is_file())
    trial.limit = trial.random.randint(200, largest)
    if trial.expect_clear_error(trial.start()):
        trial.interrupted()
    trial.limit = None
    return trial.finish()


def read_only(trial: Trial) -> dict[str, Any]:
    """Make the folder read-only while training runs, undo it, and resume."""
    process = trial.start()
    trial.wait_at_random(process)
    place = trial.folder if trial.folder.exists() else trial.folder.parent
    folders = [place, *(path for path in place.rglob("*") if path.is_dir())]
    set_read_only(folders, True)
    try:
        if trial.expect_clear_error(process):
            trial.interrupted()
    finally:
        set_read_only(folders, False)
    return trial.finish()


def set_read_only(folders: list[Path], on: bool) -> None:
    """Forbid or allow new files in folders; permissions don't bind root, so for root folders become immutable."""
    if os.getuid() == 0:
        subprocess.run(["chattr", "+i" if on else "-i", *map(str, folders)], check=True)
    for folder in () if os.getuid() == 0 else folders:
        folder.chmod(0o555 if on else 0o755)


def moved(trial: Trial) -> dict[str, Any]:
    """Move the folder away while training runs, move it back, and resume."""
    process = trial.start()
    trial.wait_at_random(process)
    stage = trial.stage()
    elsewhere = trial.folder.with_name("elsewhere")
    if trial.folder.exists():
        trial.folder.rename(elsewhere)
    if trial.expect_clear_error(process):
        trial.interrupted(stage)
    if elsewhere.exists():
        shutil.rmtree(trial.folder, ignore_errors=True)
        elsewhere.rename(trial.folder)
    return trial.finish()


def deleted(trial: Trial) -> dict[str, Any]:
    """Delete the folder while training runs, and train again."""
    process = trial.start()
    trial.wait_at_random(process)
    stage = trial.stage()
    shutil.rmtree(trial.folder, ignore_errors=True)
    if trial.expect_clear_error(process):
        trial.interrupted(stage)
    shutil.rmtree(trial.folder, ignore_errors=True)  # what was written after that
    return trial.finish()


def locked(trial: Trial) -> dict[str, Any]:
    """Train the same run a second time while the first still trains."""
    first = trial.start()
    trial.wait_at_random(first)
    if trial.expect_clear_error(trial.start()):
        trial.interrupted()
    if first.wait(DEADLINE) not in (0, 2):
        trial.problem(f"the first process ends with exit code {first.code}: {first.said[-600:]}")
    return trial.finish()


@dataclass(frozen=True)
class Kind:
    """A kind of trial: what is done, with how many processes, and how often by default."""

    run: Callable[[Trial], dict[str, Any]]
    processes: int = 1
    trials: int = 24
    needs_root: bool = False


KINDS = {
    "SIGKILL": Kind(killed(signal.SIGKILL), trials=48),
    "SIGTERM": Kind(killed(signal.SIGTERM), trials=48),
    "SIGINT": Kind(killed(signal.SIGINT), trials=48),
    "SIGKILL to the main process (of two)": Kind(killed(signal.SIGKILL), 2, 8),
    "SIGKILL to the second of two processes": Kind(killed(signal.SIGKILL, "second"), 2, 8),
    "SIGTERM to the main process (of two)": Kind(killed(signal.SIGTERM), 2, 8),
    "SIGTERM to the second of two processes": Kind(killed(signal.SIGTERM, "second"), 2, 8),
    "SIGTERM to both processes": Kind(killed(signal.SIGTERM, "all"), 2, 8),
    "SIGINT to both processes": Kind(killed(signal.SIGINT, "all"), 2, 8),
    "disk full": Kind(disk_full, needs_root=True),
    "limit on the size of files": Kind(file_too_large),
    "folder read-only": Kind(read_only),
    "folder moved away and back": Kind(moved),
    "folder deleted": Kind(deleted),
    "trained twice at once": Kind(locked),
}


def files_size(folder: Path) -> int:
    """The bytes that a folder's files take on a disk with blocks of 4096 bytes."""
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in folder.rglob("*"))


@contextmanager
def references(place: Path) -> Iterator[Callable[[str, int], tuple[Path, float]]]:
    """A function from a recipe and a number of processes to an uninterrupted run of it, and the seconds it takes."""
    known: dict[tuple[str, int], tuple[Path, float]] = {}

    def reference(name: str, processes: int) -> tuple[Path, float]:
        if (name, processes) not in known:
            folder = place / f"reference-{len(known)}"
            folder.mkdir()
            recipe = Recipe.of(SMALL, [*RECIPES[name], f"training.devices={processes}"])
            recipe.write(folder / "recipe.yaml")
            trial = Trial(folder / "recipe.yaml", folder / "run", folder / "run", 0.0, random.Random(), processes)
            start = time.monotonic()
            found = trial.finish()
            if found["outcome"] != "same":
                raise SystemExit(f"{name} can't be trained: {found}")
            known[name, processes] = folder / "run", time.monotonic() - start
        return known[name, processes]

    yield reference


def run_trials(kinds: dict[str, Kind], trials: int | None, results: dict[str, Any]) -> None:
    """Run the trials that are missing, all kinds in turn."""
    planned = [(number, name) for name, kind in kinds.items() for number in range(trials or kind.trials)]
    place = Path(tempfile.mkdtemp(prefix="bayesify-faults-"))
    place.chmod(0o755)
    known = {(row["kind"], row["trial"]) for row in results["trials"]}
    try:
        with references(place) as reference:
            for number, name in sorted(planned, key=lambda each: each[0] / (trials or kinds[each[1]].trials)):
                if (name, number) in known:
                    continue
                row = one_trial(name, number, kinds[name], place, reference)
                results["trials"].append(row)
                write(results)
                print(time.strftime("%H:%M:%S"), name, number, row["outcome"], row["at"], *row["problems"], flush=True)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def one_trial(
    name: str, number: int, kind: Kind, place: Path, reference: Callable[[str, int], tuple[Path, float]]
) -> dict[str, Any]:
    """Run one trial in a folder of its own."""
    recipes = list(RECIPES)[:2] if kind.processes > 1 else list(RECIPES)
    recipe = recipes[number % len(recipes)]
    whole, seconds = reference(recipe, kind.processes)
    with tempfile.TemporaryDirectory(dir=place) as folder:
        given = Path(shutil.copy(whole.parent / "recipe.yaml", folder))
        at_random = random.Random(f"{name} {number}")
        trial = Trial(given, Path(folder) / "run", whole, 1.05 * seconds, at_random, kind.processes)
        return {"kind": name, "trial": number, "recipe": recipe, **kind.run(trial)}


def main() -> None:
    """Run the trials that are missing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--trials", type=int, metavar="N")
    parser.add_argument("--only", choices=list(KINDS), action="append")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    setup = {"bayesify": by.__version__, "torch": torch.__version__, "python": platform.python_version()}
    known = json.loads(RESULTS.read_text())["trials"] if RESULTS.exists() else []
    results = {"setup": setup, "kinds": list(KINDS), "trials": known}
    kinds = {name: kind for name, kind in KINDS.items() if os.getuid() == 0 or not kind.needs_root}
    run_trials({name: kinds[name] for name in options.only or kinds}, options.trials, results)
    print(table(results))


if __name__ == "__main__":
    main()
