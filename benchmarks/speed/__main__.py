"""`make bench`: measure everything and write speed.json, speed.md, speed.png and the tables of docs/performance.md.

Options: --quick (tries it out: few methods, small batches, one round; it writes to runs/speed), --only PART (prints,
writes nothing), --resume (goes on where a run was cut off), --results FOLDER, --redraw (writes page, figure and tables
again from speed.json, without measuring), --before FOLDER (measures the version of bayesify in another source tree
and this one side by side, and nothing else: before_after.json and before_after.md; PART is then a network).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch

from . import before_after, figure, peers, tables
from .calls import single_calls
from .cases import CASES, Case
from .growth import measure_growth
from .measure import (
    COPIES,
    SECONDS,
    Row,
    compare,
    compare_calls,
    compare_head,
    compare_side_by_side,
    import_seconds,
)
from .methods import METHODS, OURS, QUICK, Implementation, convert_with, head_implementations, plain

ROOT = Path(__file__).parents[2]
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs" / "performance.md"
RUNS = ROOT / "runs" / "speed"
PARTS = (*CASES, "side_by_side", "calls", "growth", "optimizers", "imports")
Results = dict[str, Any]
T = TypeVar("T")
OPTIMIZERS: dict[str, dict[str, bool]] = {"default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def rows_until_failure(
    case: str, implementation: Implementation, rows: Iterator[Row], failed: list[dict[str, str]]
) -> Iterator[Row]:
    """Rows as they come; where another library can't run a network, the reason is added to what failed."""
    try:
        for row in rows:
            print(f"{case:12} {row.measure:10} {row.library:24}{row.method:20}{row.value:8.3f}", flush=True)
            yield row
    except Exception as error:
        if implementation.library == "bayesify":
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        labels = {"library": implementation.library, "method": implementation.name}
        failed.append({"case": case, **labels, "reason": reason})


def measure_case(
    name: str, case: Case, implementations: list[Implementation], failed: list[dict[str, str]]
) -> list[Row]:
    """Every method on one network, and the Bayesian heads."""
    rows = []
    for each in implementations:
        rows += rows_until_failure(name, each, compare(name, case, each), failed)
    if case.head:
        laplace = partial(peers.laplace_head, batch=case.batch())
        for each in [*head_implementations(case.head), Implementation("laplace-torch", "last layer", laplace, "head")]:
            rows += rows_until_failure(name, each, (compare_head(name, case, one) for one in [each]), failed)
    return rows


def side_by_side(cases: dict[str, Case], others: list[Implementation]) -> Iterator[Row]:
    """Ours beside all peers of the same kind, on every network that they can run."""
    for name, case in cases.items():
        for ours in (each for each in OURS if each.kind):
            able = [each for each in others if each.kind == ours.kind and can_run(case, each)]
            if able:
                yield from compare_side_by_side(name, case, [ours, *able])


def can_run(case: Case, implementation: Implementation) -> bool:
    """Whether another library makes a step on a network; why not is told where it is measured alone."""
    try:
        implementation.prepare(case.network()).step(*case.batch(8))()
    except Exception:
        return False
    return True


def optimizers(case: Case) -> dict[str, float]:
    """Rank1's step over the plain one under each way to run SGD."""
    x, y = case.batch()
    base, ours = plain(case.network()), convert_with(METHODS["Rank1"])(case.network())
    return {
        name: compare_calls(base.step(x, y, **options), ours.step(x, y, **options), case.rounds)[0]
        for name, options in OPTIMIZERS.items()
    }


def sections(
    quick: bool, cases: dict[str, Case], missing: dict[str, str], others: list[Implementation]
) -> dict[str, Callable[[], Results]]:
    """Everything that is measured, in parts that make sense each by itself."""
    implementations = [each for each in OURS if not quick or each.name in QUICK] + others

    def of_case(name: str) -> Results:
        failed: list[dict[str, str]] = []
        rows = measure_case(name, cases[name], implementations, failed)
        return {"cases": {name: cases[name].title}, "rows": [row.to_dict() for row in rows], "failed": failed}

    def imports() -> Results:
        modules = {name: module for name, module in peers.MODULES.items() if name not in missing}
        each = {"torch": "torch", "bayesify": "bayesify", **modules}
        times = ((name, import_seconds(module, 1 if quick else 3)) for name, module in each.items())
        return {"imports": dict(printed(times))}

    return {
        **{name: partial(of_case, name) for name in cases},
        "side_by_side": lambda: {"rows": [row.to_dict() for row in printed(side_by_side(cases, others))]},
        "calls": lambda: {"rows": [row.to_dict() for row in printed(single_calls(quick))]},
        "growth": lambda: {"growth": list(printed(measure_growth(quick)))},
        "optimizers": lambda: {"optimizers": dict(printed(optimizers(cases["resnet20"]).items()))},
        "imports": imports,
    }


def printed(rows: Iterable[T]) -> Iterator[T]:
    """Rows as they come, printed."""
    for row in rows:
        print(row, flush=True)
        yield row


def measure(quick: bool, only: str, unfinished: Path) -> Results:
    """All results, as they are written; each part is kept once it is measured, and not measured again."""
    torch.manual_seed(0)
    others, missing = peers.available()
    cases = {name: smaller(case) if quick else case for name, case in CASES.items()}
    facts = setup(quick, missing, cases)
    parts: dict[str, Results] = {"facts": facts}
    if unfinished.exists():
        parts = json.loads(unfinished.read_text(encoding="utf-8"))
    if parts["facts"] != json.loads(json.dumps(facts)):
        raise SystemExit(f"{unfinished} was measured otherwise: {parts['facts']}, not {facts}; leave --resume out")
    for name, section in sections(quick, cases, missing, others).items():
        if only in ("", name) and name not in parts:
            parts[name] = section()
            fresh = unfinished.with_suffix(".new")
            fresh.write_text(json.dumps(parts), encoding="utf-8")
            os.replace(fresh, unfinished)
    del parts["facts"]
    return {"setup": facts, "missing": missing, **joined(parts.values())}


def joined(parts: Iterable[Results]) -> Results:
    """Parts as one.

    >>> joined([{"rows": [1], "cases": {"a": 1}}, {"rows": [2]}, {"cases": {"b": 2}}])
    {'rows': [1, 2], 'cases': {'a': 1, 'b': 2}}
    """
    results: Results = {}
    for part in parts:
        for key, value in part.items():
            before = results.get(key, type(value)())
            results[key] = before | value if isinstance(value, dict) else before + value
    return results


def smaller(case: Case) -> Case:
    """For a quick run."""
    return replace(case, rows=8, rounds=1, predict_rounds=1, draws=2)


def setup(quick: bool, missing: dict[str, str], cases: dict[str, Case]) -> dict[str, object]:
    """How the results came about."""
    rounds = ", ".join(f"{case.rounds} and {case.predict_rounds} ({name})" for name, case in cases.items())
    return {
        "command": "make bench",
        "quick": quick,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "versions": peers.versions(missing),
        "rounds": f"Medians of rounds in turn with the plain network, for steps and predictions: {rounds}, over "
        f"{COPIES} copies of the networks, or as many as {SECONDS:g} seconds allow",
        "memory": "kept by the process" if os.environ.get("MALLOC_TRIM_THRESHOLD_") else "as the system gives it",
        "optimizer": "SGD with momentum, as torch runs it by default",
    }


def write(results: Results, folder: Path) -> None:
    """The file, the page, the figure and, for the results that are kept, the tables of the documentation."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(json.loads(json.dumps(results), parse_float=lambda number: round(float(number), 4)), indent=1)
    (folder / "speed.json").write_text(text + "\n", encoding="utf-8")
    redraw(folder)


def redraw(folder: Path) -> None:
    """All that follows from speed.json."""
    results = json.loads((folder / "speed.json").read_text(encoding="utf-8"))
    (folder / "speed.md").write_text(tables.page(results), encoding="utf-8")
    figure.draw(results, folder / "speed.png")
    if folder.resolve() == RESULTS:
        text = DOCS.read_text(encoding="utf-8")
        DOCS.write_text(tables.with_block(text, tables.docs_block(results)), encoding="utf-8")
    print(f"wrote speed.json, speed.md and speed.png in {folder}")


def main() -> None:
    """Measure what is asked for, and write it when all was."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="", choices=["", *PARTS], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--redraw", action="store_true")
    parser.add_argument("--results", type=Path, metavar="FOLDER")
    parser.add_argument("--before", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    folder = options.results or (RUNS if options.quick else RESULTS)
    if options.redraw:
        redraw(folder)
        return
    warnings.simplefilter("ignore")  # the other libraries' own
    if options.before:
        compare_with(options.before, folder, options)
        return
    if options.quick or options.only:
        with TemporaryDirectory() as temporary:
            results = measure(options.quick, options.only, Path(temporary) / "unfinished.json")
    else:
        RUNS.mkdir(parents=True, exist_ok=True)
        unfinished = RUNS / "unfinished.json"
        if not options.resume:
            unfinished.unlink(missing_ok=True)
        results = measure(options.quick, options.only, unfinished)
    if options.only:
        failed = results.get("failed", [])
        print(*(f"{each['library']} {each['method']}: {each['reason']}" for each in failed), sep="\n")
        return
    write(results, folder)
    if not options.quick:
        (RUNS / "unfinished.json").unlink()


def compare_with(before: Path, folder: Path, options: argparse.Namespace) -> None:
    """This version of bayesify beside another."""
    peers.make_torchvision_importable()
    unfinished = RUNS / ("before_after_quick.jsonl" if options.quick else "before_after.jsonl")
    before_after.run(before, options.quick, options.only, folder, unfinished, options.resume)


if __name__ == "__main__":
    main()
