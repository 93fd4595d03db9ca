"""How step, prediction and memory grow with components, draws, rows and width."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import bayesify as by
from bayesify.lab.models import WideResNet

from .cases import CASES, Case
from .measure import compare_calls, compare_predictions, training_memory
from .methods import METHODS, Prepare, convert_with, plain

BASE = replace(CASES["resnet20"], rows=64, draws=4, rounds=5, predict_rounds=3)
BY_COMPONENTS: dict[str, Callable[[int], object]] = {
    "BatchEnsemble": by.BatchEnsemble,
    "Rank1": by.Rank1,
    "EMP": by.EMP,
    "LowRankEnsemble": by.LowRankEnsemble,
    "Ensemble": by.Ensemble,
}
ESTIMATORS = ("Rank1", "MeanField shared", "MeanField flipout", "MeanField exemplar")
COMPONENTS, DRAWS, ROWS, WIDTHS = (1, 4, 16), (1, 4, 16, 64), (8, 32, 128), (1, 2, 4)


def measure_growth(quick: bool) -> Iterator[dict[str, object]]:
    """Every figure: what was varied, its value, the method and the ratios to the plain network of the same size."""
    sizes = slice(1) if quick else slice(None)
    base = replace(BASE, rows=16, rounds=1, predict_rounds=1, draws=1) if quick else BASE
    for k in COMPONENTS[sizes]:
        for name, method in BY_COMPONENTS.items():
            yield {"axis": "K", "value": k, "method": name, **figures(base, convert_with(method(k)))}
    for rows in ROWS[sizes]:
        for name in ESTIMATORS:
            yield {
                "axis": "B",
                "value": rows,
                "method": name,
                **figures(replace(base, rows=rows), convert_with(METHODS[name])),
            }
    for width in WIDTHS[sizes]:
        case = replace(base, network=lambda width=width: WideResNet(10, width), rows=base.rows // 2)
        for name in ESTIMATORS:
            yield {"axis": "width", "value": width, "method": name, **figures(case, convert_with(METHODS[name]))}
    for draws in DRAWS[sizes]:
        for name, method in (("Rank1", METHODS["Rank1"]), ("Rank1, head alone", {"linear": METHODS["Rank1"]})):
            passes = forward_passes(replace(base, draws=draws), convert_with(method))
            yield {"axis": "S", "value": draws, "method": name, "forward passes": passes}


def figures(case: Case, prepare: Prepare) -> dict[str, float]:
    """The ratios to the plain network: a step, a draw of a prediction, a step's memory."""
    x, y = case.batch()
    base, ours = plain(case.network()), prepare(case.network())
    return {
        "step": compare_calls(base.step(x, y), ours.step(x, y), case.rounds)[0],
        "memory": training_memory(ours, x, y) / training_memory(base, x, y),
        "predict": compare_predictions([(base, ours)], x, case.draws, case.predict_rounds)[0],
    }


def forward_passes(case: Case, prepare: Prepare) -> float:
    """S draws, in plain forward passes."""
    x, _ = case.batch()
    base, ours = plain(case.network()), prepare(case.network())
    return compare_calls(lambda: base.predict(x, 1), lambda: ours.predict(x, case.draws), case.predict_rounds)[0]
