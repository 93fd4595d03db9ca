"""By which score, and above which value of it, a run's model abstains."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bayesify.lab.data.errors import suggest
from bayesify.lab.evaluation.rows import rows_of
from bayesify.lab.run_files import RunError
from bayesify.lab.runs import Run

SYNONYMS = {"mutual_information": "epistemic", "total": "entropy"}
"""Other names of scores."""
NO_SCORES = ("aleatoric", "confidence", "correct", "error", "quantile")
"""Arrays of an evaluation that are no scores to abstain by."""


def threshold(values: Tensor, share: float) -> float:
    """The value that a share of the values exceeds.

    >>> threshold(torch.tensor([0.1, 0.4, 0.2, 0.3]), 0.25)
    0.30000001192092896
    """
    descending = values.sort(descending=True).values
    above = int(share * len(values) + 1e-9)
    below_all = torch.nextafter(descending[-1], descending.new_tensor(-torch.inf))
    return float(torch.cat([descending, below_all[None]])[above])


def abstention_level(run: Run, share: float | None = None, score: str | None = None) -> dict[str, Any]:
    """The score and the value above which the model abstains.

    Args:
        run: An evaluated run.
        share: The share of validation inputs to abstain on; by default that of the evaluation.
        score: The score; by default that of the evaluation.

    Returns:
        The score `by`, if it is known, and the `value`.

    Raises:
        RunError: If the run is not evaluated, or has no such score.
    """
    known = run.metrics if (run.folder / "metrics.json").is_file() else {}
    if not known.get("threshold"):
        raise RunError(
            f"{run.folder}: no metrics.json with the abstention threshold; run `bayesify evaluate {run.folder}`"
        )
    found: dict[str, Any] = known.get("abstain") or dict(known["threshold"])
    if share is None and score is None:
        return found
    if share is not None and not 0 <= share <= 1:
        raise RunError(f"abstain={share!r}: expected the share of inputs to abstain on, from 0 to 1, such as 0.2")
    split = found.get("split") or "validation"
    name, values = _score(run, split, score or found.get("by"))
    share = found.get("share", 0.05) if share is None else share
    return {"by": name, "value": threshold(values, share), "share": share, "split": split}


def _score(run: Run, split: str, wanted: str | None) -> tuple[str, Tensor]:
    """A score by its name or another one, and its values for the rows of a split; by default the first one."""
    start = f"{split}_"
    arrays = {name.removeprefix(start): array for name, array in rows_of(run).items() if name.startswith(start)}
    scores = {name: array for name, array in arrays.items() if name not in NO_SCORES}
    name = wanted if wanted is None or wanted in scores else SYNONYMS.get(wanted, wanted)
    name = next(iter(scores), "") if name is None else name
    if name not in scores:
        names = [*(name for name, own in SYNONYMS.items() if own in scores), *scores]
        raise RunError(f"score={name!r}: this run has no such score; {suggest(name, names)}")
    return name, torch.from_numpy(scores[name])
