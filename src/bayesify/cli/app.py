"""The commands. Each imports what it needs when it runs, so that --help is fast."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from bayesify.cli import output
from bayesify.cli.arguments import (
    Arguments,
    DataOrChanges,
    Quiet,
    RunFolder,
    Samples,
    Seed,
    Trust,
    Weights,
    evaluation_changes,
    refuse_changes_with_resume,
    sizes,
)
from bayesify.cli.compare_command import compare
from bayesify.cli.export_command import export
from bayesify.cli.report_command import report
from bayesify.cli.reproduce_command import reproduce
from bayesify.cli.run_folder import folder_of, is_main_process, share_folder
from bayesify.cli.run_output import tell_run, write_metrics
from bayesify.cli.tune_command import tune

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", add_completion=False)


def _examples(*lines: str) -> str:
    """The examples at the end of a help page; a line that begins with # is a comment."""
    shown = [f"[dim]{line}[/dim]" if line.startswith("#") else f"[cyan]{line}[/cyan]" for line in lines]
    return "\n".join(["[bold]Examples[/bold]", *shown])


def _version(wanted: bool) -> None:
    if wanted:
        output.result(f"bayesify {version('bayesify')}")
        raise typer.Exit


@app.callback(
    epilog=_examples(
        "# your data: everything is chosen, and told; the run is in runs/customers-Rank1",
        "bayesify train customers.csv --target churn",
        "bayesify predict runs/customers-Rank1 new.csv --out predictions.csv",
        "# your own recipe: see docs/cli.md, and `bayesify schema` for all keys",
        "bayesify train recipe.yaml method=IBNN method.components=8",
        "# how much noise? which method is best?",
        "bayesify tune recipe.yaml",
        "bayesify compare recipe.yaml --methods Rank1,IBNN,ECMP --seeds 3",
    )
)
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show warnings and logs of all packages, and tracebacks.")
    ] = False,
) -> None:
    """Turn a network and data into a calibrated Bayesian model, and know when not to trust it.

    For the options of a command, see for example [cyan]bayesify train --help[/cyan].
    """


@app.command(
    epilog=_examples(
        "bayesify train customers.csv --target churn",
        "bayesify train photos/ method=IBNN --out runs/first",
        "# what was run before, changed",
        "bayesify train runs/first/recipe.yaml training.epochs=5",
        "# Bayesian fine-tuning of a trained network",
        "bayesify train cifar10.yaml method=Rank1 --weights resnet20.th",
        "# after Ctrl-C, a crash or a power cut",
        "bayesify train --resume runs/first",
        "# a network of yours, a function in a file that you trust",
        "bayesify train recipe.yaml model.name=networks.py:make --trust networks.py",
    )
)
def train(
    words: DataOrChanges = None,
    target: Annotated[
        str | None, typer.Option(metavar="NAME", help="The column, or array, of the data that is to be predicted.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="The run's folder. Default: runs/NAME-METHOD, numbered if taken."),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Continue an interrupted run from its last checkpoint.")
    ] = None,
    devices: Annotated[
        str | None, typer.Option(metavar="N", help="Number of devices to train on, -1 for all (training.devices).")
    ] = None,
    weights: Weights = None,
    seed: Seed = None,
    trust: Trust = None,
    quiet: Quiet = False,
) -> None:
    """Train a Bayesian network on data or by a recipe, evaluate it, and keep everything in one folder.

    For data, kinds of columns, network, method, split and training are chosen, and told with how to choose otherwise.
    The folder holds the recipe with all defaults, the model, its metrics, logs and the last checkpoint.
    Ctrl-C or SIGTERM stops after the current batch and saves a checkpoint.
    """
    if resume is not None:
        refuse_changes_with_resume(words, target=target, out=out, devices=devices, weights=weights, seed=seed)
        from bayesify.lab.runs import Run

        recipe, folder = Run.open(resume, trust=trust).recipe, resume
        if Run(resume).facts["status"] == "finished" and is_main_process():
            output.warning(f"{resume}: already finished; these are its metrics")
    else:
        arguments = Arguments.of(words)
        recipe = arguments.recipe(trust, target, training__devices=devices, model__weights=weights, seed=seed)
        folder = folder_of(out, arguments.run_name(recipe), recipe.training.nodes)
    from bayesify.lab.training import train

    with share_folder(folder):
        run = train(recipe, folder, resume=resume is not None, progress=is_main_process() and not quiet)
    if is_main_process():
        tell_run(run, quiet)


app.command(
    epilog=_examples(
        "# how much noise? Choose on the validation split, and train with the best",
        "bayesify tune recipe.yaml method=Rank1",
        "bayesify tune recipe.yaml --trials 10 --out runs/tuned",
        "bayesify tune recipe.yaml --grid 'method.components=[2, 4, 8]' --grid 'training.lr=[0.01, 0.1]'",
        "bayesify predict runs/tuned/best new.csv",
    )
)(tune)


@app.command(
    epilog=_examples(
        "bayesify evaluate runs/first",
        "bayesify evaluate runs/first --split test --samples 100",
        "# detect other data sets, files or folders as out-of-distribution",
        "bayesify evaluate runs/first --ood kmnist --ood photos/",
        "# under ImageNet-C's corruptions and under attack",
        "bayesify evaluate runs/first --shift corruptions --attack pgd evaluation.attack.epsilon=0.1",
    )
)
def evaluate(
    run: RunFolder,
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            show_default=False,
            help="Keys to change, such as evaluation.rows=500.",
        ),
    ] = None,
    samples: Samples = None,
    split: Annotated[
        list[str] | None,
        typer.Option(metavar="SPLIT", help="train, validation or test; may be repeated. Default: validation and test."),
    ] = None,
    ood: Annotated[
        list[str] | None,
        typer.Option(metavar="SET", help="An out-of-distribution data set, file or folder; may be repeated."),
    ] = None,
    shift: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND",
            help="mixing, salt_and_pepper, a corruption, or corruptions (all 15); may be repeated.",
        ),
    ] = None,
    attack: Annotated[str | None, typer.Option(metavar="NAME", help="An attack, such as pgd or fgsm.")] = None,
    trust: Trust = None,
) -> None:
    """Measure a run's model: accuracy, likelihood, calibration and out-of-distribution detection.

    The metrics are printed and written to the run's metrics.json.
    """
    from bayesify.lab.runs import Run

    found = Run.open(run, trust=trust)
    options = evaluation_changes(changes, samples=samples, ood=ood, shift=shift, attack=attack and {"name": attack})
    from bayesify.lab.evaluation import SPLITS, evaluate

    output.result(output.metrics(evaluate(found, splits=tuple(split or SPLITS), **options)))
    write_metrics(found)


@app.command(
    epilog=_examples(
        "bayesify predict runs/first new.csv",
        "bayesify predict runs/first photos/ more/*.png --out predictions.parquet",
        "# leave the fifth that the model is least sure of to a person, by what draws disagree about",
        "bayesify predict runs/first new.csv --abstain 0.2 --score mutual_information",
        "# sets of classes, or intervals, that hold the truth in 95% of cases",
        "bayesify predict runs/first new.csv --coverage 0.95",
    )
)
def predict(
    run: RunFolder,
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Inputs of the kind the model was trained on.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The table to write, .csv or .parquet.")] = Path(
        "predictions.csv"
    ),
    samples: Samples = None,
    coverage: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="How often sets of classes, or intervals, should hold the truth, such as 0.9; for runs with "
            "data.calibration. Default: the recipe's.",
        ),
    ] = None,
    abstain: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="The share of validation inputs to abstain on, such as 0.2. Default: the recipe's, 0.05.",
        ),
    ] = None,
    score: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="By what to abstain: entropy, mutual_information, max_probability, variance, familiarity or doubt; "
            "std or epistemic_std for real targets. Default: the recipe's, doubt.",
        ),
    ] = None,
    trust: Trust = None,
) -> None:
    """Predict new inputs, and write a table of predictions and their uncertainty.

    The columns are those of a table that is predicted, the label and its probability (or mean and interval), and the
    aleatoric and epistemic uncertainty. The column [bold]abstain[/bold] is true for inputs that are less certain or
    less familiar than nearly all validation inputs, and for rows of tables with a value out of range, missing or
    unknown; [bold]why[/bold] says which it is.
    """
    from bayesify.lab.runs import Run

    found = Run.open(run, trust=trust)
    from bayesify.lab.prediction_files import predict_files

    rows = predict_files(found, files, out, samples=samples, coverage=coverage, abstain=abstain, score=score)
    output.result(f"wrote {rows:,} predictions to {out}")


app.command(
    epilog=_examples(
        "bayesify compare --methods Rank1,IBNN,MeanField --seeds 5",
        "# train the plain network for 50 epochs, then fine-tune it with each method for 5",
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
app.command(epilog=_examples("bayesify export runs/first --out model.onnx", "bayesify export runs/first --samples 10"))(
    export
)


app.command(
    epilog=_examples(
        "bayesify reproduce list",
        "bayesify reproduce ibnn-depth",
        "bayesify reproduce emp-uci --only yacht --seeds 5",
        "# with the paper's settings, for a GPU",
        "bayesify reproduce rank1-scratch --scale paper --seeds 3",
    )
)(reproduce)


@app.command(
    epilog=_examples(
        "bayesify inspect wide_resnet_28_10 --method IBNN components=8",
        "bayesify inspect mlp --shape 13 --outputs 1 --method MeanField prior_std=0.5",
        "bayesify inspect timm:resnet50 --shape 3,224,224 --outputs 1000",
        "bayesify inspect runs/first",
    )
)
def inspect(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="The name of a network, a recipe, or the folder of a run.")
    ],
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", show_default=False, help="Options of the method.")
    ] = None,
    method: Annotated[
        str | None, typer.Option(metavar="NAME", help="The method. Default: Rank1, or the recipe's.")
    ] = None,
    shape: Annotated[str, typer.Option(metavar="SIZES", help="The shape of one input.")] = "3,32,32",
    outputs: Annotated[int, typer.Option(min=1, metavar="N", help="Number of classes or real targets.")] = 10,
    weights: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Load these weights, to check that they fit.")
    ] = None,
    trust: Trust = None,
) -> None:
    """Show which layers of a network become Bayesian, how many parameters that adds, and why others stay plain."""

    from bayesify.cli.inspection import inspect_network

    output.result(inspect_network(model, changes or [], method, sizes(shape), outputs, weights, trust))


@app.command(epilog=_examples("bayesify schema > recipe.schema.json", "bayesify schema | jq '.\"$defs\".Rank1'"))
def schema() -> None:
    """Print the JSON schema of recipes, which editors use for completion and validation.

    The default training options of each method are under [cyan]x-training[/cyan].
    """
    from bayesify.cli.inspection import recipe_schema

    print(json.dumps(recipe_schema(), indent=2, ensure_ascii=False))
