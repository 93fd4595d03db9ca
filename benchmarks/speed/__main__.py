"""`make bench`: measure everything and write speed.json, speed.md, speed.png and the tables of docs/performance.md.

Options: --quick (a smoke run: few methods, small batches, one round; it writes to runs/speed), --only PART (prints,
writes nothing), --resume (goes on where a run was cut off), --results FOLDER, --redraw (writes page, figure and tables
again from speed.json, without measuring).
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

from . import figure, peers, tables
from .calls import single_calls
from .cases import CASES, Case
from .growth import grow
from .measure import PAIRS, Row, compare, compare_head, contest, import_seconds, ratio
from .methods import FAMILIES, IN_BRIEF, OURS, Method, converted, heads, plain

ROOT = Path(__file__).parents[2]
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs" / "performance.md"
UNFINISHED = ROOT / "runs" / "speed" / "unfinished.json"
PARTS = (*CASES, "contests", "calls", "growth", "optimizers", "imports")
Results = dict[str, Any]
Section = Callable[[], Results]
T = TypeVar("T")
OPTIMIZERS: dict[str, dict[str, bool]] = {"default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def measured(case: str, method: Method, rows: Iterator[Row], cannot: list[dict[str, str]]) -> Iterator[Row]:
    """Rows as they come; where another library can't run a network, why."""
    try:
        for row in rows:
            print(f"{case:12} {row.measure:10} {row.library:24}{row.method:20}{row.value:8.3f}", flush=True)
            yield row
    except Exception as error:
        if method.library == "bayesify":
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        cannot.append({"case": case, "library": method.library, "method": method.name, "reason": reason})


def measure_case(name: str, case: Case, methods: list[Method], cannot: list[dict[str, str]]) -> list[Row]:
    """Every method on one network, and the Bayesian heads."""
    rows = []
    for method in methods:
        rows += measured(name, method, compare(name, case, method), cannot)
    if case.head:
        laplace = Method("laplace-torch", "last layer", lambda net: peers.laplace_head(net, *case.batch()), "head")
        for method in [*heads(case.head), laplace]:
            rows += measured(name, method, (compare_head(name, case, each) for each in [method]), cannot)
    return rows


def contests(cases: dict[str, Case], others: list[Method]) -> Iterator[Row]:
    """Ours beside all peers of the same kind, on every network that they can run."""
    for name, case in cases.items():
        for ours in (method for method in OURS if method.kind):
            peers_of_kind = [method for method in others if method.kind == ours.kind]
            able = [method for method in peers_of_kind if can_run(case, method)]
            if able:
                yield from contest(name, case, [ours, *able])


def can_run(case: Case, method: Method) -> bool:
    """Whether a method of another library makes a step on a network; why not is told where it is measured alone."""
    try:
        method.prepare(case.network()).step(*case.batch(8))()
    except Exception:
        return False
    return True


def optimizers(case: Case) -> dict[str, float]:
    """Rank1's step over the plain one under each way to run SGD."""
    x, y = case.batch()
    base, trial = plain(case.network()), converted(FAMILIES["Rank1"])(case.network())
    return {
        name: ratio(base.step(x, y, **options), trial.step(x, y, **options), case.rounds)[0]
        for name, options in OPTIMIZERS.items()
    }


def sections(quick: bool, cases: dict[str, Case], missing: dict[str, str], others: list[Method]) -> dict[str, Section]:
    """Everything that is measured, in parts that make sense each by itself."""
    methods = [method for method in OURS if not quick or method.name in IN_BRIEF] + others

    def of_case(name: str) -> Results:
        cannot: list[dict[str, str]] = []
        rows = measure_case(name, cases[name], methods, cannot)
        return {"cases": {name: cases[name].title}, "rows": [row.plain() for row in rows], "cannot": cannot}

    def imports() -> Results:
        modules = {name: module for name, module in peers.MODULES.items() if name not in missing}
        each = {"torch": "torch", "bayesify": "bayesify", **modules}
        times = ((name, import_seconds(module, 1 if quick else 4)) for name, module in each.items())
        return {"imports": dict(shown(times))}

    return {
        **{name: partial(of_case, name) for name in cases},
        "contests": lambda: {"rows": [row.plain() for row in shown(contests(cases, others))]},
        "calls": lambda: {"rows": [row.plain() for row in shown(single_calls(quick))]},
        "growth": lambda: {"growth": list(shown(grow(quick)))},
        "optimizers": lambda: {"optimizers": dict(shown(optimizers(cases["resnet20"]).items()))},
        "imports": imports,
    }


def shown(rows: Iterable[T]) -> Iterator[T]:
    """Rows as they come, printed."""
    for row in rows:
        print(row, flush=True)
        yield row


def measure(quick: bool, only: str, kept: Path) -> Results:
    """All results, as they are written; each part is kept once it is measured, and not measured again."""
    torch.manual_seed(0)
    others, missing = peers.available()
    cases = {name: smaller(case) if quick else case for name, case in CASES.items()}
    facts = made(quick, missing, cases)
    parts: dict[str, Results] = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {"facts": facts}
    if parts["facts"] != json.loads(json.dumps(facts)):
        raise SystemExit(f"{kept} was measured otherwise: {parts['facts']}, not {facts}; start again without --resume")
    for name, section in sections(quick, cases, missing, others).items():
        if only in ("", name) and name not in parts:
            parts[name] = section()
            fresh = kept.with_suffix(".new")
            fresh.write_text(json.dumps(parts), encoding="utf-8")
            os.replace(fresh, kept)
    del parts["facts"]
    return {"made": facts, "missing": missing, **joined(parts.values())}


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
    """For a smoke run."""
    return replace(case, rows=8, rounds=1, draws=2, contest_rounds=None)


def made(quick: bool, missing: dict[str, str], cases: dict[str, Case]) -> dict[str, object]:
    """How the results came about."""
    rounds = ", ".join(f"{case.rounds} ({name})" for name, case in cases.items())
    return {
        "command": "make bench",
        "quick": quick,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "versions": peers.versions(missing),
        "rounds": f"{rounds}, a third of that, at least 4, to predict, by {PAIRS} pairs of networks",
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
    parser.add_argument("--only", default="", choices=["", *PARTS])
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--redraw", action="store_true")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    folder = options.results or (ROOT / "runs" / "speed" if options.quick else RESULTS)
    if options.redraw:
        redraw(folder)
        return
    warnings.simplefilter("ignore")  # the other libraries' own
    if options.quick or options.only:
        with TemporaryDirectory() as apart:
            results = measure(options.quick, options.only, Path(apart) / UNFINISHED.name)
    else:
        UNFINISHED.parent.mkdir(parents=True, exist_ok=True)
        if not options.resume:
            UNFINISHED.unlink(missing_ok=True)
        results = measure(options.quick, options.only, UNFINISHED)
    if options.only:
        print(
            *(f"{each['library']} {each['method']}: {each['reason']}" for each in results.get("cannot", [])), sep="\n"
        )
        return
    write(results, folder)
    if not options.quick:
        UNFINISHED.unlink()


if __name__ == "__main__":
    main()
