"""`python -m fuzz`: fuzz on several cores for some minutes, or run the oracles on one case from a file."""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import random
import sys
import time
import warnings
from collections import defaultdict
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import cycle
from pathlib import Path

import torch

from fuzz.case import Case
from fuzz.oracles import ORACLES
from fuzz.runner import CORPUS, Fault, Statistics, fuzz, read_case, run_case

EXAMPLES = 300
SLOW = {"exported": 6}
"""How many cases an oracle gets at a time."""


def main() -> int:
    """Read the arguments and run; returns 1 after a fault."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument(
        "case", nargs="?", type=Path, help="a file with a case: run the oracles on it, and nothing else"
    )
    parser.add_argument("oracles", nargs="*", help=f"some of {', '.join(ORACLES)}; all unless given")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30), help="random unless given")
    parser.add_argument("--failures", type=Path, default=Path("build/fuzz"), help="where failing cases are written")
    parser.add_argument("--summary", type=Path, help="a file for a table of what was tried")
    given = parser.parse_args()
    if given.case:
        return replay(given.case, given.oracles or [*ORACLES])
    return search(given.minutes, given.cores, given.seed, given.failures, given.summary)


def replay(path: Path, oracles: list[str]) -> int:
    """Run oracles on one case."""
    start_worker()
    case, failed = read_case(path), 0
    for oracle in oracles:
        statistics = Statistics()
        try:
            run_case(oracle, case, statistics)
        except Exception as error:  # the fault that was asked for
            failed = 1
            print(f"{oracle}: FAILED: {type(error).__name__}: {error}")
        else:
            print(f"{oracle}: {'refused: ' + next(iter(statistics.refused)) if statistics.refused else 'holds'}")
    return failed


def search(minutes: float, cores: int, seed: int, failures: Path, summary: Path | None) -> int:
    """Run all oracles on random cases until the time is over or one fails."""
    print(f"fuzzing for {minutes:g} minutes on {cores} cores, seed {seed}", flush=True)
    end, oracles, seeds = time.monotonic() + 60 * minutes, cycle(ORACLES), iter(range(seed, 1 << 62))
    totals: dict[str, Statistics] = defaultdict(Statistics)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(cores, mp_context=context, initializer=start_worker) as pool:
        running: dict[Future[Statistics | Fault], tuple[str, int]] = {}
        while running or time.monotonic() < end:
            while len(running) < cores and time.monotonic() < end:
                task = next(oracles), next(seeds)
                running[pool.submit(attempt, *task, end - time.monotonic())] = task
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                oracle, used = running.pop(done)
                try:
                    found = done.result()
                except BrokenProcessPool:
                    print(f"a process died: oracle {oracle!r} with seed {used}, or one of {[*running.values()]}")
                    return 1
                if isinstance(found, Fault):
                    report(found, failures, pool)
                    return 1
                totals[oracle].add(found)
    for oracle, total in totals.items():
        print(f"{oracle}: {total}")
    print(f"{sum(total.tried for total in totals.values())} cases, no fault")
    if summary:
        write(summary, table(totals))
    return 0


def table(totals: dict[str, Statistics]) -> str:
    """What was tried, as a Markdown table."""
    rows = [
        f"| `{oracle}` | {total.tried:,} | {sum(total.refused.values()):,} | {total.not_applicable:,} |"
        for oracle, total in totals.items()
    ]
    return "\n".join(["| oracle | cases | refused | not applicable |", "|---|---|---|---|", *rows]) + "\n"


def start_worker() -> None:
    """What a process needs: one thread, and warnings that are errors, as in the tests."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # torch warns about itself
    warnings.filterwarnings("ignore", category=FutureWarning)


def attempt(oracle: str, seed: int, seconds: float) -> Statistics | Fault:
    """A number of cases for one oracle; a fault is returned, not raised."""
    try:
        return fuzz(oracle, SLOW.get(oracle, EXAMPLES), seed, seconds)
    except Fault as fault:
        return fault


def report(fault: Fault, failures: Path, pool: ProcessPoolExecutor) -> None:
    """Print a fault, write its case, and stop the other processes."""
    path = write_case(fault.case, failures, fault.oracle)
    print(fault)
    print(f"\nTo see it again: PYTHONPATH=tests python -m fuzz {path} {fault.oracle}")
    print(f"To keep it: cp {path} {os.path.relpath(CORPUS)}")
    pool.shutdown(wait=False, cancel_futures=True)
    for process in multiprocessing.active_children():
        process.terminate()


def write_case(case: Case, folder: Path, oracle: str) -> Path:
    """Write a case to a file named after the oracle and its contents."""
    folder.mkdir(parents=True, exist_ok=True)
    text = case.to_json() + "\n"
    path = folder / f"{oracle}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"
    write(path, text)
    return path


def write(path: Path, text: str) -> None:
    """Write a file that is never half-written."""
    half_written = path.with_suffix(f".{os.getpid()}")
    half_written.write_text(text)
    half_written.rename(path)


if __name__ == "__main__":
    sys.exit(main())
