"""`reproduce`: train what an experiment still lacks, measure it, and write what was found."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from bayesify.lab.data import Data, DataError
from bayesify.lab.data.errors import suggest
from bayesify.lab.progress import progress_bar
from bayesify.lab.recipes import Recipe
from bayesify.lab.recipes.parts import EvaluationPart
from bayesify.lab.reproduction.errors import ReproductionError
from bayesify.lab.reproduction.experiment import BASE, Experiment, ScaleName
from bayesify.lab.reproduction.experiments import EXPERIMENTS
from bayesify.lab.reproduction.page import write_page
from bayesify.lab.reproduction.records import Record, Records, digest, rounded
from bayesify.lab.reproduction.verdict import Results
from bayesify.lab.runs import Run
from bayesify.lab.trained import EvaluationError, Trained
from bayesify.lab.training import NotFiniteError, train
from bayesify.lab.training.side_by_side import train_side_by_side

RESULTS = Path("reproduction/results")
RUNS = Path("runs/reproduction")
TOGETHER = 20
"""The most seeds that are trained side by side. A result depends on them, so they are always the same ones."""


@dataclass(frozen=True)
class Job:
    """What is trained at once: a row of a setting for one seed, or for several side by side."""

    setting: str
    row: str
    seeds: tuple[int, ...]
    recipes: tuple[Recipe, ...]
    together: bool
    base: Recipe | None = None

    def digest(self, recipe: Recipe) -> str:
        """The name of one of its recipes."""
        if self.base is not None and recipe.model.weights == BASE:
            return digest(recipe, [digest(self.base)])
        return digest(recipe, self.seeds if self.together else ())


def experiment_of(name: str) -> Experiment:
    """An experiment by its name; raises for an unknown one."""
    if name not in EXPERIMENTS:
        raise ReproductionError(
            f"no experiment is called {name!r}: {suggest(name, EXPERIMENTS)} (`bayesify reproduce list` shows all)"
        )
    return EXPERIMENTS[name]


def reproduce(
    name: str,
    *,
    scale: ScaleName = "small",
    seeds: int | None = None,
    only: Collection[str] = (),
    out: str | Path = RESULTS,
    runs: str | Path = RUNS,
    progress: bool = True,
) -> Results:
    """Train and measure what an experiment of a paper still lacks, and write the results with a verdict.

    Each network's measures are kept as soon as there are any, in `out/NAME.jsonl`, and what is there is not trained
    again; the page `out/NAME.md`, with `NAME.json` and `NAME.png`, is written at the end, however that comes.

    Args:
        name: The name of an experiment.
        scale: "small" for two cores, or "paper" for the paper's own settings, in files named NAME-paper.
        seeds: How many seeds or splits of each setting to train, at most as many as the experiment has; by default all.
            Those of small networks are trained side by side, up to 20 at once, whichever number is given.
        only: Settings, such as data sets, and rows to train, by their names; by default all.
        out: The folder of the results.
        runs: The folder of the trained networks, of those that are not trained side by side.
        progress: Whether to show a progress bar.

    Returns:
        The results, with the verdict on each table and figure.

    Raises:
        ReproductionError: If the name, a setting or the scale is unknown, the data are not there, or a file can't be
            written. What was trained is kept.
    """
    experiment = experiment_of(name)
    out, folder = Path(out), Path(runs)
    file = _file(experiment, scale, out)
    records = Records.read(file)
    try:
        missing = [job for job in jobs_of(experiment, scale, seeds, only) if not _is_known(job, records)]
        with progress_bar(len(missing), progress) as bar:
            for job in missing:
                bar.update(bar.task_ids[0], description=f"{job.setting}, {job.row}, seed {job.seeds[0]}")
                records.add(_found(experiment, job, folder))
                bar.advance(bar.task_ids[0])
    except DataError as error:
        raise ReproductionError(f"{error}. {name} needs these data; then run the same command again") from error
    except OSError as error:
        raise ReproductionError(
            f"{error.filename or out}: {error.strerror or error}. What was trained is kept in {out} and {folder}; once "
            "the cause is removed, run the same command again"
        ) from error
    finally:
        if records.known:
            write_page(_current(experiment, scale, records), file)
    return _current(experiment, scale, records)


def known_results(experiment: Experiment, scale: ScaleName, out: str | Path = RESULTS) -> Results:
    """The results in a folder, as far as there are any.

    Args:
        experiment: The experiment.
        scale: Its scale.
        out: The folder.

    Returns:
        The results.
    """
    return Results(experiment, scale, list(Records.read(_file(experiment, scale, Path(out))).known.values()))


def _file(experiment: Experiment, scale: ScaleName, out: Path) -> Path:
    return out / f"{experiment.name}{'' if scale == 'small' else '-paper'}.jsonl"


def _current(experiment: Experiment, scale: ScaleName, records: Records) -> Results:
    """The results whose recipes are still those of the experiment."""
    found = []
    for setting in {setting for setting, _, _ in records.known} & set(experiment.scale(scale).seeds):
        for job in jobs_of(experiment, scale, only=[setting]):
            found += [
                records.known[job.setting, job.row, seed]
                for seed, recipe in zip(job.seeds, job.recipes, strict=True)
                if records.has(job.setting, job.row, seed, job.digest(recipe))
            ]
    return Results(experiment, scale, found)


def jobs_of(
    experiment: Experiment, scale: ScaleName, seeds: int | None = None, only: Collection[str] = ()
) -> Iterator[Job]:
    """Everything to train, the first seeds of all settings before the next."""
    given = experiment.scale(scale)
    if seeds is not None and seeds < 1:
        raise ReproductionError(f"seeds={seeds}: expected a number of at least 1")
    for each in only:
        if each not in (*given.seeds, *experiment.rows):
            known = [*given.seeds, *experiment.rows]
            raise ReproductionError(f"{experiment.name} has no setting and no row {each!r}: {suggest(each, known)}")
    settings = [each for each in given.seeds if each in only] or list(given.seeds)
    rows = [each for each in experiment.rows if each in only] or list(experiment.rows)
    step = TOGETHER if given.together else 1
    most = max(given.seeds[setting] for setting in settings)
    for start in range(0, min(most, seeds or most), step):
        for setting in settings:
            own = tuple(range(start, min(start + step, given.seeds[setting])))
            for row in rows if own else ():
                recipes = tuple(given.recipe(setting, row, seed) for seed in own)
                base = None if given.base is None else given.base(setting, own[0])
                yield Job(setting, row, own, recipes, given.together, base)


def _is_known(job: Job, records: Records) -> bool:
    pairs = zip(job.seeds, job.recipes, strict=True)
    return all(records.has(job.setting, job.row, seed, job.digest(recipe)) for seed, recipe in pairs)


def _found(experiment: Experiment, job: Job, runs: Path) -> list[Record]:
    """Train a job and measure its networks; one whose numbers are not finite is a result too."""
    began = time.process_time()
    try:
        every = train_side_by_side(job.recipes) if job.together else [_in_its_folder(job, runs)]
        measures = [rounded(experiment.measure(trained, data)) for trained, data in every]
        failed = ""
    except (NotFiniteError, EvaluationError) as error:
        measures, failed = [{} for _ in job.seeds], str(error).splitlines()[0]
    seconds = round((time.process_time() - began) / len(job.seeds), 2)
    return [
        Record(job.setting, job.row, seed, job.digest(recipe), seconds, measured, failed)
        for seed, recipe, measured in zip(job.seeds, job.recipes, measures, strict=True)
    ]


def _in_its_folder(job: Job, runs: Path) -> tuple[Trained, Data]:
    """A network that is trained in a folder of its own, after its base.

    The folder's name does not depend on the evaluation: experiments share their networks.
    """
    recipe = job.recipes[0]
    own = recipe.model_copy(update={"evaluation": EvaluationPart()})
    name = job.digest(own)
    if job.base is not None and recipe.model.weights == BASE:
        base = _trained(job.base, runs, digest(job.base))
        own = own.model_copy(update={"model": own.model.model_copy(update={"weights": str(base.model_file)})})
    run = _trained(own, runs, name)
    return dataclasses.replace(run.load(), recipe=recipe), run.data()


def _trained(recipe: Recipe, runs: Path, name: str) -> Run:
    """The run of a recipe, which goes on if it was interrupted."""
    method = recipe.method.name  # type: ignore[union-attr]
    folder = (runs / f"{recipe.data.name}-{recipe.model.name}-{method}-{recipe.seed}-{name}").resolve()
    return train(recipe, folder, resume=Run(folder).recipe_file.exists(), progress=False, evaluated=False)
