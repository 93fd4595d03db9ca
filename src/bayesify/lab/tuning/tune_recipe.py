"""`tune`: try a method's options on the validation split, choose, and finish the best run."""

from __future__ import annotations

import json
import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bayesify.conversion.explain_not_finite import NotFiniteError
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
    progress: bool = True,
) -> Tuned:
    """Choose options of a recipe on its validation split, and train it with them.

    Every candidate is trained as the recipe says. The one with the lowest validation NLL (of the mean over draws) is
    chosen; the recipe stays as it is if no other is better by more than one standard error of the paired difference.
    The test split is used only then, to evaluate the chosen run.

    Trials that are finished are not repeated: the same call continues after an interruption.

    Args:
        recipe: The recipe, which is the first candidate.
        folder: Where everything goes: `best` is the chosen run, `trials` has the other runs, `tune.json` the results.
        trials: How many candidates to try, at least 2; by default 6, or all of a given grid.
        grid: Values to try by key, such as `{"method.noise": [0.1, 0.3]}`. By default the noise of the method, or
            for baselines what matters most, then the learning rate and weight decay.
        progress: Whether to show a progress bar.

    Returns:
        The choice, and the run in `folder/best`.

    Raises:
        TuneError: If there are no validation rows or nothing to try, or if the folder holds the trials of another call.
        Interrupted: If training was stopped by Ctrl-C or SIGTERM; finished trials and the checkpoint are kept.
    """
    folder = Path(folder)
    data = _require_tunable(recipe)
    candidates = candidates_of(recipe, grid, trials, real=isinstance(data.targets, Reals))
    plan = {each.name: each.recipe.plain() for each in candidates}
    _claim(folder, plan)
    tried: list[Trial] = []
    try:
        with progress_bar(len(candidates), progress) as bar:
            for candidate in candidates:
                bar.update(bar.task_ids[0], description=candidate.name)
                tried.append(_trial(candidate, folder, data))
                bar.advance(bar.task_ids[0])
            choice = Choice(tuple(tried), "coverage" if isinstance(data.targets, Reals) else "accuracy")
            bar.update(bar.task_ids[0], description=f"evaluate {choice.chosen.name}")
            run = _finish(candidates[tried.index(choice.chosen)], folder)
    except Interrupted as stop:
        raise Interrupted(f"stopped; tune again with the folder {folder} to continue", stop.signal_number) from stop
    write_json(folder / FILE, {"candidates": plan, "trials": choice.rows(), "why": choice.why})
    return Tuned(choice, run)


def _trial(candidate: Candidate, folder: Path, data: Data) -> Trial:
    """Train a candidate and predict the validation rows, unless both are done."""
    run = Run(_place(candidate, folder), trust=candidate.recipe.trust)
    exists = run.recipe_file.exists()
    if failure := run.facts.get("failure") if exists else None:
        return Trial.failed(candidate.name, failure)
    if not (run.folder / ROWS).is_file():
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*the network has learnt nothing")  # its NLL tells
                train(candidate.recipe, run.folder, resume=exists, progress=False, evaluated=False)
            _predict(run, data)
        except (NotFiniteError, EvaluationError) as error:
            failure = str(error).split(". ")[0]
            run.note(failure=failure)
            return Trial.failed(candidate.name, failure)
    rows = rows_of(run)
    require_arrays(run, ROWS, rows, ("tune_nll", "tune_right"), len(data.validation))
    return Trial(candidate.name, torch.from_numpy(rows["tune_nll"]), float(rows["tune_right"].mean()))


def _predict(run: Run, data: Data) -> None:
    """Keep the NLL of each validation row, in the target's own units, and whether its label or interval is right."""
    p, y = run.load().predict(data.validation), data.validation.targets
    scale = torch.tensor(data.targets.std).log().sum() if isinstance(data.targets, Reals) else 0.0
    add_arrays(run, ROWS, {"tune": {"nll": row_nll(p, y) + scale, "right": row_shares(p, y)}})


def _place(candidate: Candidate, folder: Path) -> Path:
    """The folder of a trial; that of the chosen run is moved to `best` at the end.

    >>> _place(Candidate("noise=0.1, lr=0.3 (as given)", Recipe.of()), Path("runs/mine"))
    PosixPath('runs/mine/trials/noise-0.1-lr-0.3-as-given')
    """
    best = Run(folder / BEST, trust=candidate.recipe.trust)
    if best.recipe_file.exists() and best.recipe == candidate.recipe:
        return best.folder
    return folder / TRIED / re.sub(r"[^\w.]+", "-", candidate.name).strip("-")


def _finish(candidate: Candidate, folder: Path) -> Run:
    """Evaluate the chosen run, in its place."""
    place = _place(candidate, folder)
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
        write_json(file, {"candidates": plan})
    elif read_json(file).get("candidates") != json.loads(json.dumps(plan)):
        raise TuneError(
            f"{folder}: holds the trials of another recipe, grid or number of trials; choose another folder, or repeat "
            "what was called there"
        )
