"""The commands about several models: `compare` and `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from bayesify.cli import show
from bayesify.cli.processes import first_free
from bayesify.cli.words import CommandError, Words


def compare(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE|KEY=VALUE",
            show_default=False,
            help="Several recipes, or one (or none: digits) for several methods; and keys that are to differ, with "
            "base. before them for the plain network alone.",
        ),
    ] = None,
    methods: Annotated[
        str | None, typer.Option(metavar="NAMES", help="With commas; Rank1,IBNN,ECMP unless given.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="Train each model so many times.")] = 3,
    finetune: Annotated[
        bool | None,
        typer.Option(
            "--finetune/--scratch",
            show_default=False,
            help="Methods start from one plain network, trained first; or each from scratch. Fine-tuning unless given.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="For the runs, the table and the page; unless given, the first free in runs."
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Train several methods or recipes on the same data and print one table, mean ± sd over seeds.

    The folder gets comparison.csv, report.html and every run; with the same --out a comparison goes on where it ended.
    """
    from bayesify.cli.contest import Contest

    given = Words.of(words)
    contest = Contest.of(given, methods, finetune)
    folder = out or first_free(Path("runs") / f"{given.recipes[0].stem if given.recipes else 'digits'}-compare")
    from bayesify.lab.compare import compare
    from bayesify.lab.report import write_report
    from bayesify.lab.report.verdict import in_words
    from bayesify.lab.training import Interrupted

    try:
        comparison = compare(contest.recipes, folder, seeds=seeds, base=contest.base, progress=not quiet)
    except Interrupted as stop:
        raise Interrupted(f"stopped; the same command with --out {folder} continues") from stop
    comparison.to_csv(folder / "comparison.csv")
    show.result(comparison.table())
    show.result(Text(in_words(comparison)))
    write_report(comparison, folder / "report.html")
    show.result(str(folder))


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="Folders of evaluated runs on the same data, or of whole comparisons."),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The page, an .html file.")] = Path("report.html"),
) -> None:
    """Write a page about one or several runs: words, tables that sort, figures, doubtful inputs, recipes.

    The page is one file that needs no network. A folder beside it gets every figure as PNG and its data as CSV.
    """
    if out.suffix.lower() not in (".html", ".htm"):
        raise CommandError(f"--out {out}: expected the name of a page, such as {out.with_suffix('.html')}")
    from bayesify.lab.gathering import runs_at

    found = runs_at(runs)
    from bayesify.lab.report import write_report

    write_report(found, out)
    show.result(str(out))
