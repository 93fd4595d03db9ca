"""What `train` prints about a run, and the table of all metrics in its folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bayesify.cli import output

if TYPE_CHECKING:
    from bayesify.lab.runs import Run

METRICS = "metrics.txt"
"""The file in a run's folder that has what `evaluate` prints."""


def tell_run(run: Run, quiet: bool) -> None:
    """Print the lines about a run that matter, and its folder; write the rest to files in it."""
    from bayesify.lab.run_summary import summary_lines

    write_metrics(run)
    files = METRICS
    if run.facts.get("choices"):
        files = f"{run.report().name}, {METRICS}"
    if not quiet:
        for line in summary_lines(run):
            output.result(line)
        trust = f" --trust {run.trust}" if run.trust else ""
        output.result(f"all of it is in {files}; next: bayesify predict {run.folder} NEW{trust}")
    output.result(str(run.folder))


def write_metrics(run: Run) -> None:
    """Write the table of a run's metrics to its folder."""
    from bayesify.lab.run_files import write_file

    write_file(run.folder / METRICS, output.as_text(output.metrics(run.metrics)))
