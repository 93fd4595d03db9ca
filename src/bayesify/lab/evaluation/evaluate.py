"""`evaluate`: measure a run's model, and keep what was found in the run's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import bayesify as by
from bayesify.lab.data import Classes, Examples, Reals
from bayesify.lab.data.examples import some_rows
from bayesify.lab.evaluation.predictive import EvaluationError, predictive
from bayesify.lab.evaluation.robustness import attacked, corrupted, require_measurable, shifted_metrics
from bayesify.lab.evaluation.rows import GALLERY, ROWS, gallery, keep, outcomes
from bayesify.lab.evaluation.strange import noise, other_sets
from bayesify.lab.metrics import (
    accuracy_at,
    buckets,
    classification_metrics,
    detection,
    detection_intervals,
    intervals,
    regression_metrics,
    scores,
    selective_intervals,
)
from bayesify.lab.recipes import Recipe
from bayesify.lab.runs import Run, Trained, write_json
from bayesify.prediction import Classification, Prediction, Regression

SPLITS = ("validation", "test")
STRANGE = 1000
"""So many inputs of noise are set against each split."""


def evaluate(run: Run, *, splits: Sequence[str] = SPLITS, **options: Any) -> dict[str, Any]:
    """Measure a run's model on each split that has rows, and write `metrics.json`.

    `options` are those of a recipe's `evaluation` part, in place of the run's own. Each split has its number of rows,
    the metrics of its task with bootstrap intervals, and under `ood` how well noise and other data sets are told from
    it by each score (null for epistemic ones where a single draw has none); under `shift` and `attack` what is left of
    it on changed inputs, where that is asked for. `threshold` is the total uncertainty above which the `abstain` share
    of the validation rows lies (of the test rows where there is no validation), for the abstain flag of predictions.
    `overhead` is what the method added, in percent. What is known of other splits stays, and so does what is not
    measured again with the same number of draws; the threshold, unless validation rows are measured again.
    """
    trained, data = _with_options(run.load(), options), run.data()
    require_measurable(trained.recipe.evaluation, trained.inputs, trained.targets)
    chosen = {split: getattr(data, split) for split in _known(splits) if len(getattr(data, split))}
    if not chosen:
        raise EvaluationError(f"{run.folder}: no row in {' or '.join(splits)}; set data.validation or data.test")
    others = other_sets(trained.recipe.evaluation.ood, trained.inputs, taken=("noise", "train", *SPLITS))
    strange = {"noise": noise(trained.inputs, STRANGE), **others}
    unfamiliar = {name: predictive(trained, examples) for name, examples in strange.items()}
    found = {split: predictive(trained, examples) for split, examples in chosen.items()}
    known = run.metrics if (run.folder / "metrics.json").exists() else {}
    metrics = dict(known)
    for split, p in found.items():
        new = _split(p, chosen[split], unfamiliar, trained)
        metrics[split] = _kept(known.get(split, {}), new)
    metrics |= _costs(trained) | {"draws": unfamiliar["noise"].samples}
    metrics["threshold"] = _threshold(known, found, trained.recipe.evaluation.abstain)
    keep(run, GALLERY, {split: gallery(p, chosen[split], trained) for split, p in found.items()})
    rows = {split: outcomes(p, chosen[split].targets) for split, p in found.items()}
    if "test" in found or "test" not in known:  # strange rows are to have as many draws as those they are shown with
        rows |= {name: scores(p) for name, p in unfamiliar.items()}
    keep(run, ROWS, rows)
    write_json(run.folder / "metrics.json", metrics)
    return metrics


def measured(p: Prediction, y: Tensor, trained: Trained) -> dict[str, Any]:
    """The metrics of the task that the model was trained for."""
    if isinstance(p, Classification) and isinstance(trained.targets, Classes):
        return classification_metrics(p, y)
    if isinstance(p, Regression) and isinstance(trained.targets, Reals):
        return regression_metrics(p, y, trained.targets)
    raise EvaluationError(f"{type(p).__name__} for targets that are {type(trained.targets).__name__}: no metrics fit")


def threshold(p: Prediction, share: float) -> dict[str, Any]:
    """The total uncertainty above which a share of the rows lies, and of which kind it is.

    >>> p = by.Categorical().predictive(torch.tensor([[[0.0, 0.0], [9.0, 0.0], [7.0, 0.0], [8.0, 0.0]]]))
    >>> found = threshold(p, 0.25)
    >>> found["by"], (p.entropy > found["value"]).tolist()
    ('entropy', [True, False, False, False])
    """
    kind, values = next(iter(scores(p).items()))
    falling = values.sort(descending=True).values
    above = int(share * len(values) + 1e-9)
    lowest = torch.nextafter(falling[-1], falling.new_tensor(-torch.inf))
    return {"by": kind, "value": float(torch.cat([falling, lowest[None]])[above]), "share": share}


def _with_options(trained: Trained, options: Mapping[str, Any]) -> Trained:
    """The model with other options of evaluation, checked as a recipe's are."""
    plain = trained.recipe.plain()
    given = {key: value for key, value in options.items() if value is not None}
    return replace(trained, recipe=Recipe.of({**plain, "evaluation": {**plain["evaluation"], **given}}))


def _split(p: Prediction, examples: Examples, strange: Mapping[str, Prediction], trained: Trained) -> dict[str, Any]:
    """All that is measured on one split."""
    reals = trained.targets if isinstance(trained.targets, Reals) else None
    bounds = intervals(p, examples.targets, reals)
    found: dict[str, Any] = {
        "n": len(examples),
        "draws": _draws(p),
        **measured(p, examples.targets, trained),
        "interval": _lists(bounds),
        "ood": {name: _detected(scores(p), scores(other)) for name, other in strange.items()},
    }
    if isinstance(p, Classification):
        found |= {"accuracy_at": accuracy_at(p, examples.targets), "buckets": buckets(p, examples.targets)}
        each = selective_intervals(p, examples.targets)
        found["interval"] |= {name: _lists(some) for name, some in each.items()}
    options = trained.recipe.evaluation
    few = some_rows(examples, options.rows)
    if options.shift:
        found |= {"shift": shifted_metrics(trained, few, options.shift), "shift_rows": len(few)}
    if options.attack is not None:
        found["attack"] = {options.attack.name: attacked(trained, few, options.attack)}
    return found


def _draws(p: Prediction) -> float:
    """The number of draws, the mean over rows where it is adaptive."""
    mean = float(p.draws_used.double().mean())
    return p.samples if mean == p.samples else mean


def _lists(bounds: Mapping[str, tuple[float, float]]) -> dict[str, list[float]]:
    """As JSON has them."""
    return {name: list(pair) for name, pair in bounds.items()}


def _detected(familiar: Mapping[str, Tensor], strange: Mapping[str, Tensor]) -> dict[str, Any]:
    """How well each score tells strange inputs from familiar ones, with intervals."""
    found, bounds = detection(familiar, strange), _lists(detection_intervals(familiar, strange))
    return {name: each and {**each, "interval": {"auroc": bounds[name]}} for name, each in found.items()}


def _kept(known: Mapping[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """What is new, with what was measured before by as many draws and not again."""
    same = known.get("draws") == new["draws"] and known.get("n") == new["n"]
    old = dict(known) if same else {}
    if new.get("shift_rows", old.get("shift_rows")) != old.get("shift_rows"):
        old.pop("shift", None)
    inner = {key: {**old.get(key, {}), **new.get(key, {})} for key in ("ood", "shift", "attack")}
    found = {**old, **new, **{key: value for key, value in inner.items() if value}}
    found.pop("corrupted", None)
    return found | corrupted(found.get("shift", {}))


def _costs(trained: Trained) -> dict[str, Any]:
    summary = by.summary(trained.model)
    return {"overhead": summary.overhead, "parameters": {"base": summary.base, "added": summary.added}}


def _threshold(known: Mapping[str, Any], found: Mapping[str, Prediction], share: float) -> dict[str, Any]:
    limit: dict[str, Any] | None = known.get("threshold")
    judge = next((split for split in SPLITS if split in found), next(iter(found)))
    if limit is not None and judge not in ("validation", limit["split"]):
        return limit
    return {**threshold(found[judge], share), "split": judge}


def _known(splits: Sequence[str]) -> Sequence[str]:
    for split in splits:
        if split not in ("train", *SPLITS):
            raise EvaluationError(f"no split is called {split!r}; there are train, validation and test")
    return splits
