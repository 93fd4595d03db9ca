"""Comparisons: what is trained from what, and what the table makes of it."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from comparisons import BASE, RECIPES, SHORT, fake, faked
from rich.console import Console
from safetensors.torch import load_file

import bayesify as by
from bayesify.lab.comparison import compare_recipes
from bayesify.lab.comparison.chance import beats, difference
from bayesify.lab.comparison.compare_recipes import compare
from bayesify.lab.comparison.table import CompareError, Comparison
from bayesify.lab.metrics.bootstrap import bootstrap
from bayesify.lab.metrics.weighted import mean as mean_of
from bayesify.lab.recipes import Recipe, default_training
from bayesify.lab.runs import Run, write_json
from bayesify.lab.shift import CORRUPTIONS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compare")


@pytest.fixture(scope="module")
def trained(folder: Path) -> Comparison:
    return compare(RECIPES, folder, seeds=2, base=BASE, progress=False)


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError(f"trains {args}")

    monkeypatch.setattr(compare_recipes, "train", refuse)


# What is trained.


def test_every_recipe_has_a_run_for_every_seed(trained: Comparison, folder: Path) -> None:
    found = sorted(str(path.parent.relative_to(folder)) for path in folder.glob("*/*/metrics.json"))
    assert found == [f"{name}/seed-{seed}" for name in ("BatchEnsemble", "Rank1", "base") for seed in (0, 1)]
    assert [row.name for row in trained.rows] == ["plain network", "Rank1", "BatchEnsemble"]
    assert trained.seeds == [0, 1] and [row.is_plain for row in trained.rows] == [True, False, False]
    assert [row.is_bayesian for row in trained.rows] == [False, True, True]


def test_recipes_start_from_the_base_of_their_seed(trained: Comparison, folder: Path) -> None:
    for row in trained.rows[1:]:
        for seed, run in enumerate(row.runs):
            recipe = run.recipe
            assert recipe.seed == seed and recipe.data == Recipe.of(BASE).data
            assert recipe.model.weights == str(folder / "base" / f"seed-{seed}" / "model.safetensors")
            assert recipe.evaluation.samples == 4 and recipe.model.options == {"channels": [4, 8]}


def test_what_a_recipe_does_not_say_is_the_methods_fine_tuning(trained: Comparison) -> None:
    rank1, ensemble = (row.runs[0].recipe.training for row in trained.rows[1:])
    assert rank1.posterior_lr == default_training("Rank1", trained=True)["posterior_lr"]
    assert rank1.schedule == default_training("Rank1", trained=True)["schedule"] and rank1.epochs == 1
    assert ensemble.lr == 0.003


def test_of_a_recipe_that_counts_as_said_which_differs_from_scratch(folder: Path) -> None:
    given = Recipe.of({**BASE, "method": "IBNN", "training": {"epochs": 2}})
    made = compare_recipes._resolve("IBNN", given, compare_recipes._base_recipe(BASE))
    tuned = Recipe.of({"method": "IBNN", "model": {"weights": "x"}, "training": {"epochs": 2}})
    assert made.training == tuned.training and made.method == tuned.method and made.data == given.data
    said = compare_recipes._resolve(
        "IBNN", Recipe.of({**BASE, "method": {"name": "IBNN", "mean_std": 0.7}}), compare_recipes._base_recipe(BASE)
    )
    assert said.method.mean_std == 0.7


def test_deep_ensembles_are_trained_from_scratch(folder: Path) -> None:
    base = compare_recipes._base_recipe(BASE)
    made = {"deep": compare_recipes._resolve("deep", {"method": "deep_ensemble", "training": SHORT}, base)}
    _, (_, recipe, _) = compare_recipes._jobs(made, base, folder, 1)
    assert recipe.model.weights is None and recipe.training.lr == default_training("deep_ensemble", trained=False)["lr"]


@pytest.mark.usefixtures("no_training")
def test_finished_runs_are_not_trained_again(trained: Comparison, folder: Path) -> None:
    again = compare(RECIPES, folder, seeds=2, base=BASE, progress=False)
    assert again.to_dict() == trained.to_dict()


def test_an_interrupted_run_goes_on_and_lost_metrics_are_measured_again(tmp_path: Path) -> None:
    recipe = Recipe.of({**BASE, "method": "none"})
    Run.create(tmp_path / "plain" / "seed-0", recipe)
    compare({"plain": recipe}, tmp_path, seeds=1, progress=False)
    run = Run.open(tmp_path / "plain" / "seed-0")
    found = run.metrics
    (run.folder / "metrics.json").unlink()
    compare({"plain": recipe}, tmp_path, seeds=1, progress=False)
    assert run.metrics == found


def test_without_a_base_recipes_start_from_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Recipe] = []

    def note(recipe: Recipe, folder: Path, **options: Any) -> Run:
        seen.append(recipe)
        return fake(folder, recipe)

    monkeypatch.setattr(compare_recipes, "train", note)
    found = compare({"a": {"method": "Rank1"}, "b": Recipe.of({"method": "none"})}, tmp_path, seeds=2, progress=True)
    assert [recipe.seed for recipe in seen] == [0, 0, 1, 1] and all(not recipe.model.is_trained for recipe in seen)
    assert [row.name for row in found.rows] == ["a", "b"]


@pytest.mark.usefixtures("no_training")
@pytest.mark.parametrize(
    ("recipes", "options", "message"),
    [
        ({}, {}, "no recipes to compare"),
        ({"a": {}}, {"seeds": 0}, "seeds=0: expected an integer >= 1"),
        ({"a": {}, "b": {"data": {"limit": 5}}}, {}, "a has data.limit=None and b has 5"),
        ({"a": {}, "b": {"seed": 3}}, {}, "different seeds"),
        ({"a/b": {}}, {}, "'a/b' can't be a recipe's name"),
        ({"base": {}}, {"base": {}}, "other than 'base'"),
        ({"a": {}}, {"base": {"method": "Rank1"}}, "the base has the method 'Rank1'; expected 'none'"),
        ({"a": {"model": {"name": "lenet"}}}, {"base": {}}, "a has a different network from the base"),
        ({"a": {"model": {"weights": "w.pt"}}}, {"base": {}}, "a has its own weights"),
        ({"a": {"data": {"test": 0.5}}}, {"base": {}}, "plain network has data.test=None and a has 0.5"),
    ],
)
def test_what_does_not_compare_is_refused_before_training(
    tmp_path: Path, recipes: Any, options: Any, message: str
) -> None:
    with pytest.raises(CompareError, match=re.escape(message)):
        compare(recipes, tmp_path, **options)


def test_a_folder_with_another_recipe_is_refused(trained: Comparison, folder: Path) -> None:
    changed = {**RECIPES, "Rank1": {"method": {"name": "Rank1", "components": 3}, "training": SHORT}}
    with pytest.raises(CompareError, match="seed-0: holds a run of a different recipe"):
        compare(changed, folder, seeds=2, base=BASE, progress=False)


# The table.


def test_figures_are_means_and_deviations_of_the_runs(trained: Comparison) -> None:
    for row in trained.rows:
        for key in ("accuracy", "nll", "ece"):
            values = [run.metrics["test"][key] for run in row.runs]
            assert row.mean(key) == pytest.approx(mean(values)) and row.sd(key) == pytest.approx(stdev(values))
        assert row.mean("seconds") == pytest.approx(mean(run.facts["seconds"] for run in row.runs))
    plain, rank1, _ = trained.rows
    assert plain.mean("overhead") == 0 and plain.mean("noise_epistemic") is None
    assert rank1.mean("overhead") == pytest.approx(by.summary(rank1.runs[0].load().model).overhead)


def test_the_table_fits_a_terminal_and_marks_the_best(tmp_path: Path) -> None:
    found = faked(tmp_path, plain=[(0.3, 0.02), (0.31, 0.03)], Rank1=[(0.2, 0.05), (0.21, 0.061)])
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(found.table())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text and "0.305±0.007" in text and "mean±sd over 2 seeds" in text
    plain, rank1 = found.rows
    nll, ece = found.columns[1:3]
    assert found.is_best(rank1, nll) and not found.is_best(plain, nll) and found.is_best(plain, ece)
    assert not found.is_best(plain, found.columns[-1])  # costs are no contest


def test_nothing_is_best_by_chance(tmp_path: Path) -> None:
    found = faked(tmp_path, plain=[(0.3, 0.02), (0.31, 0.03)], Rank1=[(0.2, 0.05), (0.21, 0.04)])
    plain, rank1 = found.rows
    nll, ece = found.columns[1:3]  # differences of ECE: 0.03 and 0.01, a p-value of 0.3
    assert found.is_best(rank1, nll) and not found.is_best(plain, ece) and not found.is_best(rank1, ece)
    alone = Comparison.of({"Rank1": rank1.runs})
    assert not alone.is_best(alone.rows[0], nll)


def test_models_of_one_seed_are_compared_on_the_same_rows(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    hard, n = (
        draw.exponential(size=400),
        400,
    )  # rows that both find hard: their intervals overlap, the paired one does not
    truth = draw.integers(0, 3, n)

    def run(name: str, worse: float, **changes: Any) -> Run:
        nll = hard + worse * draw.uniform(0.5, 1.5, n)
        correct = nll < 2
        arrays = {"truth": truth, "nll": nll, "correct": correct, "label": np.where(correct, truth, (truth + 1) % 3)}
        arrays |= {"entropy": nll, "epistemic": nll, "confidence": np.full(n, 0.8)} | changes
        own = bootstrap({"nll": mean_of(torch.from_numpy(nll))}, n, torch.device("cpu"))
        made = fake(tmp_path / name, n=n, nll=float(nll.mean()), ood={}, interval={"nll": own["nll"]})
        np.savez(made.folder / "evaluation.npz", **{f"test_{key}": each for key, each in arrays.items()})
        return made

    runs = {"a": [run("a", 0.05)], "b": [run("b", 0.1)], "other rows": [run("c", 0.1, truth=(truth + 1) % 3)]}
    found = Comparison.of(runs)
    a, b, other = found.rows
    nll = found.columns[1]
    assert a.intervals["nll"][1] > b.intervals["nll"][0] and beats(a, b, nll) and not beats(b, a, nll)
    rows = [np.load(r.runs[0].folder / "evaluation.npz")["test_nll"] for r in (a, b)]
    scipys = scipy.stats.bootstrap(
        rows, lambda x, y: (x - y).mean(), paired=True, vectorized=False, method="percentile", rng=0, n_resamples=2000
    ).confidence_interval
    one = difference(a, b, nll)
    assert one is not None and one.mean == pytest.approx((rows[0] - rows[1]).mean())
    assert (one.low, one.high) == pytest.approx((scipys.low, scipys.high), abs=0.1 * (scipys.high - scipys.low))
    assert difference(a, other, nll) is None and not beats(a, other, nll)  # overlapping intervals


def test_csv_and_dict_have_every_figure(trained: Comparison, tmp_path: Path) -> None:
    trained.to_csv(tmp_path / "table.csv")
    with (tmp_path / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    plain = json.loads(json.dumps(trained.to_dict()))
    for written, told, row in zip(rows, plain["rows"], trained.rows, strict=True):
        assert written["model"] == told["name"] == row.name
        assert float(written["nll_mean"]) == told["nll"]["mean"] == row.mean("nll")
        assert told["nll"]["values"] == list(row.measured_values["nll"])
    assert rows[0]["noise_epistemic_mean"] == ""


def test_runs_are_in_the_order_of_their_seeds(tmp_path: Path) -> None:
    blind = {"ood": {"noise": {"entropy": None}}}
    runs = {
        name: [
            fake(tmp_path / name / f"seed-{s}", Recipe.of({"seed": s}), nll=s / 10, **(blind if s == lacks else {}))
            for s in order
        ]
        for name, order, lacks in (("a", (2, 0, 1), 0), ("b", (1, 2, 0), 1))
    }
    found = Comparison.of(runs)
    assert found.seeds == [0, 1, 2] and all(row.measured_values["nll"] == (0, 0.1, 0.2) for row in found.rows)
    first, second = found.rows
    assert first.measured_values["noise_entropy"] == (0.9, 0.9) and first.pairs(second, "noise_entropy") == [(0.9, 0.9)]
    assert first.values["noise_entropy"] == (None, 0.9, 0.9) and first.measured_values["noise_rejected"] == (0.6, 0.6)


def test_corruption_errors_are_relative_where_they_can_be(tmp_path: Path) -> None:
    def shifts(accuracy: float, fog: float) -> dict[str, Any]:
        kinds = {kind: fog if kind == "fog" else accuracy for kind in CORRUPTIONS}
        return {kind: {str(s): {"accuracy": value} for s in range(1, 6)} for kind, value in kinds.items()}

    def relative(ours: dict[str, Any], plain: dict[str, Any]) -> tuple[float | None, float | None]:
        home = tmp_path / str(len(list(tmp_path.iterdir())))
        runs = {
            "plain": [fake(home / "plain", Recipe.of({"method": "none"}), corrupted={}, **plain)],
            "a": [fake(home / "a", corrupted={}, **ours)],
        }
        row = Comparison.of(runs).rows[1]
        return row.mean("mce_corruption"), row.mean("rmce_corruption")

    ours, plain, unharmed = shifts(0.7, 0.7), shifts(0.4, 0.4), shifts(0.4, 0.9)
    assert relative({"shift": ours}, {"shift": plain}) == pytest.approx((0.5, 0.4))
    assert relative({"shift": ours}, {"shift": unharmed}) == (pytest.approx((14 * 0.5 + 3) / 15), None)
    same, fewer = {"shift": ours, "shift_rows": 50}, {"shift": plain, "shift_rows": 40}
    assert relative(same, fewer) == (None, None) and relative(same, {**fewer, "shift_rows": 50})[0] is not None


def test_intervals_are_found_where_their_figures_are(tmp_path: Path) -> None:
    inner = {"accuracy_at": {"0.95": [0.9, 0.97]}, "nll": [0.2, 0.4]}
    noise = {"noise": {"entropy": {"auroc": 0.9, "fpr95": 0.4, "interval": {"auroc": [0.85, 0.95]}}}}
    runs = [
        fake(tmp_path / str(s), Recipe.of({"seed": s}), accuracy_at={"0.95": 0.94}, interval=inner, ood=noise)
        for s in (0, 1)
    ]
    (row,) = Comparison.of({"a": runs[:1]}).rows
    assert row.intervals == {"nll": (0.2, 0.4), "accuracy_at_95": (0.9, 0.97), "noise_entropy": (0.85, 0.95)}
    assert Comparison.of({"a": runs}).rows[0].intervals == {}  # several runs have deviations


def test_no_width_of_intervals_is_best(tmp_path: Path) -> None:
    reals = {"nll": None, "rmse": 1.0, "log_density": -1.0, "coverage": 0.9}
    runs = {name: [fake(tmp_path / name, width=width, **reals)] for name, width in (("a", 1.0), ("b", 2.0))}
    for run, *_ in runs.values():
        metrics = run.metrics
        del metrics["test"]["nll"]
        write_json(run.folder / "metrics.json", metrics)
    found = Comparison.of(runs)
    assert [column.key for column in found.columns[:4]] == ["coverage", "log_density", "rmse", "width"]
    width = next(column for column in found.all_columns if column.key == "width")
    assert not any(found.is_best(row, width) for row in found.rows)


def test_other_splits_and_seeds_are_minded(trained: Comparison, tmp_path: Path) -> None:
    rows = {row.name: row.runs for row in trained.rows}
    other = Comparison.of(rows, "validation")
    assert other.rows[0].measured_values["nll"][0] == trained.rows[0].runs[0].metrics["validation"]["nll"]
    with pytest.raises(CompareError, match="not all runs were evaluated on train"):
        Comparison.of(rows, "train")
    with pytest.raises(CompareError, match=r"seeds \[0, 1\], Rank1 with \[0\]"):
        Comparison.of({**rows, "Rank1": rows["Rank1"][:1]})
    with pytest.raises(CompareError, match="no runs to compare"):
        Comparison.of({})


def test_the_plain_weights_are_those_the_methods_began_with(trained: Comparison, folder: Path) -> None:
    base = load_file(folder / "base" / "seed-0" / "model.safetensors")
    tuned = load_file(folder / "Rank1" / "seed-0" / "model.safetensors")
    assert set(base) < set(tuned)
    moved = max(float((tuned[name] - value).abs().max()) for name, value in base.items() if name.endswith("weight"))
    assert 0 < moved < 0.2
