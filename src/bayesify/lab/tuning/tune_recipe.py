"""`tune`: try a method's options on the validation split, choose, and finish the best run."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesify.conversion.finite import NotFiniteError
from bayesify.lab.baselines.posthoc import needs_training
from bayesify.lab.data import Data, Reals
from bayesify.lab.evaluation.rows import ROWS, add_arrays, require_arrays, rows_of
from bayesify.lab.progress import progress_bar
from bayesify.lab.recipes import Recipe
from bayesify.lab.run_files import read_json, write_json
from bayesify.lab.runs import Run, load_data
from bayesify.lab.trained import EvaluationError
from bayesify.lab.training import Interrupted, train
from bayesify.lab.tuning.choice import Choice, Trial, TuneError, row_nll, row_shares
from bayesify.lab.tuning.grid import Candidate, Grid, candidates_of

SHORT = 1 / 3
"""The share of the epochs, and of the candidates that go on, in the first of two rounds."""
FILE, BEST, TRIED = "tune.json", "best", "trials"


@dataclass(frozen=True)
class Tuned:
    """What `tune` found.

    Attributes:
        choice: The trials, which was chosen and why: `print(tuned.choice)`.
        run: The run with the chosen options, trained and evaluated.
    """

    choice: Choice
    run: Run


def tune(
    recipe: Recipe,
    folder: str | Path,
    *,
    trials: int | None = None,
    grid: Grid | None = None,
    halving: bool = True,
    progress: bool = True,
) -> Tuned:
    """Choose options of a recipe on its validation split, and train it with them.

    Candidates are trained for a third of the epochs first. The better third of them, at least two, and the recipe as it
    is are trained again with all epochs. Of these, the one with the lowest validation NLL (of the mean over draws) is
    chosen; the recipe stays as it is if no other is better by more than one standard error of the paired difference.
    The test split is used only then, to evaluate the chosen run.

    Trials that are finished are not repeated: the same call continues after an interruption.

    Args:
        recipe: The recipe, which is the first candidate.
        folder: Where everything goes: `best` is the chosen run, `trials` has the other runs, `tune.json` the results.
        trials: How many candidates to try, at least 2; by default 6, or all of a given grid.
        grid: Values to try by key, such as `{"method.noise": [0.1, 0.3]}`. By default the noise of the method, or
            for baselines what matters most, then the learning rate and weight decay.
        halving: Whether to train with a third of the epochs first. Without, all candidates get all epochs.
        progress: Whether to show a progress bar.

    Returns:
        The choice, and the run in `folder/best`.

    Raises:
        TuneError: If there are no validation rows or nothing to try, or if the folder holds the trials of another call.
        Interrupted: If training was stopped by Ctrl-C or SIGTERM; finished trials and the checkpoint are kept.
    """
    folder = Path(folder)
    candidates = candidates_of(recipe, grid, trials)
    data = _require_tunable(recipe)
    plan = {"halving": halving, "candidates": {each.name: each.recipe.plain() for each in candidates}}
    _claim(folder, plan)
    rounds = list(rounds_of(candidates, halving))
    tried: list[Trial] = []
    try:
        with progress_bar(sum(count for count, _ in rounds), progress) as bar:
            for count, share in rounds:
                for candidate in _better(candidates, tried, count):
                    bar.update(bar.task_ids[0], description=candidate.name)
                    tried.append(_trial(candidate, share, folder, data))
                    bar.advance(bar.task_ids[0])
            choice = Choice(tuple(tried), "coverage" if isinstance(data.targets, Reals) else "accuracy")
            bar.update(bar.task_ids[0], description=f"evaluate {choice.chosen.name}")
            run = _finish(next(each for each in candidates if each.name == choice.chosen.name), folder)
    except Interrupted as stop:
        raise Interrupted(f"stopped; tune again with the folder {folder} to continue", stop.signal_number) from stop
    write_json(folder / FILE, {"plan": plan, "trials": choice.rows(), "why": choice.why})
    return Tuned(choice, run)


def rounds_of(candidates: Sequence[Candidate], halving: bool) -> Iterator[tuple[int, float]]:
    """How many candidates each round trains, and for what share of their epochs.

    >>> recipe = Recipe.of({"method": "Ensemble"})
    >>> list(rounds_of([Candidate("", recipe)] * 6, halving=True))
    [(6, 0.3333333333333333), (3, 1.0)]
    """
    recipe, go_on = candidates[0].recipe, max(2, round(SHORT * len(candidates))) + 1
    if halving and go_on < len(candidates) and recipe.training.epochs > 1 and needs_training(recipe):
        yield len(candidates), SHORT
        yield go_on, 1.0
    else:
        yield len(candidates), 1.0


def _better(candidates: Sequence[Candidate], tried: Sequence[Trial], count: int) -> list[Candidate]:
    """The first candidate, and the best of the others so far."""
    mean = {trial.name: trial.mean for trial in tried}
    others = sorted(candidates[1:], key=lambda each: mean.get(each.name, 0.0))
    return [candidates[0], *others[: count - 1]]


def _trial(candidate: Candidate, share: float, folder: Path, data: Data) -> Trial:
    """Train a candidate for a share of its epochs, unless that is done, and predict the validation rows."""
    options = candidate.recipe.training
    epochs = max(1, round(share * options.epochs))
    recipe = candidate.recipe.model_copy(update={"training": options.model_copy(update={"epochs": epochs})})
    made = partial(Trial, candidate.name, epochs=epochs, is_final=epochs == options.epochs)
    run = Run(_place(candidate, epochs, folder), trust=recipe.trust)
    failure = run.facts.get("failure") if run.recipe_file.exists() else None
    if failure is None:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*the network has learnt nothing")  # its NLL tells
                train(recipe, run.folder, resume=run.recipe_file.exists(), progress=False, evaluated=False)
            nll, right = _rows(run, data)
            return made(nll, float(right.mean()))
        except (NotFiniteError, EvaluationError) as error:
            failure = str(error).split(". ")[0]
            run.note(failure=failure)
    return made(torch.empty(0), 0.0, failure=failure)


def _rows(run: Run, data: Data) -> tuple[Tensor, Tensor]:
    """The NLL of each validation row, in the target's own units, and whether its prediction is right, or covers it.

    Both are kept with the run.
    """
    known = rows_of(run) if (run.folder / ROWS).is_file() else {}
    if not {"tune_nll", "tune_right"} <= known.keys():
        p, y = run.load().predict(data.validation), data.validation.targets
        scale = torch.tensor(data.targets.std).log().sum() if isinstance(data.targets, Reals) else 0.0
        add_arrays(run, ROWS, {"tune": {"nll": row_nll(p, y) + scale, "right": row_shares(p, y)}})
        known = rows_of(run)
    require_arrays(run, ROWS, known, ("tune_nll", "tune_right"), len(data.validation))
    return torch.from_numpy(known["tune_nll"]), torch.from_numpy(known["tune_right"])


def _place(candidate: Candidate, epochs: int, folder: Path) -> Path:
    """The folder of a trial; that of the chosen run is moved to `best` at the end.

    >>> _place(Candidate("noise=0.1, lr=0.3 (as given)", Recipe.of()), 10, Path("runs/mine"))
    PosixPath('runs/mine/trials/noise-0.1-lr-0.3-as-given-10-epochs')
    """
    best = Run(folder / BEST)
    is_best = epochs == candidate.recipe.training.epochs and best.recipe_file.exists()
    if is_best and Run(best.folder, trust=candidate.recipe.trust).recipe == candidate.recipe:
        return best.folder
    words = re.sub(r"[^\w.]+", "-", f"{candidate.name} {epochs} epochs")
    return folder / TRIED / words.strip("-")


def _finish(candidate: Candidate, folder: Path) -> Run:
    """Evaluate the chosen run, in its place."""
    place = _place(candidate, candidate.recipe.training.epochs, folder)
    if place != folder / BEST:
        os.replace(place, folder / BEST)
    return train(candidate.recipe, folder / BEST, resume=True, progress=False)


def _require_tunable(recipe: Recipe) -> Data:
    """The data of a recipe; raises if it has no validation rows to choose on, or if the recipe uses several devices."""
    options = recipe.training
    if options.devices not in (1, "1") or options.nodes > 1:
        raise TuneError(
            f"training.devices={options.devices}, training.nodes={options.nodes}: tune trains on one device; set both "
            "to 1, then train the chosen recipe on more"
        )
    data = load_data(recipe)
    if len(data.validation) < 2:
        raise TuneError(
            f"options are chosen on the validation split, and {recipe.data.name} has {len(data.validation)} validation "
            "rows: set data.validation, such as data.validation=0.2"
        )
    return data


def _claim(folder: Path, plan: dict[str, Any]) -> None:
    """Write down what is tried in a folder; raises if it holds something else."""
    file = folder / FILE
    if not file.exists():
        Run.require_free(folder)
        if (folder / TRIED).exists() or (folder / BEST).exists():
            raise TuneError(f"{folder}: has {TRIED} or {BEST} and no {FILE}; delete them, or choose another folder")
        folder.mkdir(parents=True, exist_ok=True)
        write_json(file, {"plan": plan})
    elif read_json(file).get("plan") != json.loads(json.dumps(plan)):
        raise TuneError(
            f"{folder}: holds the trials of another recipe, grid or number of trials; choose another folder, or repeat "
            "what was called there"
        )
