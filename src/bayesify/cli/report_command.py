"""The command `bayesify report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bayesify.cli import output
from bayesify.cli.arguments import CommandError, Trust


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="Folders of evaluated runs on the same data, or of comparisons."),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The page to write, an .html file.")] = Path("report.html"),
    target_accuracy: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            show_default=False,
            help="The accuracy to reach by referring the least certain cases to a person, such as 0.98. Default: a "
            "round one above the model's own that the rows can show.",
        ),
    ] = None,
    error_cost: Annotated[
        list[float] | None,
        typer.Option(
            metavar="N",
            show_default=False,
            help="An error costs as much as N referrals; may be repeated. The page has the cheapest threshold for "
            "each. Default: 5, 20 and 100.",
        ),
    ] = None,
    trust: Trust = None,
) -> None:
    """Write a page about one or more runs: a recommendation, sortable tables, figures, least certain inputs, recipes.

    The page is a single file that works offline. A folder beside it gets every figure as PNG and its data as CSV.
    """
    if out.suffix.lower() not in (".html", ".htm"):
        raise CommandError(f"--out {out}: expected an .html file, such as {out.with_suffix('.html')}")
    from bayesify.lab.comparison.find_runs import runs_at

    found = runs_at(runs, trust=trust)
    from bayesify.lab.report import write_report

    write_report(found, out, target_accuracy=target_accuracy, error_costs=error_cost or ())
    output.result(str(out))
