"""Another version of bayesify and this one in one process, in the same rounds: `python -m benchmarks.speed --before`.

The package of the other version's source tree is copied under another name, so that both can be imported. The
networks are this version's for both. Every row is written to runs/speed as soon as it is measured; --resume goes on
from there. The results are benchmarks/results/before_after.json and before_after.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import torch

import bayesify as by

from .cases import CASES, Case
from .measure import COPIES, Call, median_seconds, ratios, times_in_turn, training_memory
from .methods import QUICK, all_methods, convert_with, plain
from .tables import markdown, threads

ROUNDS = {"resnet20": (12, 6), "resnet18": (9, 3), "mlp": (30, 12), "transformer": (18, 6)}
"""How often a step and a prediction are timed."""
NAME = "bayesify_before"
PACKAGE = Path(by.__file__).parent
NOT_NEEDED = ("lab", "cli")
OWN_IMPORT = re.compile(r"^(\s*(?:from|import)\s+)bayesify(?=[.\s])", re.MULTILINE)
Row = dict[str, Any]
REASONS = {
    "A draw of the ResNets": (
        "version 0.1 ran the copy of the network with channels last, which the plain network beside it did "
        "not and could have had too: `model.to(memory_format=torch.channels_last)` does it for both, for networks that "
        "can do with it (`x.view(len(x), -1)` behind a convolution can't). Now a draw takes 1.03 to 1.18 times as long "
        "as a plain pass, with MeanField and DropConnect on ResNet-18, whose 11 million weights are drawn one by one, "
        "1.31 to 1.51."
    ),
    "A draw of the MLP": (
        "version 0.1 multiplied activations by the factors of many draws in one large matrix product, "
        "computed once what no draw touches, and kept the copy of the network from call to call. Now each "
        "draw folds its factors into 0.9 million weights. How much of the difference each of these makes was "
        "not measured."
    ),
    "A draw of the transformer": (
        "1.12 for MCDropout and MeanField shared, 1.21 for Ensemble, 1.03 to 1.09 for the others. The cause was not "
        "looked for."
    ),
    "A step of `Ensemble`": (
        "1.11 on ResNet-20, 1.08 on ResNet-18 and on the MLP, measured on one thread; 1.00 to 1.01 on two. The cause "
        "was not looked for."
    ),
    "Memory of `MeanField exemplar`": (
        "the gradient by a log standard deviation was computed from w - μ, which loses digits where that is "
        "small. It is exact now, for which the noise of every row's weight is held until backward; "
        "`rows_at_once` bounds it."
    ),
    "Memory of `LowRankEnsemble`": ("the weights of the candidates were made twice; now they are held until backward."),
    "Memory of the transformer": (
        "a linear layer whose bias follows a factor holds one activation more. To recover it from the output, "
        "as version 0.1 did, a step would have to wait for the device."
    ),
    "What pays for it": (
        "17 uses of torch's private interfaces, most thresholds that came from one machine, and caches that could go "
        "stale."
    ),
}
"""Why figures are larger than those of version 0.1."""


# Importing another version.


def renamed(text: str, name: str = NAME) -> str:
    """A file of the package with its absolute imports under another name.

    >>> renamed("import bayesify as by\\nfrom bayesify.layers import base\\nfrom . import noise\\n").split("\\n")[:2]
    ['import bayesify_before as by', 'from bayesify_before.layers import base']
    """
    return OWN_IMPORT.sub(rf"\g<1>{name}", text)


@contextmanager
def imported_from(folder: Path, name: str = NAME) -> Iterator[ModuleType]:
    """The core of the bayesify in a source tree, imported under another name."""
    package = folder / "src" / "bayesify"
    if not package.is_dir():
        raise SystemExit(f"{folder}: expected the source tree of a version of bayesify, with src/bayesify")
    with TemporaryDirectory() as copies:
        for path in sorted(package.rglob("*.py")):
            inside = path.relative_to(package)
            if inside.parts[0] not in NOT_NEEDED:
                copy = Path(copies) / name / inside
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_text(renamed(path.read_text(encoding="utf-8"), name), encoding="utf-8")
        sys.path.insert(0, copies)
        try:
            yield import_module(name)
        finally:
            sys.path.remove(copies)
            for module in [module for module in sys.modules if module.partition(".")[0] == name]:
                del sys.modules[module]


def free_caches_of(version: ModuleType) -> Call:
    """What lets go of memory that a version keeps from step to step; versions without such memory have nothing."""
    try:
        return import_module(f"{version.__name__}.memory").forget_scratch
    except (ImportError, AttributeError):
        return lambda: None


def fingerprint(package: Path) -> str:
    """A short hash of the core's source, by which unfinished results are known to be of the same two versions."""
    files = [path for path in sorted(package.rglob("*.py")) if path.relative_to(package).parts[0] not in NOT_NEEDED]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


# Measuring.


def compare_versions(case: Case, versions: Sequence[ModuleType], method: str) -> Row:
    """All figures of one method on one network; those of the two versions are ratios to the plain network."""
    x, y = case.batch()
    prepare = [plain, *(convert_with(all_methods(version)[method], version) for version in versions)]
    groups = [[each(case.network()) for each in prepare] for _ in range(COPIES)]
    draws = groups[0][-1].members or case.draws
    steps = [[each.step(x, y) for each in group] for group in groups]
    step_times = times_in_turn(steps, case.rounds, limit=20)
    kl = [
        median_seconds(each.after_backward, case.rounds) / statistics.median(times[place] for times in step_times)
        for place, each in enumerate(groups[0][1:], 1)
    ]
    caches = [lambda: None, *map(free_caches_of, versions)]
    memory = [training_memory(each, x, y, free) for each, free in zip(groups[0], caches, strict=True)]
    predictions = [[partial(each.predict, x, draws) for each in group] for group in groups]
    predict_times = times_in_turn(predictions, case.predict_rounds, limit=20)
    return {
        "method": method,
        "step": three_ratios(step_times),
        "predict": three_ratios(predict_times),
        "memory": {"before": memory[1] / memory[0], "after": memory[2] / memory[0]},
        "kl": {"before": kl[0], "after": kl[1]},
        "rounds": [len(step_times), len(predict_times)],
    }


def three_ratios(times: Sequence[Sequence[float]]) -> dict[str, float]:
    """Of the times of the plain network and both versions, round by round: medians of the ratios.

    >>> three_ratios([(1.0, 2.0, 3.0)])
    {'before': 2.0, 'after': 3.0, 'after/before': 1.5}
    """
    return {
        "before": ratios([(base, before) for base, before, _ in times])[0],
        "after": ratios([(base, after) for base, _, after in times])[0],
        "after/before": ratios([(before, after) for _, before, after in times])[0],
    }


def facts(folder: Path, quick: bool) -> dict[str, object]:
    """How the results come about."""
    return {
        "command": "python -m benchmarks.speed --before FOLDER",
        "quick": quick,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "memory": "kept by the process" if os.environ.get("MALLOC_TRIM_THRESHOLD_") else "as the system gives it",
        "before": fingerprint(folder / "src" / "bayesify"),
        "after": fingerprint(PACKAGE),
    }


def measure(folder: Path, quick: bool, only: str, unfinished: Path) -> Iterator[Row]:
    """All rows: those that the unfinished file has, and those that are still to be measured, which are added to it."""
    expected = json.dumps(facts(folder, quick))
    lines = unfinished.read_text(encoding="utf-8").splitlines() if unfinished.exists() else []
    if lines and lines[0] != expected:
        raise SystemExit(f"{unfinished} was measured otherwise: {lines[0]}, not {expected}; leave --resume out")
    rows = [json.loads(line) for line in lines[1:]]
    yield from rows
    done = {(row["network"], row["method"]) for row in rows}
    with imported_from(folder) as before, unfinished.open("a", encoding="utf-8") as file:
        if not lines:
            print(expected, file=file, flush=True)
        for network, (rounds, predict_rounds) in ROUNDS.items():
            case = replace(CASES[network], rounds=rounds, predict_rounds=predict_rounds)
            case = replace(case, rows=8, rounds=1, predict_rounds=1, draws=2) if quick else case
            for method in all_methods():
                wanted = only in ("", network) and (not quick or method in QUICK)
                if wanted and (network, method) not in done:
                    torch.manual_seed(0)
                    row = {"network": network, **compare_versions(case, [before, by], method)}
                    print(json.dumps(row), file=file, flush=True)
                    print(f"{network:12} {method:20}", *_cells(row), flush=True)
                    yield row


# The page.


def _cells(row: Row) -> list[str]:
    return [
        *(f"{row[measure][each]:.2f}" for measure in ("step", "predict") for each in row[measure]),
        *(f"{row['memory'][each]:.2f}" for each in ("before", "after")),
        *(f"{row['kl'][each]:.2%}" for each in ("before", "after")),
    ]


def page(results: dict[str, Any]) -> str:
    """benchmarks/results/before_after.md."""
    setup = results["setup"]
    parts = [
        "# Two versions of bayesify\n",
        ("A quick run with small batches, whose figures mean nothing. " if setup["quick"] else "")
        + f"`{setup['command']}`: torch {setup['torch']}, {threads(setup)}, {setup['machine']}; memory: "
        f"{setup['memory']}. Both versions and the plain network in the same process and the same rounds. Times and "
        "memory are ratios to the plain network; times are medians of the rounds; after / before is the median of the "
        "ratios within a round. The KL is its share of the version's own step.\n",
    ]
    header = ["method", "step before", "step after", "after / before", "draw before", "draw after", "after / before"]
    header += ["memory before", "memory after", "KL before", "KL after"]
    for network in dict.fromkeys(row["network"] for row in results["rows"]):
        rows = [[f"`{row['method']}`", *_cells(row)] for row in results["rows"] if row["network"] == network]
        parts.append(f"## {CASES[network].title}\n\n{markdown(header, rows)}")
    reasons = "\n".join(f"- {what}: {why}" for what, why in REASONS.items())
    parts.append(f"## Where it takes more than version 0.1, and why\n\n{reasons}\n")
    return "\n".join(parts)


def write(results: dict[str, Any], folder: Path) -> None:
    """The file and the page."""
    folder.mkdir(parents=True, exist_ok=True)
    rounded = json.loads(json.dumps(results), parse_float=lambda number: round(float(number), 4))
    (folder / "before_after.json").write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")
    (folder / "before_after.md").write_text(page(rounded), encoding="utf-8")
    print(f"wrote before_after.json and before_after.md in {folder}")


def run(folder: Path, quick: bool, only: str, results: Path, unfinished: Path, resume: bool) -> None:
    """Measure, and write when all is measured; one network alone is printed, and kept if a run is resumed."""
    if only and not resume:
        with TemporaryDirectory() as temporary:
            list(measure(folder, quick, only, Path(temporary) / unfinished.name))
        return
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    if not resume:
        unfinished.unlink(missing_ok=True)
    rows = list(measure(folder, quick, only, unfinished))
    if not only:
        order = list(ROUNDS)
        rows.sort(key=lambda row: order.index(row["network"]))
        write({"setup": facts(folder, quick), "rows": rows}, results)
        unfinished.unlink()
