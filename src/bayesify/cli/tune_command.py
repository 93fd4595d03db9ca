"""The command `bayesify tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bayesify.cli import output
from bayesify.cli.arguments import Arguments, Changes, CommandError, Quiet, Seed, Trust, Weights
from bayesify.lab.run_names import first_free


def tune(
    words: Changes = None,
    trials: Annotated[
        int | None,
        typer.Option(min=2, metavar="N", help="How many candidates to try. Default: 6, or all of a given grid."),
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUES",
            show_default=False,
            help="Values to try, such as 'method.noise=[0.1, 0.3]'; may be repeated. Default: the method's noise, then "
            "learning rate and weight decay.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where all runs go. Default: runs/RECIPE-METHOD-tune, numbered if taken."),
    ] = None,
    weights: Weights = None,
    seed: Seed = None,
    trust: Trust = None,
    quiet: Quiet = False,
) -> None:
    """Choose a method's options on the validation split, say why, and train the recipe with them.

    The lowest validation NLL wins; the recipe stays as it is if no other is better by more than one standard error. The
    test split is used only to evaluate the chosen run, in FOLDER/best. With the same --out, an interrupted command
    continues.
    """
    arguments = Arguments.of(words)
    recipe = arguments.recipe(trust, model__weights=weights, seed=seed)
    folder = out or first_free(Path("runs") / f"{arguments.run_name(recipe)}-tune")
    from bayesify.lab.recipes import apply_overrides
    from bayesify.lab.tuning.tune_recipe import tune

    values: dict[str, Any] = {}
    for each in grid or ():
        key, equals, text = each.partition("=")
        if not equals or not key:
            raise CommandError(f"--grid {each}: expected a key and a list of values, such as 'method.noise=[0.1, 0.3]'")
        values |= {key: apply_overrides({}, [f"values={text}"])["values"]}
    tuned = tune(recipe, folder, trials=trials, grid=values or None, progress=not quiet)
    if not quiet:
        output.result(str(tuned.choice))
        output.result(output.metrics(tuned.run.metrics))
    output.result(str(tuned.run.folder))
