"""How good a trained model is: `metrics.json` in its run's folder, and the rows behind it."""

from bayesify.lab.evaluation.evaluate import SPLITS, evaluate, measured, threshold
from bayesify.lab.evaluation.predictive import EvaluationError, predictive
from bayesify.lab.evaluation.rows import gallery_of, rows_of
from bayesify.lab.evaluation.strange import noise, other_sets

__all__ = [
    "SPLITS",
    "EvaluationError",
    "evaluate",
    "gallery_of",
    "measured",
    "noise",
    "other_sets",
    "predictive",
    "rows_of",
    "threshold",
]
