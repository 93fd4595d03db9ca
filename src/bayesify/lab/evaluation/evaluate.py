"""`evaluate`: measure a run's model, and write the results to the run's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

import bayesify as by
from bayesify.lab.conformal import calibrated_rule, conformal_metrics, save_rule
from bayesify.lab.data import Classes, Data, Examples, Reals
from bayesify.lab.data.examples import evenly_spread
from bayesify.lab.evaluation.abstention import threshold
from bayesify.lab.evaluation.ood_sets import load_ood_sets, noise
from bayesify.lab.evaluation.robustness import (
    attack_metrics,
    corruption_means,
    imagenet_c_errors,
    require_measurable,
    shift_metrics,
)
from bayesify.lab.evaluation.rows import GALLERY, ROWS, add_arrays, gallery, outcomes
from bayesify.lab.metrics import (
    detection,
    detection_intervals,
    intervals,
    scores,
    selective_intervals,
    selective_metrics,
)
from bayesify.lab.metrics.by_task import measures_of
from bayesify.lab.metrics.weighted import evaluate_measures
from bayesify.lab.recipes import Recipe
from bayesify.lab.recipes.parts import EvaluationPart
from bayesify.lab.runs import Run, write_json
from bayesify.lab.trained import EvaluationError, Trained
from bayesify.prediction.results import Classification, Prediction

SPLITS = ("validation", "test")
PARTS = ("train", "calibration", *SPLITS)
NOISE_INPUTS = 1000
"""The number of noise inputs that each split is compared with."""


def evaluate(run: Run, *, splits: Sequence[str] = SPLITS, **options: Any) -> dict[str, Any]:
    """Measure a run's model on each split that has rows, and write `metrics.json`.

    Results on other splits are kept. So are earlier results on the same split that are not measured again, if the
    number of draws is the same, and the abstention threshold unless the validation split is measured again.

    Args:
        run: The run to evaluate; its training must have finished.
        splits: Which of `train`, `validation` and `test` to measure. Empty splits are skipped.
        **options: Options of a recipe's `evaluation` part that replace the run's own, such as `samples=100`,
            `ood=["kmnist"]`, `shift=["corruptions"]` or `attack={"name": "pgd"}`.

    Returns:
        The contents of `metrics.json`. Each split has the number of rows `n`, the metrics of its task and their
        bootstrap intervals (`interval`); under `ood`, how well each uncertainty score detects noise and other data
        sets (null for epistemic scores of a single network); and under `shift` and `attack`, if asked for, the metrics
        on changed inputs. If there are calibration rows, `conformal_coverage` is how often sets or intervals that are
        calibrated on them hold the truth. `threshold` is the total uncertainty that the `abstain` share of the
        validation rows exceeds (of the test rows, if there is no validation split), `abstain` that of the score
        `abstain_by`.
        `overhead` is the percentage of parameters that the method added.

    Raises:
        EvaluationError: If a split is unknown, all of them are empty, or an option does not fit the data.
    """
    trained, data = _with_options(run.load(), options), run.data()
    require_measurable(trained.recipe.evaluation, trained.inputs, trained.targets)
    examples = {split: getattr(data, split) for split in _require_known(splits) if len(getattr(data, split))}
    if not examples:
        raise EvaluationError(f"{run.folder}: no rows in {' or '.join(splits)}; set data.validation or data.test")
    rule = calibrated_rule(trained, data)
    ood_sets = load_ood_sets(trained.recipe.evaluation.ood, trained.inputs, taken=("noise", "train", *SPLITS))
    ood_sets = {"noise": noise(trained.inputs, NOISE_INPUTS), **ood_sets}
    on_ood = {name: trained.predict(each) for name, each in ood_sets.items()}
    on_splits = {split: trained.predict(each) for split, each in examples.items()}
    known = run.metrics if (run.folder / "metrics.json").exists() else {}
    metrics = dict(known)
    for split, p in on_splits.items():
        found = _merge(known.get(split, {}), _split_metrics(p, examples[split], on_ood, trained, rule))
        found.get("corrupted", {}).update(imagenet_c_errors(found, trained.inputs, trained.targets))
        metrics[split] = found
    metrics |= _costs(trained) | {"draws": on_ood["noise"].samples, "data": _description(data)}
    metrics |= _thresholds(known, on_splits, trained.recipe.evaluation)
    add_arrays(run, GALLERY, {split: gallery(p, examples[split], trained) for split, p in on_splits.items()})
    rows = {split: outcomes(p, examples[split].targets, trained.targets) for split, p in on_splits.items()}
    if "test" in on_splits or "test" not in known:  # the report sets them beside test rows of as many draws
        rows |= {name: scores(p) for name, p in on_ood.items()}
    add_arrays(run, ROWS, rows)
    save_rule(run, trained, rule)
    write_json(run.folder / "metrics.json", metrics)
    return metrics


def task_metrics(p: Prediction, y: Tensor, trained: Trained) -> dict[str, Any]:
    """The metrics of what the model was trained for."""
    return evaluate_measures(measures_of(p, y, trained.targets), len(y), p.draws_used.device)


def abstention_threshold(p: Prediction, share: float, by_score: str = "total") -> dict[str, Any]:
    """The uncertainty, by total or another score of a recipe's `abstain_by`, that a share of the rows exceeds.

    >>> import torch
    >>> p = by.Categorical().predictive(torch.tensor([[[0.0, 0.0], [9.0, 0.0], [7.0, 0.0], [8.0, 0.0]]]))
    >>> found = abstention_threshold(p, 0.25)
    >>> found["by"], (p.entropy > found["value"]).tolist()
    ('entropy', [True, False, False, False])
    """
    known = scores(p)
    total, epistemic = list(known)[:2]
    places = {"total": total, "epistemic": epistemic, "auto": "doubt" if "doubt" in known else total}
    score = places.get(by_score, by_score)
    if score not in known:
        raise EvaluationError(f"evaluation.abstain_by={by_score!r}: the run has no familiarity; train it again")
    return {"by": score, "value": threshold(known[score], share), "share": share}


def _description(data: Data) -> dict[str, Any]:
    """The number of rows in each split, and of each class there; what is missing; the range of real targets."""
    parts = {split: each for split in PARTS if len(each := getattr(data, split))}
    found: dict[str, Any] = {"rows": {split: len(each) for split, each in parts.items()}, "missing": dict(data.missing)}
    if isinstance(data.targets, Classes):
        count = data.targets.count
        found["classes"] = {split: each.targets.bincount(minlength=count).tolist() for split, each in parts.items()}
    if isinstance(data.targets, Reals) and len(data.train):
        own, _ = data.targets.restore(data.train.targets, data.train.targets)
        found["targets"] = {
            name: [float(value) for value in (y.min(), y.median(), y.max())]
            for name, y in zip(data.targets.names, own.unbind(1), strict=True)
        }
    return found


def _with_options(trained: Trained, options: Mapping[str, Any]) -> Trained:
    """The model with other evaluation options, validated like a recipe's."""
    recipe = trained.recipe.plain()
    given = {key: value for key, value in options.items() if value is not None}
    return replace(trained, recipe=Recipe.of({**recipe, "evaluation": {**recipe["evaluation"], **given}}))


def _split_metrics(
    p: Prediction,
    examples: Examples,
    on_ood: Mapping[str, Prediction],
    trained: Trained,
    rule: by.Conformal | None,
) -> dict[str, Any]:
    """Everything that is measured on one split."""
    bounds = intervals(p, examples.targets, trained.targets)
    found: dict[str, Any] = {
        "n": len(examples),
        "draws": _mean_draws(p),
        **task_metrics(p, examples.targets, trained),
        "interval": _as_lists(bounds),
        "ood": {name: _detection_metrics(scores(p), scores(other)) for name, other in on_ood.items()},
    }
    if isinstance(p, Classification) and isinstance(trained.targets, Classes):
        found |= selective_metrics(p, examples.targets)
        selective = selective_intervals(p, examples.targets)
        found["interval"] |= {name: _as_lists(bounds) for name, bounds in selective.items()}
    if rule is not None:
        values, bounds = conformal_metrics(rule, p, examples.targets, trained.targets)
        found |= values
        found["interval"] |= _as_lists(bounds)
    options = trained.recipe.evaluation
    few = evenly_spread(examples, options.rows)
    if options.shift:
        found |= {"shift": shift_metrics(trained, few, options.shift), "shift_rows": len(few)}
    if options.attack is not None:
        found["attack"] = {options.attack.name: attack_metrics(trained, few, options.attack)}
    return found


def _mean_draws(p: Prediction) -> float:
    """The number of draws per row; its mean, if it is adaptive."""
    mean = float(p.draws_used.double().mean())
    return p.samples if mean == p.samples else mean


def _as_lists(bounds: Mapping[str, tuple[float, float]]) -> dict[str, list[float]]:
    """Intervals as JSON stores them."""
    return {name: list(pair) for name, pair in bounds.items()}


def _detection_metrics(in_dist: Mapping[str, Tensor], ood: Mapping[str, Tensor]) -> dict[str, Any]:
    """How well each score detects out-of-distribution inputs, with intervals."""
    found, bounds = detection(in_dist, ood), _as_lists(detection_intervals(in_dist, ood))
    return {name: each and {**each, "interval": {"auroc": bounds[name]}} for name, each in found.items()}


def _merge(known: Mapping[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """New results, and earlier ones that were not measured again, if rows and draws were as many."""
    same = known.get("draws") == new["draws"] and known.get("n") == new["n"]
    old = dict(known) if same else {}
    if new.get("shift_rows", old.get("shift_rows")) != old.get("shift_rows"):
        old.pop("shift", None)
    inner = {key: {**old.get(key, {}), **new.get(key, {})} for key in ("ood", "shift", "attack")}
    found = {**old, **new, **{key: value for key, value in inner.items() if value}}
    found.pop("corrupted", None)
    return found | corruption_means(found.get("shift", {}))


def _costs(trained: Trained) -> dict[str, Any]:
    summary = by.summary(trained.model)
    return {"overhead": summary.overhead, "parameters": {"base": summary.base, "added": summary.added}}


def _thresholds(
    known: Mapping[str, Any], on_splits: Mapping[str, Prediction], options: EvaluationPart
) -> dict[str, Any]:
    """The thresholds of the validation split if that was measured, else the known ones, else another's."""
    earlier: dict[str, Any] | None = known.get("threshold")
    split = next((split for split in SPLITS if split in on_splits), next(iter(on_splits)))
    if earlier is not None and split not in ("validation", earlier.get("split")):
        return {}
    by_score = {"threshold": "total", "abstain": options.abstain_by}
    p = on_splits[split]
    return {key: {**abstention_threshold(p, options.abstain, by), "split": split} for key, by in by_score.items()}


def _require_known(splits: Sequence[str]) -> Sequence[str]:
    for split in splits:
        if split not in ("train", *SPLITS):
            raise EvaluationError(f"no split is called {split!r}; there are train, validation and test")
    return splits
