"""The commands. Each imports what it needs when it runs, so that help is there at once."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from bayesify.cli import show
from bayesify.cli.processes import folder_of, is_first, shared
from bayesify.cli.several import compare, report
from bayesify.cli.words import Words, evaluation_changes, refuse_beside_resume, sizes

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", add_completion=False)


def _examples(*lines: str) -> str:
    """The end of a help page; a line that begins with # says what the next does."""
    shown = [f"[dim]{line}[/dim]" if line.startswith("#") else f"[cyan]{line}[/cyan]" for line in lines]
    return "\n".join(["[bold]Examples[/bold]", *shown])


Changes = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE|KEY=VALUE",
        show_default=False,
        help="A YAML recipe (without one: a small network on scikit-learn's digits), and keys of it that are to "
        "differ, such as method=IBNN or training.epochs=5.",
    ),
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that `bayesify train` made.")]
Samples = Annotated[
    int | None, typer.Option(min=1, metavar="S", help="Draws from the posterior; the recipe's number unless given.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress; print the folder alone.")]


def _version(wanted: bool) -> None:
    if wanted:
        show.result(f"bayesify {version('bayesify')}")
        raise typer.Exit


@app.callback(
    epilog=_examples(
        "# a Rank-1 network on embedded data, in seconds, into runs/digits-Rank1",
        "bayesify train training.epochs=10",
        "# your own: recipes are described in docs/cli.md, their keys by `bayesify schema`",
        "bayesify train recipe.yaml method=IBNN method.components=8",
        "bayesify predict runs/recipe-IBNN new.csv --out predictions.csv",
        "# which method?",
        "bayesify compare recipe.yaml --methods Rank1,IBNN,ECMP --seeds 3",
    )
)
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show warnings, logs and tracebacks of all packages.")] = False,
) -> None:
    """Turn a network and data into a calibrated Bayesian model, and know when not to trust it.

    Each command has more to say: [cyan]bayesify train --help[/cyan].
    """


@app.command(
    epilog=_examples(
        "bayesify train",
        "bayesify train recipe.yaml training.epochs=5 --out runs/first",
        "# Bayesian fine-tuning of a trained network",
        "bayesify train cifar10.yaml method=Rank1 --weights resnet20.th",
        "# after Ctrl-C, a crash or a power cut",
        "bayesify train --resume runs/first",
    )
)
def train(
    words: Changes = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="The run's folder; unless given, the first free runs/RECIPE-METHOD."),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Continue a run, exactly, from its last checkpoint.")
    ] = None,
    devices: Annotated[
        str | None, typer.Option(metavar="N", help="Train on so many devices, or on all with -1 (training.devices).")
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Start from a trained network's weights (model.weights).")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="For splits, starts and draws (seed).")] = None,
    quiet: Quiet = False,
) -> None:
    """Train a Bayesian network, evaluate it and keep all of it in one folder.

    The folder holds the recipe with everything said, the model, its metrics, logs and the last checkpoint.
    Ctrl-C ends after the batch and keeps a checkpoint.
    """
    if resume is not None:
        refuse_beside_resume(words, out=out, devices=devices, weights=weights, seed=seed)
        from bayesify.lab.runs import Run

        recipe, folder = Run.open(resume).recipe, resume
        if Run(resume).facts["status"] == "finished" and is_first():
            show.warning(f"{resume}: finished already; these are its metrics")
    else:
        given = Words.of(words)
        recipe = given.recipe(training__devices=devices, model__weights=weights, seed=seed)
        folder = folder_of(out, given.name(recipe), recipe.training.nodes)
    from bayesify.lab.training import train

    with shared(folder):
        run = train(recipe, folder, resume=resume is not None, progress=is_first() and not quiet)
    if is_first():
        if not quiet:
            show.result(show.metrics(run.metrics))
        show.result(str(run.folder))


@app.command(
    epilog=_examples(
        "bayesify evaluate runs/first",
        "bayesify evaluate runs/first --split test --samples 100",
        "# other data sets, files or folders, to tell from the test inputs",
        "bayesify evaluate runs/first --ood kmnist --ood photos/",
        "# under ImageNet-C's corruptions, and under attack",
        "bayesify evaluate runs/first --shift corruptions --attack pgd evaluation.attack.epsilon=0.1",
    )
)
def evaluate(
    run: RunFolder,
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE", show_default=False, help="Keys of the recipe's evaluation part that are to differ."
        ),
    ] = None,
    samples: Samples = None,
    split: Annotated[
        list[str] | None,
        typer.Option(metavar="SPLIT", help="train, validation or test; may be repeated. Unless given, the last two."),
    ] = None,
    ood: Annotated[
        list[str] | None,
        typer.Option(metavar="SET", help="A data set's name, a file or a folder of other inputs; may be repeated."),
    ] = None,
    shift: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND", help="mixing, salt_and_pepper, corruptions (all fifteen) or one of them; may be repeated."
        ),
    ] = None,
    attack: Annotated[str | None, typer.Option(metavar="NAME", help="An attack, such as pgd or fgsm.")] = None,
) -> None:
    """Measure a run's model: accuracy, likelihood, calibration, and whether strange inputs are noticed.

    The numbers are printed and kept in the run's metrics.json.
    """
    from bayesify.lab.runs import Run

    found = Run.open(run)
    options = evaluation_changes(changes, samples=samples, ood=ood, shift=shift, attack=attack and {"name": attack})
    from bayesify.lab.evaluation import SPLITS, evaluate

    show.result(show.metrics(evaluate(found, splits=tuple(split or SPLITS), **options)))


@app.command(
    epilog=_examples(
        "bayesify predict runs/first new.csv",
        "bayesify predict runs/first photos/ more/*.png --out predictions.parquet",
    )
)
def predict(
    run: RunFolder,
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Inputs of the kind the model was trained on.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The table: .csv or .parquet.")] = Path("predictions.csv"),
    samples: Samples = None,
) -> None:
    """Predict new inputs, with what is uncertain about each, into a table.

    Its columns are the label and its probability (or mean and interval), and aleatoric and epistemic uncertainty.
    The column [bold]abstain[/bold] is true for inputs less certain than nearly all validation inputs: ask a person.
    """
    from bayesify.lab.runs import Run

    found = Run.open(run)
    from bayesify.lab.prediction_files import predict_files

    rows = predict_files(found, files, out, samples=samples)
    show.result(f"{rows:,} predictions in {out}")


app.command(
    epilog=_examples(
        "bayesify compare --methods Rank1,IBNN,MeanField --seeds 5",
        "# the plain network is trained for 50 epochs, each method fine-tunes it for 5",
        "bayesify compare recipe.yaml training.epochs=5 base.training.epochs=50",
        "bayesify compare first.yaml second.yaml --out runs/both",
    )
)(compare)
app.command(
    epilog=_examples(
        "bayesify report runs/first",
        "bayesify report runs/first runs/second --out both.html",
        "# every run of a comparison",
        "bayesify report runs/digits-compare --out report.html",
    )
)(report)


@app.command(
    epilog=_examples(
        "bayesify inspect wide_resnet_28_10 --method IBNN components=8",
        "bayesify inspect mlp --shape 13 --outputs 1 --method MeanField prior_std=0.5",
        "bayesify inspect timm:resnet50 --shape 3,224,224 --outputs 1000",
        "bayesify inspect runs/first",
    )
)
def inspect(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A network's name, a recipe, or a run's folder.")],
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", show_default=False, help="Options of the method.")
    ] = None,
    method: Annotated[str | None, typer.Option(metavar="NAME", help="The method; Rank1 unless given.")] = None,
    shape: Annotated[str, typer.Option(metavar="SIZES", help="Of one input.")] = "3,32,32",
    outputs: Annotated[int, typer.Option(min=1, metavar="N", help="Classes, or real outputs.")] = 10,
    weights: Annotated[Path | None, typer.Option(metavar="FILE", help="Check that these weights fit.")] = None,
) -> None:
    """Show which layers of a network become Bayesian, what that costs, and why others stay plain."""
    from bayesify.cli.inspection import inspected

    show.result(inspected(model, changes or [], method, sizes(shape), outputs, weights))


@app.command(epilog=_examples("bayesify schema > recipe.schema.json", "bayesify schema | jq '.\"$defs\".Rank1'"))
def schema() -> None:
    """Print the JSON schema of recipes, for editors and for reading.

    Under [cyan]x-training[/cyan] it has how each method is trained unless a recipe says otherwise.
    """
    from bayesify.cli.inspection import recipe_schema

    print(json.dumps(recipe_schema(), indent=2, ensure_ascii=False))
