"""`ResampledRows`: the metrics of a run in resamples of its evaluated rows, to compare it with another on the same."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from bayesify.lab.evaluation.rows import ROWS, damaged, rows_of_split
from bayesify.lab.metrics.bootstrap import percentiles, resample
from bayesify.lab.metrics.calibration import Bins
from bayesify.lab.metrics.ood_detection import area_under_roc
from bayesify.lab.metrics.regression import TAIL
from bayesify.lab.metrics.selective_prediction import SUFFIXES, area_under_risk
from bayesify.lab.metrics.weighted import Measure, average, mean, root
from bayesify.lab.runs import Run

DETECTION_SCORES = ("entropy", "std", "epistemic", "epistemic_std")
"""The scores by which models are compared as detectors of out-of-distribution inputs."""


class ResampledRows:
    """The metrics of one run in resamples of the rows of a split, and of out-of-distribution sets."""

    def __init__(self, run: Run, split: str, arrays: Mapping[str, np.ndarray]) -> None:
        self.run, self.split, self.arrays = run, split, arrays

    @classmethod
    def of(cls, run: Run, split: str) -> ResampledRows | None:
        """Those of a run; None if it lacks the rows, or an earlier version evaluated it."""
        if not (run.folder / ROWS).is_file():
            return None
        arrays = rows_of_split(run, split)
        return cls(run, split, arrays) if f"{split}_truth" in arrays else None

    def difference_interval(self, other: ResampledRows, key: str) -> tuple[float, float] | None:
        """The 95% interval of the difference in a metric; None unless both have it on the same rows."""
        ours, theirs = self._values(key), other._values(key)
        if ours is None or theirs is None or not np.array_equal(self._array("truth"), other._array("truth")):
            return None
        return percentiles(ours - theirs)

    def _array(self, name: str) -> np.ndarray:
        return self.arrays[f"{self.split}_{name}"]

    def _tensor(self, name: str) -> Tensor:
        return torch.from_numpy(self._array(name))

    def _values(self, key: str) -> Tensor | None:
        try:
            return self._of_split.get(key) if key in self._of_split else self._of_sets.get(key)
        except (IndexError, RuntimeError, TypeError, ValueError) as error:  # of arrays of another shape or type
            raise damaged(self.run, ROWS, f"its arrays don't fit each other ({error})") from error

    @cached_property
    def _of_split(self) -> dict[str, Tensor]:
        measures = self._class_measures() if f"{self.split}_label" in self.arrays else self._real_measures()
        return resample(measures, len(self._array("truth")), torch.device("cpu"))

    @cached_property
    def _of_sets(self) -> dict[str, Tensor]:
        """The AUROC of each score on each out-of-distribution set, whose rows are resampled with the split's."""
        found: dict[str, Tensor] = {}
        for name in self.run.metrics[self.split].get("ood", {}):
            known = [score for score in DETECTION_SCORES if f"{name}_{score}" in self.arrays]
            rows = len(self._array("truth"))
            values = {s: torch.from_numpy(np.concatenate([self._array(s), self.arrays[f"{name}_{s}"]])) for s in known}
            measures = {f"{name}_{s}": area_under_roc(v, torch.arange(len(v)) >= rows) for s, v in values.items()}
            found |= resample(measures, max(map(len, values.values()), default=1), torch.device("cpu"))
        return found

    def _class_measures(self) -> dict[str, Measure]:
        correct = self._tensor("correct")
        risks = {f"aurc{suffix}": area_under_risk(self._tensor(by), ~correct) for by, suffix in SUFFIXES.items()}
        expected = Bins(self._tensor("confidence"), correct).expected
        return {"accuracy": mean(correct), "nll": mean(self._tensor("nll")), "ece": expected, **risks}

    def _real_measures(self) -> dict[str, Measure]:
        quantile, squares = self._tensor("quantile"), self._tensor("residual").square()
        inside = ((quantile >= TAIL) & (quantile <= 1 - TAIL)).double().mean(1)
        errors = [root(mean(each)) for each in squares.unbind(1)]
        means = {name: mean(self._tensor(name)) for name in ("log_density", "crps", "width")}
        return {"coverage": mean(inside), "rmse": average(errors), **means}
