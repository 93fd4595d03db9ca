"""The command `bayesify reproduce`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from bayesify.cli import output

if TYPE_CHECKING:
    from bayesify.lab.reproduction.verdict import Results

LIST = "list"


class ScaleChoice(StrEnum):
    """The scales of an experiment."""

    small = "small"
    paper = "paper"


def reproduce(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of an experiment; list shows all.")],
    scale: Annotated[
        ScaleChoice, typer.Option(help="Settings for two cores, or those of the paper, for its hardware.")
    ] = ScaleChoice.small,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="How many seeds or splits to train at most. Default: the experiment's."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="SETTING|ROW", help="Train only this data set, or this row; may be repeated."),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where results go.")] = Path("reproduction/results"),
    runs: Annotated[Path, typer.Option(metavar="FOLDER", help="Where trained networks go.")] = Path(
        "runs/reproduction"
    ),
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Don't show progress.")] = False,
) -> None:
    """Run an experiment of the papers, and compare the results with theirs.

    Trains what is missing; with the same folders, an interrupted command continues. Writes NAME.md with the paper's
    figures and ours, paired tests and a verdict on each table or figure: reproduced, partly, not or undecided.
    """
    from bayesify.lab.reproduction import reproduce as run

    if name == LIST:
        output.result(_table(out))
        return
    results = run(name, scale=scale.value, seeds=seeds, only=only or (), out=out, runs=runs, progress=not quiet)
    if not quiet:
        output.result(_verdicts(results))
    output.result(str(out / f"{name}{'' if scale is ScaleChoice.small else '-paper'}.md"))


def _table(out: Path) -> Table:
    """All experiments, with the verdicts of the results in a folder."""
    from bayesify.lab.reproduction import EXPERIMENTS
    from bayesify.lab.reproduction.run import known_results

    table = Table(box=box.SIMPLE_HEAD)
    for head in ("name", "table or figure", "claim", "minutes", "verdict"):
        table.add_column(head, justify="right" if head == "minutes" else "left", overflow="fold")
    for name, experiment in EXPERIMENTS.items():
        results = known_results(experiment, "small", out)
        for i, exhibit in enumerate(experiment.exhibits):
            verdict = results.verdict(exhibit) if any(test.seeds for test in results.tests(exhibit)) else "not run"
            about = str(experiment.small.minutes) if i == 0 else ""
            table.add_row(name if i == 0 else "", exhibit.title, exhibit.claim, about, verdict)
    return table


def _verdicts(results: Results) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for head in ("table or figure", "claim", "verdict"):
        table.add_column(head, overflow="fold")
    for exhibit in results.experiment.exhibits:
        table.add_row(exhibit.title, exhibit.claim, results.verdict(exhibit))
    return table
