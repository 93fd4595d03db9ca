"""The contest: Bayesian networks beside what people would do instead, each tuned with as many trials.

    python -m benchmarks.contest run
    python -m benchmarks.contest run --data fashion-tuned --contestants plain Rank1 --seeds 2 --jobs 2
    python -m benchmarks.contest run --data cifar10
    python -m benchmarks.contest report

First every contestant tries its options with a seed of its own, and predicts the rows to choose by alone. Then what was
chosen is trained with every seed, with and without temperature, and predicts everything.

Needs $BAYESIFY_DATA. Trials that are finished are not repeated: benchmarks/results/contest.jsonl has a line for each,
runs/contest the plain networks and each row's predictions, which intervals need. `report` writes
benchmarks/results/contest.json, contest.md and the claims in README.md; data sets whose rows are not here keep what is
in contest.json.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bayesify.errors import BayesifyError
from benchmarks.contest import report
from benchmarks.contest import trial as trials
from benchmarks.contest.contestants import CONTESTANTS, options_of
from benchmarks.contest.data import DATA, SMALL
from benchmarks.contest.measures import loss_of
from benchmarks.contest.results import final_trials, results_of
from benchmarks.contest.trial import TUNING_SEED, Trial
from benchmarks.store import Rows

Finished = tuple[Trial, dict[str, Any], Rows]


def tuning(options: argparse.Namespace) -> list[Trial]:
    """The trials that options are chosen by."""
    return [
        Trial.of(data, contestant, each, TUNING_SEED)
        for data in options.data
        for contestant in options.contestants
        for each in options_of(contestant, data)
    ]


def finals(options: argparse.Namespace) -> list[Trial]:
    """The trials to show, seed by seed, with the options that were chosen."""
    return [
        trial
        for data in options.data
        for seed in range(DATA[data].seeds if options.seeds is None else options.seeds)
        for contestant in options.contestants
        for trial in final_trials(data, contestant, seed)
    ]


def finished(trial: Trial, runs: Path) -> Finished:
    """A trial, its record and its rows; a network that a contestant can't be applied to is a record, too."""
    torch.set_num_threads(1)
    started = time.process_time()
    try:
        record, rows = trial.run(runs)
    except BayesifyError as error:
        return trial, {"refused": str(error)}, {}
    if trial.seed == TUNING_SEED:
        folds = range(DATA[trial.data].folds)
        record["losses"] = [[loss_of(rows, fold, is_scaled) for fold in folds] for is_scaled in (False, True)]
    return trial, record | {"cpu_seconds": time.process_time() - started}, rows


def run(wanted: list[Trial], jobs: int) -> None:
    """Run what is not finished, in the order given, and say how long it will take."""
    done = trials.STORE.records()
    left = [trial for trial in wanted if trial not in done]
    print(f"{len(left)} of {len(wanted)} trials left: {estimate(left, done)}", flush=True)
    started = time.perf_counter()
    for count, (trial, record, rows) in enumerate(results(left, jobs), 1):
        trials.STORE.add(trial, record, rows)
        shown = record.get("refused") or f"{record['cpu_seconds']:.0f} s of CPU time"
        print(f"{trial.data} seed {trial.seed} {trial.contestant} {trial.options}: {shown}", end=" ")
        remaining = (time.perf_counter() - started) / count * (len(left) - count)
        print(f"[{count} of {len(left)}, about {remaining / 60:.0f} min left]", flush=True)


def results(left: list[Trial], jobs: int) -> Iterable[Finished]:
    """The results as they come."""
    work = partial(finished, runs=trials.STORE.runs)
    if jobs == 1:
        yield from map(work, left)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=20) as pool:
        yield from pool.imap(work, left)


def estimate(left: list[Trial], done: dict[Trial, dict[str, Any]]) -> str:
    """How much CPU time trials will take, by finished ones of the same contestant, or else of the same data set."""
    total, unknown = 0.0, 0
    for trial in left:
        is_tuning = trial.seed == TUNING_SEED
        alike = [
            (each.contestant == trial.contestant, record["cpu_seconds"])
            for each, record in done.items()
            if each.data == trial.data and (each.seed == TUNING_SEED) == is_tuning and "cpu_seconds" in record
        ]
        times = [seconds for is_same, seconds in alike if is_same] or [seconds for _, seconds in alike]
        total += sum(times) / len(times) if times else 0.0
        unknown += not times
    return f"about {total / 60:.0f} min of CPU time" + (f", and {unknown} trials of unknown length" if unknown else "")


def measured(names: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The results of data sets: new where rows are here, else as they were."""
    before = report.stored()
    for name in names:
        found = results_of(name) or before.get(name)
        if found is not None:
            yield name, found


def main() -> None:
    """Run trials, or write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="run trials that are not finished")
    runs.add_argument("--data", nargs="+", choices=DATA, default=SMALL)
    runs.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS), metavar="NAME")
    runs.add_argument("--seeds", type=int, help="how many; by default 5, or 3 for cifar10")
    runs.add_argument("--jobs", type=int, default=1, help="how many processes of one thread each")
    commands.add_parser("report", help="write contest.json, contest.md and the README's claims")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.command == "run":
        run(tuning(options), options.jobs)
        run(finals(options), options.jobs)
    else:
        report.write(dict(measured(DATA)))


if __name__ == "__main__":
    main()
