"""The columns of a comparison: where each metric is in `metrics.json`, how it is formatted, which value is best."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bayesify.lab.metrics.selective_prediction import COVERAGES

MOST_DECIMALS = 6
NEGLIGIBLE = 1e-6
"""A standard error below this, relative to the value, is a rounding error."""
Split = Mapping[str, Any]
"""The metrics of one split, with the costs of the model."""


@dataclass(frozen=True)
class Column:
    """One metric in a table."""

    key: str
    head: str
    where: tuple[str, ...]
    best: Any = None
    """`min`, `max` or None."""
    digits: int = 3
    scale: float = 1.0
    over: str = ""
    """A heading that it shares with neighbouring columns."""

    def format(self, value: float, error: float | None = None) -> str:
        """The value as the table shows it: with the column's digits, or with those that its standard error allows.

        >>> ece = Column("ece", "ECE %", ("ece",), min, 1, 100)
        >>> ece.format(0.0123), ece.format(0.0123, error=0.0004), ece.format(0.0123, error=0.01)
        ('1.2', '1.23', '1.2')
        """
        is_known = error is not None and error > NEGLIGIBLE * abs(value)
        digits = decimals(self.scale * error) if error and is_known else self.digits
        shown = round(self.scale * value, digits)
        return f"{shown:,.{max(digits, 0)}f}".removeprefix("-" if not shown else "")

    def of(self, values: Any) -> float | None:
        """The value in a run's metrics, or None if it is missing.

        >>> Column("noise_entropy", "", ("ood", "noise", "entropy", "auroc")).of({"ood": {"noise": {"entropy": None}}})
        """
        value = _at(values, self.where)
        return value if isinstance(value, (int, float)) else None

    def interval_of(self, values: Any) -> tuple[float, float] | None:
        """The bootstrap interval in a run's metrics, which is under `interval` at some level above the value.

        >>> auroc = Column("noise_entropy", "", ("noise", "entropy", "auroc"))
        >>> auroc.interval_of({"noise": {"entropy": {"auroc": 0.9, "interval": {"auroc": [0.8, 1.0]}}}})
        (0.8, 1.0)
        """
        paths = ((*self.where[:i], "interval", *self.where[i:]) for i in range(len(self.where)))
        low, high = next((found for path in paths if (found := _at(values, path)) is not None), (None, None))
        return None if low is None or high is None else (low, high)


def decimals(error: float) -> int:
    """The decimals of a number with this standard error, by the rule of the Particle Data Group.

    The last digit is that of the error's first digit, or of its second one if the error begins with less than 355.

    >>> decimals(0.0077), decimals(0.0123), decimals(4.0), decimals(1.2), decimals(520.0)
    (3, 3, 0, 1, -2)
    """
    place = math.floor(math.log10(error))
    has_two_digits = error / float(10**place) < 3.545
    return min(MOST_DECIMALS, int(has_two_digits) - place)


def _at(values: Any, path: Sequence[str]) -> Any:
    """The entry of nested mappings at a path of keys, or None."""
    for key in path:
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def percent(key: str, head: str, where: Sequence[str], best: Any, over: str = "") -> Column:
    """A share, shown in percent with one decimal."""
    return Column(key, f"{head} %", tuple(where), best, 1, 100, over)


def _coverages(name: str, over: str) -> Iterator[Column]:
    for share in COVERAGES:
        yield Column(f"{name}_{share:.0%}"[:-1], f"{share:.0%}", (name, f"{share:g}"), max, 1, 100, over)


CLASSES = (
    percent("accuracy", "accuracy", ["accuracy"], max),
    Column("nll", "NLL", ("nll",), min),
    percent("ece", "ECE", ["ece"], min),
    percent("noise_entropy", "noise AUROC entropy", ["ood", "noise", "entropy", "auroc"], max),
    percent("noise_epistemic", "noise AUROC epistemic", ["ood", "noise", "epistemic", "auroc"], max),
)
REALS = (
    percent("coverage", "in 90% interval", ["coverage"], None),
    Column("log_density", "log density", ("log_density",), max),
    Column("rmse", "RMSE", ("rmse",), min),
    Column("width", "interval width", ("width",), None),
    percent("noise_std", "noise AUROC total", ["ood", "noise", "std", "auroc"], max),
    percent("noise_epistemic_std", "noise AUROC epistemic", ["ood", "noise", "epistemic_std", "auroc"], max),
)
COSTS = (
    Column("overhead", "added %", ("overhead",), None, 1),
    Column("seconds", "time s", ("seconds",), None, 1),
)
CALIBRATION = (
    percent("top5", "top-5 accuracy", ["top5"], max),
    percent("auroc", "AUROC", ["auroc"], max),
    percent("average_precision", "average precision", ["average_precision"], max),
    Column("brier", "Brier", ("brier",), min),
    Column("gibbs_nll", "Gibbs", ("gibbs_nll",), min, over="NLL"),
    Column("mean_logits_nll", "mean logits", ("mean_logits_nll",), min, over="NLL"),
    percent("ece", "ECE", ["ece"], min),
    percent("ece20", "ECE, 20 bins", ["ece20"], min),
    percent("adaptive_ece", "adaptive ECE", ["adaptive_ece"], min),
    percent("classwise_ece", "class-wise ECE", ["classwise_ece"], min),
    percent("mce", "MCE", ["mce"], min),
    percent("coverage", "in 90% interval", ["coverage"], None),
    Column("width", "interval width", ("width",), None),
    Column("crps", "CRPS", ("crps",), min),
    percent("quantile_error", "quantile error", ["quantile_error"], min),
)
SELECTIVE = (
    Column("aurc", "AURC", ("aurc",), min, 4),
    *_coverages("accuracy_at", "accuracy, %, at coverage"),
    Column("aurc_epistemic", "AURC", ("aurc_epistemic",), min, 4, over="by mutual information"),
    *_coverages("accuracy_at_epistemic", "accuracy, %, at coverage by mutual information"),
)
CONFORMAL = (
    percent("conformal_asked", "asked", ["conformal_asked"], None),
    percent("conformal_coverage", "covered", ["conformal_coverage"], None),
    percent("conformal_worst_class", "covered, worst class", ["conformal_worst_class"], max),
    Column("conformal_size", "classes in a set", ("conformal_size",), min, 2),
    Column("conformal_width", "width", ("conformal_width",), min),
)
UNCERTAINTY = (
    Column("entropy", "total", ("entropy",), None, over="mean entropy, nats"),
    Column("aleatoric", "aleatoric", ("aleatoric",), None, over="mean entropy, nats"),
    Column("epistemic", "epistemic", ("epistemic",), None, over="mean entropy, nats"),
    Column("std", "total", ("std",), None, over="mean standard deviation"),
    Column("aleatoric_std", "aleatoric", ("aleatoric_std",), None, over="mean standard deviation"),
    Column("epistemic_std", "epistemic", ("epistemic_std",), None, over="mean standard deviation"),
    percent("disagreement", "share of pairs", ["disagreement"], None, "draws that disagree"),
    Column(
        "normalised_disagreement", "relative to error", ("normalised_disagreement",), None, over="draws that disagree"
    ),
)
CORRUPTED = (
    percent("corrupted_accuracy", "cA", ["corrupted", "accuracy"], max),
    Column("corrupted_nll", "cNLL", ("corrupted", "nll"), min),
    percent("corrupted_ece", "cECE", ["corrupted", "ece"], min),
    percent("mce_alexnet", "mCE", ["corrupted", "mce_alexnet"], min, "relative to AlexNet"),
    percent("rmce_alexnet", "rmCE", ["corrupted", "rmce_alexnet"], min, "relative to AlexNet"),
    percent("mce_corruption", "mCE", ["relative", "mce"], min, "relative to the plain network"),
    percent("rmce_corruption", "rmCE", ["relative", "rmce"], min, "relative to the plain network"),
)
COST = (
    *COSTS,
    Column("base_parameters", "plain", ("parameters", "base"), None, 0, over="parameters"),
    Column("added_parameters", "added", ("parameters", "added"), None, 0, over="parameters"),
    Column("draws", "draws", ("draws",), None, 0),
)
DRAW_METRICS = (
    *("epistemic", "epistemic_std", "disagreement", "normalised_disagreement"),
    *("aurc_epistemic", "accuracy_at_epistemic"),
)
"""Metrics that a single network, which has only one draw, does not have."""
SCORES = {
    "entropy": "entropy",
    "std": "total",
    "epistemic": "epistemic",
    "epistemic_std": "epistemic",
    "max_probability": "max. probability",
    "variance": "variance",
    "familiarity": "familiarity",
    "doubt": "doubt",
}
"""The scores by which out-of-distribution inputs are detected, with their headings."""
TOTAL_SCORES = ("entropy", "std")
"""The scores that are total uncertainty: for classes, and for real numbers."""


def main_columns(splits: Sequence[Split]) -> tuple[Column, ...]:
    """The main metrics of the task, and the costs."""
    return (*(CLASSES if "nll" in splits[0] else REALS), *COSTS)


def groups(splits: Sequence[Split]) -> dict[str, tuple[Column, ...]]:
    """All other metrics that some run has, by topic."""
    sets = list(dict.fromkeys(name for split in splits for name in split.get("ood", {})))
    found = {
        "calibration": (*CALIBRATION, *_targets(splits)),
        "conformal": CONFORMAL,
        "selective": SELECTIVE,
        "uncertainty": UNCERTAINTY,
        "ood": tuple(column for name in sets for column in _detection(name)),
        **{f"ood_{name}": tuple(_scores(name)) for name in sets},
        "shift": CORRUPTED,
        "attack": tuple(column for name in _attacks(splits) for column in _attack(name)),
        "cost": COST,
    }
    return {name: some for name, columns in found.items() if (some := _available(columns, splits))}


def rejection_column(name: str) -> Column:
    """The share of an out-of-distribution set that is less certain than all but 5% of the split."""
    return percent(f"{name}_rejected", "detected at 5% false alarms", ["rejected", name], max, name)


def rejection_rates(ood: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """1 - FPR95 of each out-of-distribution set by total uncertainty, without those that have no score.

    >>> rejection_rates({"noise": {"entropy": {"auroc": 0.9, "fpr95": 0.25}}, "letters": {"entropy": None}})
    {'noise': 0.75}
    """
    found = {name: scores[key] for name, scores in ood.items() for key in TOTAL_SCORES if scores.get(key)}
    return {name: 1 - measures["fpr95"] for name, measures in found.items() if "fpr95" in measures}


def _targets(splits: Sequence[Split]) -> list[Column]:
    """The error of each target, if there are several."""
    keys = list(dict.fromkeys(key for split in splits for key in split if key.startswith("rmse_")))
    return [Column(key, key.removeprefix("rmse_"), (key,), min, over="RMSE of") for key in keys]


def _available(columns: Sequence[Column], splits: Sequence[Split]) -> tuple[Column, ...]:
    return tuple(column for column in columns if any(column.of(split) is not None for split in splits))


def _detection(name: str) -> Iterator[Column]:
    """AUROC by total and by epistemic uncertainty, familiarity and doubt, and the share that is detected."""
    for score in ("entropy", "std", "epistemic", "epistemic_std", "familiarity", "doubt"):
        yield percent(f"{name}_{score}", f"AUROC {SCORES[score]}", ["ood", name, score, "auroc"], max, name)
    yield rejection_column(name)


def _scores(name: str) -> Iterator[Column]:
    """The AUROC by every score, and the other metrics by the main ones: a page is no wider."""
    main = {score: head for score, head in SCORES.items() if head in ("entropy", "total", "epistemic", "doubt")}
    for measure, over, best in (("auroc", "AUROC", max), ("average_precision", "AP", max), ("fpr95", "FPR95", min)):
        for score, head in (SCORES if measure == "auroc" else main).items():
            key = f"{name}_{score}" if measure == "auroc" else f"{name}_{score}_{measure}"
            yield Column(key, head, ("ood", name, score, measure), best, 1, 100, f"{over}, %")


def _attacks(splits: Sequence[Split]) -> list[str]:
    return list(dict.fromkeys(name for split in splits for name in split.get("attack", {})))


def _attack(name: str) -> Iterator[Column]:
    at = ("attack", name)
    yield percent(f"{name}_clean_accuracy", "clean", [*at, "clean_accuracy"], max, f"accuracy, {name}")
    yield percent(f"{name}_robust_accuracy", "attacked", [*at, "robust_accuracy"], max, f"accuracy, {name}")
    for score in ("entropy", "epistemic"):
        where = [*at, "average_precision", score]
        yield percent(f"{name}_{score}_ap", score, where, max, f"detection AP, {name}")
