"""The command `bayesify export`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bayesify.cli import output
from bayesify.cli.arguments import RunFolder, Samples, Trust


class DrawsOption(StrEnum):
    """Where an exported file has its draws from."""

    frozen = "frozen"
    inside = "inside"


def export(
    run: RunFolder,
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The file to write: .onnx, .pt2, or .aoti.pt2 for compiled code.")
    ] = Path("model.onnx"),
    samples: Samples = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the draws.")] = 0,
    draws: Annotated[
        DrawsOption, typer.Option(help="frozen: the same draws at each call; inside: the file draws anew at each call.")
    ] = DrawsOption.frozen,
    trust: Trust = None,
) -> None:
    """Write a run's model to a file that takes raw inputs and runs without bayesify, and a model card beside it.

    The file gives probabilities or means with their uncertainty, for any number of inputs. The card describes inputs,
    outputs, training, metrics and limits.
    """
    from bayesify.lab.runs import Run

    found = Run.open(run, trust=trust)
    from bayesify.lab.export_run import export_run

    card = export_run(found, out, samples=samples, seed=seed, draws=draws.value)
    output.result(f"wrote {out} and {card}")
