"""Conformal prediction of a run: sets and intervals that are calibrated on rows of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import bayesify as by
from bayesify.errors import BayesifyError
from bayesify.lab.data import Data, Examples, Labels, Masks, Reals, Targets
from bayesify.lab.metrics.bootstrap import bootstrap
from bayesify.lab.metrics.weighted import Measure, evaluate_measures, mean
from bayesify.lab.recipes import AdaptivePart, ConformalPart, Recipe
from bayesify.lab.run_files import read_json, write_json
from bayesify.lab.runs import Run, RunError
from bayesify.lab.trained import EvaluationError, Trained
from bayesify.prediction.conformal import REAL_SCORES
from bayesify.prediction.results import Prediction


def require_calibration_rows(recipe: Recipe, data: Data) -> None:
    """Raise unless the calibration rows are enough for what `evaluation.conformal` asks for, and fit it."""
    if len(data.calibration):
        if isinstance(data.targets, (Labels, Masks)):
            raise EvaluationError("data.calibration: conformal sets are for one class or real numbers; leave it out")
        likelihood = by.Gaussian() if isinstance(data.targets, Reals) else by.Categorical()
        anything = likelihood.interpret(torch.zeros(len(data.calibration), data.targets.count))
        _calibrated(anything, data.calibration, recipe.evaluation.conformal)
    elif recipe.evaluation.conformal != ConformalPart():
        raise EvaluationError(
            "evaluation.conformal needs calibration rows, which choose nothing else: train with data.calibration=0.1"
        )


def calibrated_rule(trained: Trained, data: Data) -> by.Conformal | None:
    """What `evaluation.conformal` asks for, calibrated on the calibration rows; None if there are none."""
    require_calibration_rows(trained.recipe, data)
    if not len(data.calibration):
        return None
    return _calibrated(trained.predict(data.calibration), data.calibration, trained.recipe.evaluation.conformal)


def save_rule(run: Run, trained: Trained, rule: by.Conformal | None) -> None:
    """Write the rule and the draws that it is for to the run's folder; without one, remove an earlier one."""
    if rule is None:
        run.conformal_file.unlink(missing_ok=True)
    else:
        write_json(run.conformal_file, {"samples": _draws(trained.recipe, None), "rule": rule.to_dict()})


def rule_for(run: Run, trained: Trained, samples: int | None, coverage: float | None) -> by.Conformal | None:
    """The rule for a prediction with these draws.

    That is the saved one if it is for as many draws, and for the coverage if one is asked for. If not, and if a
    coverage is asked for, it is calibrated anew, for which the run's data must be there.
    """
    if run.conformal_file.exists():
        rule, draws = _read_rule(run, trained.targets)
        if draws == _draws(trained.recipe, samples) and coverage in (None, rule.coverage):
            return rule
    if coverage is None:
        return None
    rows = run.data().calibration
    if not len(rows):
        raise RunError(
            f"{run.folder}: it has no calibration rows, without which no coverage can be asked for; train it with "
            "data.calibration=0.1"
        )
    part = trained.recipe.evaluation.conformal.model_copy(update={"coverage": coverage})
    return _calibrated(trained.predict(rows, samples), rows, part)


def conformal_metrics(
    rule: by.Conformal, p: Prediction, y: Tensor, targets: Targets
) -> tuple[dict[str, float | None], dict[str, tuple[float, float]]]:
    """How often sets or intervals hold the truth, how large they are, and the bootstrap intervals of both.

    For classes `conformal_size` is the mean number of classes in a set, and `conformal_worst_class` how often sets hold
    the class that they do most rarely. For real targets `conformal_width` is the mean width of intervals, in the
    target's own units. With several targets both are means over them.
    """
    found = rule(p)
    covered, size = found.covers(y).double(), found.size.double()
    if isinstance(targets, Reals):
        width = targets.restore(size, size)[1]
        measures: dict[str, Measure] = {
            "conformal_coverage": mean(covered.mean(1)),
            "conformal_width": mean(width.mean(1)),
        }
        worst = {}
    else:
        measures = {"conformal_coverage": mean(covered), "conformal_size": mean(size)}
        worst = {"conformal_worst_class": min(float(covered[y == label].mean()) for label in y.unique())}
    values = evaluate_measures(measures, len(y), y.device)
    return {"conformal_asked": rule.coverage, **values, **worst}, bootstrap(measures, len(y), y.device)


def conformal_columns(rule: by.Conformal, p: Prediction, targets: Targets) -> dict[str, Any]:
    """The columns of a file of predictions: the classes in each set and their number, or the ends of each interval."""
    found = rule(p)
    if not isinstance(targets, Reals):
        sets = ["; ".join(targets.names[k] for k in row.nonzero().flatten().tolist()) for row in found.set]
        return {"conformal_set": sets, "conformal_size": found.size.numpy()}
    low, high = (targets.restore(bound, bound)[0] for bound in found.interval)
    ends = [""] if targets.count == 1 else [f"_{name}" for name in targets.names]
    bounds = {"conformal_low": low, "conformal_high": high}
    return {
        f"{name}{end}": bound[:, i].contiguous().numpy() for i, end in enumerate(ends) for name, bound in bounds.items()
    }


def _calibrated(p: Prediction, rows: Examples, part: ConformalPart) -> by.Conformal:
    try:
        return by.conformal(p, rows.targets, **part.model_dump())
    except BayesifyError as error:
        raise EvaluationError(f"evaluation.conformal, with {len(rows)} rows of data.calibration: {error}") from error


def _draws(recipe: Recipe, samples: int | None) -> Any:
    """How many draws are asked for, as JSON has it."""
    asked = recipe.evaluation.samples if samples is None else samples
    return asked.model_dump() if isinstance(asked, AdaptivePart) else asked


def _read_rule(run: Run, targets: Targets) -> tuple[by.Conformal, Any]:
    """The rule in the run's folder, and the draws that it is for."""
    values = read_json(run.conformal_file)
    try:
        rule = by.Conformal.from_dict(values["rule"])
        if rule.shape != (targets.count,) or (rule.score in REAL_SCORES) != isinstance(targets, Reals):
            raise RunError(f"{rule} is for other targets")
        return rule, values["samples"]
    except (BayesifyError, KeyError) as error:
        raise RunError(
            f"{run.conformal_file}: {error}; the file was edited or damaged: delete it, then run `bayesify evaluate "
            f"{run.folder}`"
        ) from error
