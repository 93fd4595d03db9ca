"""mCE and rmCE of each run in a comparison, relative to the plain network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bayesify.lab.recipes.methods import PlainPart
from bayesify.lab.runs import Run
from bayesify.lab.shift import ShiftError, mean_corruption_error, relative_mean_corruption_error


def add_corruption_errors(runs: Mapping[str, Sequence[Run]], flat: Mapping[Path, dict[str, Any]]) -> None:
    """Add mCE and rmCE to each run, relative to the first plain network with the same seed."""
    all_runs = [run for some in runs.values() for run in some]
    plain = {
        run.recipe.seed: flat[run.folder] for run in reversed(all_runs) if isinstance(run.recipe.method, PlainPart)
    }
    for run in all_runs:
        ours, theirs = flat[run.folder], plain.get(run.recipe.seed, {})
        measured = all(key in each for each in (ours, theirs) for key in ("corrupted", "shift"))
        if measured and ours.get("shift_rows") == theirs.get("shift_rows"):
            ours["relative"] = _relative_errors(ours, theirs)


def _relative_errors(ours: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, float]:
    """mCE and rmCE, without those whose denominator is zero."""
    shift, reference, found = ours["shift"], plain["shift"], {}
    with suppress(ShiftError):  # the plain network makes no error
        found["mce"] = mean_corruption_error(shift, reference)
    with suppress(ShiftError):  # some corruption does not harm the plain network
        found["rmce"] = relative_mean_corruption_error(shift, _clean_accuracy(ours), reference, _clean_accuracy(plain))
    return found


def _clean_accuracy(found: Mapping[str, Any]) -> float:
    """The accuracy on the same rows without corruption."""
    clean: dict[str, float] = next(iter(found["shift"].values())).get("0", found)
    return clean["accuracy"]
