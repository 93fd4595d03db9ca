"""How step, prediction and memory grow with components, draws, rows and width."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import nn

import bayesify as by
from bayesify.lab.models import WideResNet

from .cases import CASES, Case
from .measure import predicting, ratio, training_memory
from .methods import FAMILIES, Trial, converted, plain

BASE = replace(CASES["resnet20"], rows=64, draws=4, rounds=4)
BY_COMPONENTS: dict[str, Callable[[int], object]] = {
    "BatchEnsemble": by.BatchEnsemble,
    "Rank1": by.Rank1,
    "EMP": by.EMP,
    "LowRankEnsemble": by.LowRankEnsemble,
    "Ensemble": by.Ensemble,
}
ESTIMATORS = ("Rank1", "MeanField shared", "MeanField flipout", "MeanField exemplar")
COMPONENTS, DRAWS, ROWS, WIDTHS = (1, 4, 16), (1, 4, 16, 64), (8, 32, 128), (1, 2, 4)


def grow(quick: bool) -> Iterator[dict[str, object]]:
    """Every figure: what was varied, its value, the method and the ratios to the plain network of the same size."""
    ends = slice(1) if quick else slice(None)
    base = replace(BASE, rows=16, rounds=1, draws=1) if quick else BASE
    for k in COMPONENTS[ends]:
        for name, family in BY_COMPONENTS.items():
            yield {"axis": "K", "value": k, "method": name, **figures(base, converted(family(k)))}
    for rows in ROWS[ends]:
        for name in ESTIMATORS:
            yield {"axis": "B", "value": rows, "method": name, **figures(replace(base, rows=rows), of(name))}
    for width in WIDTHS[ends]:
        case = replace(base, network=lambda width=width: WideResNet(10, width), rows=base.rows // 2)
        for name in ESTIMATORS:
            yield {"axis": "width", "value": width, "method": name, **figures(case, of(name))}
    for draws in DRAWS[ends]:
        for name, methods in (("Rank1", FAMILIES["Rank1"]), ("Rank1, head alone", {"linear": FAMILIES["Rank1"]})):
            forwards = in_forwards(replace(base, draws=draws), converted(methods))
            yield {"axis": "S", "value": draws, "method": name, "forwards": forwards}


def of(name: str) -> Callable[[nn.Module], Trial]:
    return converted(FAMILIES[name])


def figures(case: Case, prepare: Callable[[nn.Module], Trial]) -> dict[str, float]:
    """The ratios to the plain network: a step, a draw of a prediction, a step's memory."""
    x, y = case.batch()
    base, trial = plain(case.network()), prepare(case.network())
    return {
        "step": ratio(base.step(x, y), trial.step(x, y), case.rounds)[0],
        "memory": training_memory(trial, x, y) / training_memory(base, x, y),
        "predict": predicting([(base, trial)], x, case.draws, case.rounds)[0],
    }


def in_forwards(case: Case, prepare: Callable[[nn.Module], Trial]) -> float:
    """S draws, in plain forward passes."""
    x, _ = case.batch()
    base, trial = plain(case.network()), prepare(case.network())
    return ratio(lambda: base.predict(x, 1), lambda: trial.predict(x, case.draws), case.rounds)[0]
