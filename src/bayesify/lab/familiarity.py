"""How familiar inputs are to a run's model, and why it abstains."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import bayesify as by
from bayesify.errors import BayesifyError
from bayesify.lab.data import Columns, Data, Examples
from bayesify.lab.data.examples import evenly_spread
from bayesify.lab.metrics import scores
from bayesify.lab.runs import Run
from bayesify.lab.trained import Trained
from bayesify.prediction.results import Prediction, Regression

MOST_ROWS, MOST_HELD_OUT = 10_000, 2_000
"""The familiarity is fitted to at most so many training rows, and ranked by so many validation rows."""
LEAST_HELD_OUT = 50
"""With fewer validation rows than this, training rows are compared with each other."""
REASON_SHARE = 1 / 3
"""A part of the doubt is a reason if it makes up this share of it, as one of two always does, or is enough alone."""


def fit_familiarity(run: Run, data: Data) -> None:
    """Fit the familiarity of a run's model, and save it in the run's folder.

    A network without features that it can use goes without; `run.json` then says why.

    Args:
        run: The run, with its model saved.
        data: The data that it was trained on.
    """
    trained = run.load()
    train, held_out = evenly_spread(data.train, MOST_ROWS), evenly_spread(data.validation, MOST_HELD_OUT)
    is_enough = len(held_out) >= LEAST_HELD_OUT
    try:
        found = by.Familiarity.fit(
            trained.model, _pairs(trained, train), held_out=_pairs(trained, held_out) if is_enough else None
        )
        usual = trained.predict(held_out if is_enough else evenly_spread(train, MOST_HELD_OUT))
        found.calibrated(usual).save(run.familiarity_file)
    except BayesifyError as error:
        run.note(familiarity=f"not fitted: {error}")


def reasons(p: Prediction, score: str, level: float, familiarity: by.Familiarity | None = None) -> list[list[str]]:
    """Why the model abstains on each row: it is "ambiguous", "models disagree", or it is "unfamiliar".

    Args:
        p: A prediction.
        score: The score by which the model abstains.
        level: It abstains on rows with a score above this.
        familiarity: The one that the doubt is from; only the score "doubt" needs it.

    Returns:
        A list for each row; empty for those that it does not abstain on.
    """
    doubts = familiarity.doubts(p) if score == "doubt" and familiarity is not None else {}
    value = scores(p)[score]
    flagged, enough = value > level, (REASON_SHARE * value).clamp_max(level)
    unsure = torch.full_like(flagged, score not in ("doubt", "familiarity"))
    unfamiliar = torch.full_like(flagged, score == "familiarity")
    if doubts:
        unsure, unfamiliar = (doubts[name] >= enough for name in ("uncertain", "unfamiliar"))
    disagree = _epistemic_share(p) >= 0.5
    parts = {
        "ambiguous": unsure & ~disagree & (score not in ("epistemic", "epistemic_std")),
        "models disagree": unsure & (disagree | (score in ("epistemic", "epistemic_std"))),
        "unfamiliar": unfamiliar,
    }
    return [[name for name, rows in parts.items() if flagged[i] and rows[i]] for i in range(len(flagged))]


def odd_columns(trained: Trained, examples: Examples) -> list[list[str]]:
    """For each row of a table, the columns out of their range in the training data."""
    f = trained.familiarity
    if f is None or f.low is None:
        return [[] for _ in range(len(examples))]
    names = trained.inputs.names if isinstance(trained.inputs, Columns) else tuple(map(str, range(len(f.low))))
    found: list[list[str]] = []
    for x in trained.prepared_batches(examples, trained.recipe.evaluation.batch_size):
        outside = f.out_of_range(x).tolist()
        found += [
            [f"column {name} out of range" for name, is_out in zip(names, row, strict=True) if is_out]
            for row in outside
        ]
    return found


def made_up_values(trained: Trained, examples: Examples) -> list[list[str]]:
    """For each row of a table, columns with a missing value or category unlike any in the training data."""
    if not isinstance(trained.inputs, Columns):
        return [[] for _ in range(len(examples))]
    return trained.inputs.remarks(examples.raw(torch.arange(len(examples))))


def _epistemic_share(p: Prediction) -> Tensor:
    """The epistemic part of the uncertainty of each row: of the entropy, or of the variance."""
    total, epistemic = list(scores(p).values())[:2]
    if isinstance(p, Regression):
        total, epistemic = total.square(), epistemic.square()
    return epistemic / total.clamp_min(1e-30)


def _pairs(trained: Trained, examples: Examples) -> Iterator[tuple[Tensor, Tensor]]:
    """Prepared inputs and targets, batch by batch."""
    size = trained.recipe.evaluation.batch_size
    inputs = trained.prepared_batches(examples, size)
    yield from zip(inputs, examples.targets.split(size), strict=True)
