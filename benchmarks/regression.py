"""How often 90% intervals hold, with the lab's default recipes: `python -m benchmarks.regression`.

scikit-learn's diabetes data and eight UCI sets with their given splits, an MLP as the lab builds it, a plain network
and four methods, each with its default recipe from scratch (30 epochs, a tenth of the training rows for validation).

- *as trained*: the noise that training has learnt, without clipped gradients, as recipes did before;
- *one noise*: `likelihood.precision: learned`, today's default: the noise is set by the validation rows;
- *per input*: `likelihood.precision: input`, with a factor that is set by the validation rows;
- *chosen*: `likelihood.precision: auto`, of the last two the one with the lower validation NLL.

Training is the lab's own step without Lightning's loop, which would take ten times as long for networks so small; a
test compares the two. Every figure is of test rows: means over splits, with the standard error over splits.

Needs $BAYESIFY_DATA. Results are written as they come and not measured again: benchmarks/results/regression.json and
regression.md. Options: --redraw, --sets NAME ….
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from bayesify.errors import BayesifyError
from bayesify.lab.data import Data, Reals
from bayesify.lab.metrics import regression_metrics
from bayesify.lab.recipes import Recipe
from bayesify.lab.runs import load_data, make_likelihood
from bayesify.lab.trained import Trained
from bayesify.lab.training.batches import ShuffledBatches, mix_seeds
from bayesify.lab.training.calibrate import calibrate, validation_nll
from bayesify.lab.training.lightning_module import BayesianModule
from bayesify.lab.training.train_recipe import REAL_CLIP, bayesian_network
from bayesify.prediction.likelihood import Likelihood
from bayesify.prediction.results import Regression
from benchmarks.draws import data_folder

RESULTS = Path(__file__).parent / "results" / "regression.json"
SETS = {
    "diabetes": 20,
    "yacht": 20,
    "bostonHousing": 20,
    "energy": 10,
    "concrete": 10,
    "wine-quality-red": 10,
    "kin8nm": 2,
    "power-plant": 2,
    "naval-propulsion-plant": 2,
}
"""The data sets from small to large, and how many of their splits are used."""
FIRST = 5
METHODS = {"none": "plain", **{name: name for name in ("Rank1", "IBNN", "MeanField", "MCDropout")}}
WAYS: dict[str, dict[str, Any]] = {
    "as trained": {"likelihood": {"calibrate": False}, "training": {"clip": 1e9}},
    "one noise": {},
    "per input": {"likelihood": {"precision": "input"}},
}
SHOWN = ("as trained", "one noise", "per input", "chosen")
FIGURES = ("coverage", "log_density", "rmse", "width", "epistemic_std")
LOWEST, HIGHEST = 0.88, 0.92
"""The coverage that 90% intervals should have."""
Row = dict[str, Any]


# Training.


class WithoutLoop(BayesianModule):
    """The lab's steps, schedules and gradients, for a loop that logs nothing."""

    def of_length(self, batches: int, epochs: int) -> WithoutLoop:
        """The same, told how long training is, as Lightning's trainer would."""
        self._trainer = SimpleNamespace(  # type: ignore[assignment]
            num_training_batches=batches, estimated_stepping_batches=batches * epochs, global_rank=0
        )
        return self

    def _log_terms(self, parts: Any) -> None:
        pass


def train(recipe: Recipe, data: Data, clip: float = REAL_CLIP) -> tuple[nn.Module, Likelihood]:
    """Train a recipe as `lab.train` does, and set its noise."""
    torch.manual_seed(mix_seeds(recipe.seed, 0))
    network, likelihood = bayesian_network(recipe, data), make_likelihood(recipe, data.targets)
    batches = ShuffledBatches(len(data.train), recipe.data.batch_size, seed=recipe.seed)
    options = {"n": len(data.train), "likelihood": likelihood, "training": recipe.training, "seed": recipe.seed}
    module = WithoutLoop(network, prepare=data.inputs.prepare, **options).of_length(
        len(batches), recipe.training.epochs
    )
    found: Any = module.configure_optimizers()
    optimizer, schedule = found["optimizer"], found["lr_scheduler"]["scheduler"]
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    network.train()
    for epoch in range(recipe.training.epochs):
        batches.set_epoch(epoch)
        for i, rows in enumerate(batches):
            index = torch.tensor(rows)
            optimizer.zero_grad()
            module.training_step((data.train.raw(index), data.train.targets[index]), i).backward()
            module.on_before_optimizer_step(optimizer)
            nn.utils.clip_grad_norm_(trained, recipe.training.clip or clip)
            optimizer.step()
            schedule.step()
    network.eval()
    calibrate(recipe, data, network, likelihood)
    return network, likelihood


def recipe_of(name: str, method: str, split: int, way: str, folder: Path) -> Recipe:
    """The default recipe of a method, on one split of a data set."""
    data: dict[str, Any] = {"name": "uci", "path": str(data_folder() / "uci" / name), "options": {"split": split}}
    if name == "diabetes":
        data = {"name": "table", "path": str(diabetes(folder)), "options": {"target": "target"}}
    return Recipe.of({"data": data, "model": {"name": "mlp"}, "method": method, "seed": split, **WAYS[way]})


def diabetes(folder: Path) -> Path:
    """scikit-learn's diabetes data as a table; a seed is a split."""
    from sklearn.datasets import load_diabetes

    path = folder / "diabetes.csv"
    if not path.exists():
        load_diabetes(as_frame=True, scaled=False).frame.to_csv(path, index=False)
    return path


def measured(name: str, method: str, split: int, way: str, folder: Path) -> Row:
    """Train, and measure on test rows; `failed` if training diverged."""
    began = time.process_time()
    recipe = recipe_of(name, method, split, way, folder)
    data = load_data(recipe)
    row: Row = {"set": name, "method": method, "split": split, "way": way}
    row |= {"validation_rows": len(data.validation)}
    try:
        network, likelihood = train(recipe, data)
        trained = Trained(network, likelihood, data.inputs, data.targets, recipe)
        p, nll = trained.predict(data.test), validation_nll(recipe, data, network, likelihood)
    except BayesifyError as error:
        return row | {"failed": str(error).splitlines()[0][:100], "seconds": time.process_time() - began}
    assert isinstance(p, Regression) and isinstance(data.targets, Reals)
    found = regression_metrics(p, data.test.targets, data.targets)
    row |= {key: found[key] for key in FIGURES} | {"target_std": data.targets.std[0]}
    return row | {"validation_nll": nll, "seconds": time.process_time() - began}


# Results.


def with_choice(rows: Sequence[Row]) -> list[Row]:
    """The rows, and what `precision: auto` chooses: the lower validation NLL of the two ways with a set noise.

    >>> same = {"set": "a", "method": "none", "split": 0}
    >>> ways = [{**same, "way": way, "validation_nll": nll} for way, nll in (("one noise", 2.0), ("per input", 1.0))]
    >>> with_choice(ways)[-1]["chosen"]
    'per input'
    """
    places: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        if row["way"] in ("one noise", "per input"):
            places.setdefault((row["set"], row["method"], row["split"]), []).append(row)
    found = [min(pair, key=lambda row: row.get("validation_nll", float("inf"))) for pair in places.values()]
    return [*rows, *({**row, "way": "chosen", "chosen": row["way"]} for row in found)]


def of(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    """The rows with these values that have not failed."""
    return [row for row in rows if "failed" not in row and all(row[key] == value for key, value in wanted.items())]


def by_split(rows: Sequence[Row], key: str) -> list[float]:
    """The mean over methods for each split."""
    splits = sorted({row["split"] for row in rows})
    return [fmean(row[key] for row in rows if row["split"] == split) for split in splits]


def spread(values: Sequence[float], scale: float = 1.0, digits: int = 1) -> str:
    """A mean with its standard error.

    >>> spread([0.9, 0.8, 0.85], 100)
    '85.0 ± 2.9'
    """
    if not values:
        return "–"
    error = f" ± {abs(scale) * stdev(values) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else ""
    return f"{scale * fmean(values):.{digits}f}{error}"


def markdown(results: dict[str, Any]) -> str:
    """The page."""
    rows = with_choice(results["rows"])
    sets = [name for name in SETS if of(rows, set=name)]
    return "\n".join(line for part in parts(results, rows, sets) for line in part) + "\n"


def parts(results: dict[str, Any], rows: Sequence[Row], sets: Sequence[str]) -> Iterator[list[str]]:
    """The sections of the page."""
    setup, minutes = results["setup"], sum(row["seconds"] for row in results["rows"]) / 60
    yield ["# 90% intervals of real targets", "", (__doc__ or "").split("\n\n", 1)[1].strip(), ""]
    yield [f"torch {setup['torch']}, {setup['machine']}, one thread, {minutes:.0f} minutes of one core.", ""]
    yield [f"Sets with a coverage of 88 to 92%, on average over methods, of {len(sets)}: {goals(rows, sets)}."]
    failed = [row for row in results["rows"] if "failed" in row]
    lost = ", ".join(f"{sum(row['way'] == way for row in failed)} {way}" for way in WAYS)
    yield [f"Trainings that ended with numbers that are not finite, of {len(results['rows'])}: {lost}."]
    yield ["", "Noise can only widen: where the draws alone spread more than the errors, intervals hold more than 90%."]
    for key, title in HEADS.items():
        yield ["", f"## {title}", "", f"| set | splits | validation rows | {' | '.join(SHOWN)} |"]
        yield [f"|---|---:|---:|{'---:|' * len(SHOWN)}"]
        for name in sets:
            some = of(rows, set=name)
            cells = " | ".join(figure(of(some, way=way), key) for way in SHOWN)
            yield [f"| {name} | {len({row['split'] for row in some})} | {some[0]['validation_rows']} | {cells} |"]
    yield ["", "## Coverage by method, %", "", "As trained → with one noise (with the chosen noise).", ""]
    yield [f"| set | {' | '.join(METHODS.values())} |", f"|---|{'---:|' * len(METHODS)}"]
    for name in sets:
        yield [f"| {name} | {' | '.join(method_cell(of(rows, set=name, method=method)) for method in METHODS)} |"]
    yield ["", "## What the choice is worth", ""]
    yield ["| set | per input was chosen | test NLL, one noise minus chosen |", "|---|---:|---:|"]
    for name in sets:
        chosen = of(rows, set=name, way="chosen")
        share = fmean(row["chosen"] == "per input" for row in chosen)
        yield [f"| {name} | {share:.0%} | {spread(paired(of(rows, set=name, way='one noise'), chosen), 1, 3)} |"]


def summary(results: dict[str, Any]) -> str:
    """The table of the documentation."""
    rows = with_choice(results["rows"])
    lines = [
        "| set | as trained | one noise | chosen noise | NLL, one noise minus chosen |",
        "|---|---:|---:|---:|---:|",
    ]
    for name in SETS:
        some = of(rows, set=name)
        cells = [figure(of(some, way=way), "coverage") for way in ("as trained", "one noise", "chosen")]
        gain = spread(paired(of(some, way="one noise"), of(some, way="chosen")), 1, 2)
        lines.append(f"| {name} | {' | '.join(cells)} | {gain} |")
    return "\n".join(lines)


HEADS = {
    "coverage": "Coverage of 90% intervals, %",
    "log_density": "NLL, in the target's units",
    "width": "Median width of 90% intervals, in standard deviations of the target",
}


def figure(rows: Sequence[Row], key: str) -> str:
    """A cell of a table: on average over methods, with the standard error over splits."""
    if key == "width":
        return f"{median(row['width'] / row['target_std'] for row in rows):.2f}"
    return spread(by_split(rows, key), 100) if key == "coverage" else spread(by_split(rows, key), -1, 3)


def paired(first: Sequence[Row], second: Sequence[Row]) -> list[float]:
    """By how much the second rows have a higher density, by split, on average over methods."""
    return [b - a for a, b in zip(by_split(first, "log_density"), by_split(second, "log_density"), strict=True)]


def goals(rows: Sequence[Row], sets: Sequence[str]) -> str:
    """How many sets have a mean coverage of 88 to 92%, by way."""
    found = {way: [fmean(by_split(of(rows, set=name, way=way), "coverage")) for name in sets] for way in SHOWN}
    counts = {way: sum(LOWEST <= round(mean, 3) <= HIGHEST for mean in means) for way, means in found.items()}
    return ", ".join(f"{count} {way}" for way, count in counts.items())


def method_cell(rows: Sequence[Row]) -> str:
    """The coverage of a method in three ways."""
    before, now, chosen = (
        spread([row["coverage"] for row in of(rows, way=way)], 100) for way in ("as trained", "one noise", "chosen")
    )
    return f"{before.split(' ±')[0]} → {now} ({chosen.split(' ±')[0]})"


def main() -> None:
    """Measure what is missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--redraw", action="store_true", help="write the page again without measuring")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"setup": {}, "rows": []}
    done = {(row["set"], row["method"], row["split"], row["way"]) for row in results["rows"]}
    with tempfile.TemporaryDirectory() as folder:
        for place in [] if options.redraw else places(options.sets):
            if place not in done:
                results["rows"].append(measured(*place, Path(folder)))
                results["setup"] = {"torch": torch.__version__, "machine": platform.machine()}
                write(results)
    RESULTS.with_suffix(".md").write_text(markdown(results))


def places(sets: Sequence[str]) -> list[tuple[str, str, int, str]]:
    """Everything to measure: the first splits of all sets, then the others."""
    every = [(name, m, split, way) for name in sets for split in range(SETS[name]) for m in METHODS for way in WAYS]
    return sorted(every, key=lambda place: place[2] >= FIRST)


def write(results: dict[str, Any]) -> None:
    """Write the results, whole or not at all."""
    part = RESULTS.with_suffix(".part")
    rows = [
        {key: float(f"{v:.5g}") if isinstance(v, float) else v for key, v in row.items()} for row in results["rows"]
    ]
    lines = ",\n".join(json.dumps(row) for row in rows)
    part.write_text(f'{{"setup": {json.dumps(results["setup"])}, "rows": [\n{lines}\n]}}\n')
    os.replace(part, RESULTS)


if __name__ == "__main__":
    main()
