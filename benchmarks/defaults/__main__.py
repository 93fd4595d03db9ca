"""Which options a method should have by default, measured on a suite of tasks: `python -m benchmarks.defaults`.

    python -m benchmarks.defaults run --tasks fashion digits --methods rank1 --seeds 3
    python -m benchmarks.defaults report --tasks fashion
    python -m benchmarks.defaults rank Rank1
    python -m benchmarks.defaults page

A method is converted from a trained network, or trained from scratch, in a loop as people write it: one group of
parameters, Adam or AdamW at 1e-3 or SGD at 1e-2, and `by.elbo`. Beside it are the plain network, the plain network
trained for as many further epochs, and each of these with temperature, which is fitted to validation rows. Options are
to be chosen by validation rows only (`rank`), test rows are for showing.

Needs $BAYESIFY_DATA. Trials that are finished are not repeated: benchmarks/results/defaults.jsonl has a line for each,
runs/defaults the trained plain networks and each row's predictions, which the paired differences of `report` need.
`page` writes benchmarks/results/defaults.md, which needs the lines alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import torch

from bayesify.errors import BayesifyError
from benchmarks.defaults import page, report, store
from benchmarks.defaults.candidates import CANDIDATES
from benchmarks.defaults.measures import each_row, measures_of, temperature_of, with_temperature
from benchmarks.defaults.tasks import TASKS
from benchmarks.defaults.trial import LONGER, LOOPS, PLAIN, Trial


def trials_of(options: argparse.Namespace) -> Iterator[Trial]:
    """The trials that were asked for, seed by seed, with the plain networks first."""
    methods = [each for name in options.methods for each in CANDIDATES.get(name, [name])]
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for task in options.tasks:
            for start in options.starts:
                if start == "scratch" and not TASKS[task].epochs:
                    continue
                baselines = [PLAIN, LONGER] if start == "trained" else [PLAIN]
                for loop in options.loops:
                    for method in dict.fromkeys(baselines + methods):
                        yield Trial(task, start, loop, method, seed)


def run(options: argparse.Namespace) -> None:
    """Run what is not finished."""
    for trial in trials_of(options):
        if trial in store.STORE.records():
            continue
        started = time.perf_counter()
        try:
            facts, rows = trial.run(store.STORE.runs)
        except BayesifyError as error:  # a training that diverges is a result, too
            store.STORE.add(trial, {"failed": str(error)}, {})
            print(f"{trial.task} {trial.loop} seed {trial.seed} {trial.method}: {error}", flush=True)
            continue
        record = dict(facts)
        for part in ("validation", "test"):
            record[part] = measures_of(each_row(rows, part))
            record[f"{part}_t"] = measures_of(each_row(with_temperature(rows), part))
        if "validation/log_probs" in rows:
            record["temperature"] = temperature_of(rows)
        store.STORE.add(trial, record, rows)
        shown = " ".join(f"{name} {value:.4f}" for name, value in record["validation"].items())
        print(f"{trial.task} {trial.loop} seed {trial.seed} {trial.method}: {shown}", end=" ")
        print(f"[{time.perf_counter() - started:.0f} s]", flush=True)


def main() -> None:
    """Run trials, or print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="run trials that are not finished")
    runs.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    runs.add_argument("--starts", nargs="+", choices=["trained", "scratch"], default=["trained"])
    runs.add_argument("--loops", nargs="+", choices=LOOPS, default=["adam"])
    runs.add_argument("--methods", nargs="+", default=["all"], help=f"calls, or sets: {', '.join(CANDIDATES)}")
    runs.add_argument("--seeds", type=int, default=3)
    runs.add_argument("--first-seed", type=int, default=0)
    reports = commands.add_parser("report", help="print measures and paired differences")
    reports.add_argument("--tasks", nargs="+", choices=TASKS)
    reports.add_argument("--part", choices=["validation", "test"], default="test")
    reports.add_argument("--no-differences", action="store_true")
    ranks = commands.add_parser("rank", help="print candidates by their validation NLL")
    ranks.add_argument("kind", help="the name of a method, such as Rank1")
    ranks.add_argument("--tasks", nargs="+", choices=TASKS)
    commands.add_parser("page", help="write benchmarks/results/defaults.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.command == "run":
        run(options)
    elif options.command == "report":
        print(report.page(options.tasks, options.part, differences=not options.no_differences))
    elif options.command == "page":
        store.STORE.lines.with_suffix(".md").write_text(page.committed())
    else:
        print(report.ranking(options.kind, options.tasks))


if __name__ == "__main__":
    main()
