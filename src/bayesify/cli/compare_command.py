"""The command `bayesify compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from bayesify.cli import output
from bayesify.cli.arguments import Arguments, Trust
from bayesify.lab.run_names import first_free


def compare(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE|KEY=VALUE",
            show_default=False,
            help="Several recipes, or one (by default a small network on the digits) for several methods; and keys to "
            "change, with the prefix base. to change them for the plain network only.",
        ),
    ] = None,
    methods: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Methods, separated by commas. Default: Rank1,IBNN,ECMP.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="How many times each model is trained.")] = 3,
    finetune: Annotated[
        bool | None,
        typer.Option(
            "--finetune/--scratch",
            show_default=False,
            help="Fine-tune one plain network, trained first, with each method; or train each method from scratch. "
            "Default: fine-tune.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Where runs, table and report go. Default: runs/RECIPE-compare, numbered if taken."
        ),
    ] = None,
    trust: Trust = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Don't show progress.")] = False,
) -> None:
    """Train several methods or recipes on the same data, and print one table: mean ± sd over seeds.

    The folder gets comparison.csv, report.html and every run. With the same --out, an interrupted comparison continues.
    """
    from bayesify.cli.compare_plan import ComparePlan

    arguments = Arguments.of(words)
    plan = ComparePlan.of(arguments, methods, finetune)
    folder = out or first_free(Path("runs") / f"{arguments.recipes[0].stem if arguments.recipes else 'digits'}-compare")
    from bayesify.lab.comparison.compare_recipes import compare
    from bayesify.lab.report import write_report
    from bayesify.lab.report.verdict import verdict
    from bayesify.lab.training import Interrupted

    try:
        comparison = compare(plan.recipes, folder, seeds=seeds, base=plan.base, progress=not quiet, trust=trust)
    except Interrupted as stop:
        message = f"stopped; continue by running the same command with --out {folder}"
        raise Interrupted(message, stop.signal_number) from stop
    comparison.to_csv(folder / "comparison.csv")
    output.result(comparison.table())
    output.result(Text(verdict(comparison)))
    write_report(comparison, folder / "report.html")
    output.result(str(folder))
