"""How good a trained model is: `metrics.json` in its run's folder, and the per-row results behind it."""

from bayesify.lab.evaluation.evaluate import SPLITS, abstention_threshold, evaluate, task_metrics
from bayesify.lab.evaluation.ood_sets import load_ood_sets, noise
from bayesify.lab.evaluation.rows import gallery_of, rows_of
from bayesify.lab.trained import EvaluationError, predictive

__all__ = [
    "SPLITS",
    "EvaluationError",
    "abstention_threshold",
    "evaluate",
    "gallery_of",
    "load_ood_sets",
    "noise",
    "predictive",
    "rows_of",
    "task_metrics",
]
