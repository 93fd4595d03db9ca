"""`summary_lines`: the few lines about a run that matter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bayesify.lab.runs import Run

SHOWN = {"accuracy": "accuracy", "rmse": "RMSE", "nll": "NLL", "ece": "ECE"}
"""The metrics that are shown of a split, with the name that the field has for them."""
SHARE = "0.8"
"""The share of the least doubtful rows whose accuracy is shown."""


def summary_lines(run: Run) -> list[str]:
    """What matters about an evaluated run: how good it is, how it abstains, what it cost, where the rest is.

    Args:
        run: An evaluated run.

    Returns:
        At most six lines; the last one says how to go on.
    """
    metrics, facts = run.metrics, run.facts
    split = next((name for name in ("test", "validation", "train") if metrics.get(name)), None)
    found = metrics[split] if split else {}
    return [*_quality(split, found), *_calibrated(found), *_abstention(metrics), *_model(run, metrics, facts)]


def _quality(split: str | None, found: Mapping[str, Any]) -> Iterator[str]:
    if split is None:
        return
    shown = ", ".join(f"{words} {_with_interval(found, name)}" for name, words in SHOWN.items() if found.get(name))
    if found.get("coverage") is not None:
        shown += f", {found['coverage']:.1%} in 90% intervals"
    yield f"{split} ({found['n']:,} rows): {shown}"
    chosen = found.get("accuracy_at", {}).get(SHARE)
    if chosen is not None:
        yield f"accuracy on the {float(SHARE):.0%} of rows that it is surest of: {chosen:.3f}"


def _calibrated(found: Mapping[str, Any]) -> Iterator[str]:
    if found.get("conformal_coverage") is None:
        return
    asked, held = found["conformal_asked"], found["conformal_coverage"]
    size = found.get("conformal_size")
    what = f"sets of {size:.2f} classes on average" if size is not None else "conformal intervals"
    yield f"{what} for a coverage of {asked:.0%} hold the truth in {held:.1%} of rows"


def _abstention(metrics: Mapping[str, Any]) -> Iterator[str]:
    level = metrics.get("abstain")
    if level:
        yield (
            f"predictions abstain where {level['by']} is above {level['value']:.3g}, as for {level['share']:.0%} of the"
            f" {level['split']} rows"
        )


def _model(run: Run, metrics: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[str]:
    recipe, parameters = run.recipe, metrics.get("parameters") or {}
    method = recipe.method.name  # type: ignore[union-attr]
    cost = f"{parameters.get('base', 0):,} parameters and {parameters.get('added', 0):,} of the method"
    draws = metrics.get("draws", 1)
    yield f"{recipe.model.name} with {method}: {cost}, {draws:g} draws, trained in {facts.get('seconds') or 0:.0f} s"
    if "noise" in facts:
        yield f"noise: {facts['noise']}"


def _with_interval(found: Mapping[str, Any], name: str) -> str:
    low, high = found.get("interval", {}).get(name, (None, None))
    return f"{found[name]:.3g}" + (f" ({low:.3g} to {high:.3g})" if low is not None else "")
