"""`python -m fuzz`: fuzz on several cores for some minutes, or run the oracles on one case from a file."""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from fuzz.oracles import ORACLES
from fuzz.runner import Statistics, read_case, run_case
from fuzz.search import search, start_worker


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


if __name__ == "__main__":
    sys.exit(main())
