"""Fuzz on several cores until the time is over or an oracle fails."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import threading
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
from fuzz.runner import CORPUS, Fault, Statistics, fuzz

EXAMPLES = 300
SLOW = {"exported": 6}
"""How many cases an oracle gets at a time."""


def search(minutes: float, cores: int, seed: int, failures: Path, summary: Path | None) -> int:
    """Run all oracles on random cases until the time is over or one fails."""
    print(f"fuzzing for {minutes:g} minutes on {cores} cores, seed {seed}", flush=True)
    end, oracles, seeds = time.monotonic() + 60 * minutes, cycle(ORACLES), iter(range(seed, 1 << 62))
    totals: dict[str, Statistics] = defaultdict(Statistics)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(cores, mp_context=context, initializer=start_process) as pool:
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


def start_process() -> None:
    """Start a worker that ends with the process that started it, however that ends."""

    def watch() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()  # also if it ended before this process was ready: it is a pipe that the parent holds open
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    start_worker()


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
