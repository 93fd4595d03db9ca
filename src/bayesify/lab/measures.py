"""The figures by which models are compared: where each is in a run's metrics, how it is shown, which value is best."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Split = Mapping[str, Any]
"""What `metrics.json` says of one split, with the costs of the model beside it."""


@dataclass(frozen=True)
class Column:
    """One figure of a table."""

    key: str
    head: str
    where: tuple[str, ...]
    best: Any = None
    """`min`, `max` or None."""
    digits: int = 3
    scale: float = 1.0
    over: str = ""
    """What it has in common with its neighbours: a heading over theirs."""

    def show(self, value: float) -> str:
        """The value as the table has it.

        >>> Column("ece", "ECE %", ("ece",), min, 1, 100).show(0.0123)
        '1.2'
        """
        return f"{self.scale * value:,.{self.digits}f}"

    def of(self, values: Any) -> float | None:
        """The value in a run's metrics, or None where they don't have it.

        >>> Column("noise_entropy", "", ("ood", "noise", "entropy", "auroc")).of({"ood": {"noise": {"entropy": None}}})
        """
        value = _at(values, self.where)
        return value if isinstance(value, (int, float)) else None

    def interval_of(self, values: Any) -> tuple[float, float] | None:
        """The bootstrap interval in a run's metrics, which is under `interval` beside some step of the way.

        >>> auroc = Column("noise_entropy", "", ("noise", "entropy", "auroc"))
        >>> auroc.interval_of({"noise": {"entropy": {"auroc": 0.9, "interval": {"auroc": [0.8, 1.0]}}}})
        (0.8, 1.0)
        """
        ways = ((*self.where[:i], "interval", *self.where[i:]) for i in range(len(self.where)))
        low, high = next((found for way in ways if (found := _at(values, way)) is not None), (None, None))
        return None if low is None or high is None else (low, high)


def _at(values: Any, way: Sequence[str]) -> Any:
    """What nested values have there, or None."""
    for key in way:
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def percent(key: str, head: str, where: Sequence[str], best: Any, over: str = "") -> Column:
    """A share, shown in percent with one digit."""
    return Column(key, f"{head} %", tuple(where), best, 1, 100, over)


CLASSES = (
    percent("accuracy", "accuracy", ["accuracy"], max),
    Column("nll", "NLL", ("nll",), min),
    percent("ece", "ECE", ["ece"], min),
    percent("noise_entropy", "noise AUROC entropy", ["ood", "noise", "entropy", "auroc"], max),
    percent("noise_epistemic", "noise AUROC epistemic", ["ood", "noise", "epistemic", "auroc"], max),
)
REALS = (
    Column("rmse", "RMSE", ("rmse",), min),
    Column("log_density", "log density", ("log_density",), max),
    percent("coverage", "in 90% interval", ["coverage"], None),
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
    percent("ece", "ECE", ["ece"], min),
    percent("ece20", "ECE, 20 bins", ["ece20"], min),
    percent("adaptive_ece", "adaptive ECE", ["adaptive_ece"], min),
    percent("classwise_ece", "class-wise ECE", ["classwise_ece"], min),
    percent("mce", "MCE", ["mce"], min),
    Column("crps", "CRPS", ("crps",), min),
    percent("coverage", "in 90% interval", ["coverage"], None),
    Column("width", "interval width", ("width",), None),
    percent("quantile_error", "quantile error", ["quantile_error"], min),
)
SELECTIVE = (
    Column("aurc", "AURC", ("aurc",), min, 4),
    percent("accuracy_at_95", "95% answered", ["accuracy_at", "0.95"], max, "accuracy with"),
    percent("accuracy_at_90", "90% answered", ["accuracy_at", "0.9"], max, "accuracy with"),
    percent("accuracy_at_80", "80% answered", ["accuracy_at", "0.8"], max, "accuracy with"),
)
UNCERTAINTY = (
    Column("entropy", "total", ("entropy",), None, over="mean entropy, nats"),
    Column("aleatoric", "aleatoric", ("aleatoric",), None, over="mean entropy, nats"),
    Column("epistemic", "epistemic", ("epistemic",), None, over="mean entropy, nats"),
    Column("std", "total", ("std",), None, over="mean standard deviation"),
    Column("aleatoric_std", "aleatoric", ("aleatoric_std",), None, over="mean standard deviation"),
    Column("epistemic_std", "epistemic", ("epistemic_std",), None, over="mean standard deviation"),
    percent("disagreement", "all", ["disagreement"], None, "draws that disagree"),
    Column("normalised_disagreement", "per error", ("normalised_disagreement",), None, over="draws that disagree"),
)
CORRUPTED = (
    percent("corrupted_accuracy", "cA", ["corrupted", "accuracy"], max),
    Column("corrupted_nll", "cNLL", ("corrupted", "nll"), min),
    percent("corrupted_ece", "cECE", ["corrupted", "ece"], min),
    percent("mce_corruption", "mCE", ["relative", "mce"], min, "of the plain network's errors"),
    percent("rmce_corruption", "rmCE", ["relative", "rmce"], min, "of the plain network's errors"),
)
COST = (
    *COSTS,
    Column("base_parameters", "plain", ("parameters", "base"), None, 0, over="parameters"),
    Column("added_parameters", "added", ("parameters", "added"), None, 0, over="parameters"),
    Column("draws", "draws", ("draws",), None, 0),
)
OF_DRAWS = ("epistemic", "epistemic_std", "disagreement", "normalised_disagreement")
"""What a single network, whose draws all agree, does not have."""
SCORES = {
    "entropy": "entropy",
    "std": "total",
    "epistemic": "epistemic",
    "epistemic_std": "epistemic",
    "max_probability": "max. probability",
    "variance": "variance",
}
"""The scores by which strange inputs are detected, as headings."""
TOTALS = ("entropy", "std")
"""Those that are total uncertainty: the one of classes, and that of real numbers."""


def main_columns(splits: Sequence[Split]) -> tuple[Column, ...]:
    """The few figures that everyone asks for first, of the task that the runs have."""
    return (*(CLASSES if "nll" in splits[0] else REALS), *COSTS)


def groups(splits: Sequence[Split]) -> dict[str, tuple[Column, ...]]:
    """All other figures that some run has, by what they are about."""
    sets = list(dict.fromkeys(name for split in splits for name in split.get("ood", {})))
    found = {
        "calibration": (*CALIBRATION, *_targets(splits)),
        "selective": SELECTIVE,
        "uncertainty": UNCERTAINTY,
        "ood": tuple(column for name in sets for column in _detection(name)),
        **{f"ood_{name}": tuple(_scores(name)) for name in sets},
        "shift": CORRUPTED,
        "attack": tuple(column for name in _attacks(splits) for column in _attack(name)),
        "cost": COST,
    }
    return {name: had for name, columns in found.items() if (had := _had(columns, splits))}


def rejected(name: str) -> Column:
    """The share of a strange set that is less certain than all but 5% of the split."""
    return percent(f"{name}_rejected", "rejected at 5% false alarms", ["rejected", name], max, name)


def shares_rejected(ood: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """1 - FPR95 of each strange set by total uncertainty, where that tells anything apart.

    >>> shares_rejected({"noise": {"entropy": {"auroc": 0.9, "fpr95": 0.25}}, "letters": {"entropy": None}})
    {'noise': 0.75}
    """
    found = {name: scores[key] for name, scores in ood.items() for key in TOTALS if scores.get(key)}
    return {name: 1 - measures["fpr95"] for name, measures in found.items() if "fpr95" in measures}


def _targets(splits: Sequence[Split]) -> list[Column]:
    """The error of each target, where there are several."""
    keys = list(dict.fromkeys(key for split in splits for key in split if key.startswith("rmse_")))
    return [Column(key, key.removeprefix("rmse_"), (key,), min, over="RMSE of") for key in keys]


def _had(columns: Sequence[Column], splits: Sequence[Split]) -> tuple[Column, ...]:
    return tuple(column for column in columns if any(column.of(split) is not None for split in splits))


def _detection(name: str) -> Iterator[Column]:
    """The area under the ROC curve by total and by epistemic uncertainty, and the share that is rejected."""
    for score in ("entropy", "std", "epistemic", "epistemic_std"):
        yield percent(f"{name}_{score}", f"AUROC {SCORES[score]}", ["ood", name, score, "auroc"], max, name)
    yield rejected(name)


def _scores(name: str) -> Iterator[Column]:
    """Every measure of detection, by every score."""
    for measure, over, best in (("auroc", "AUROC", max), ("average_precision", "AP", max), ("fpr95", "FPR95", min)):
        for score, head in SCORES.items():
            key = f"{name}_{score}" if measure == "auroc" else f"{name}_{score}_{measure}"
            yield Column(key, head, ("ood", name, score, measure), best, 1, 100, f"{over}, %")


def _attacks(splits: Sequence[Split]) -> list[str]:
    return list(dict.fromkeys(name for split in splits for name in split.get("attack", {})))


def _attack(name: str) -> Iterator[Column]:
    at = ("attack", name)
    yield percent(f"{name}_clean_accuracy", "before", [*at, "clean_accuracy"], max, f"accuracy, {name}")
    yield percent(f"{name}_robust_accuracy", "after", [*at, "robust_accuracy"], max, f"accuracy, {name}")
    for score in ("entropy", "epistemic"):
        where = [*at, "average_precision", score]
        yield percent(f"{name}_{score}_ap", score, where, max, f"noticed, AP, {name}")
