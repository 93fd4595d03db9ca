"""Conformal prediction in the lab: rows of their own, evaluation, the file of predictions and the report."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import beta

import bayesify as by
from bayesify.cli import main
from bayesify.errors import BayesifyError
from bayesify.lab.data import DataError, load
from bayesify.lab.evaluation import evaluate
from bayesify.lab.prediction_files import predict_files
from bayesify.lab.recipes import Recipe
from bayesify.lab.report import write_report
from bayesify.lab.runs import Run, RunError
from bayesify.lab.training import train

KINDS = {"buys": "classes", "spends": "real targets"}


def write_customers(path: Path, rows: int = 800) -> None:
    generator = np.random.default_rng(0)
    age, income = generator.normal(45, 12, rows), generator.normal(30, 5, rows)
    score = (age - 45) / 12 + (income - 30) / 5 + generator.normal(0, 0.7, rows)
    buys = np.select([score > 1, score > -0.5], ["much", "little"], "nothing")
    lines = zip(age, income, buys, 100 * score, strict=True)
    text = "\n".join(f"{a:.2f},{i:.2f},{b},{s:.3f}" for a, i, b, s in lines)
    path.write_text(f"age,income,buys,spends\n{text}\n")


def recipe_of(path: Path, target: str = "buys", **parts: Any) -> Recipe:
    other = next(name for name in KINDS if name != target)
    data = {"name": "table", "path": str(path), "options": {"target": target, "drop": [other]}, "calibration": 0.25}
    given = {
        "data": {**data, **parts.pop("data", {})},
        "model": {"name": "mlp", "options": {"hidden": [16]}},
        "training": {"epochs": 2},
        "evaluation": {"samples": 4, **parts.pop("evaluation", {})},
    }
    return Recipe.of({**given, **parts})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """A trained run of classes and one of real targets."""
    folder = tmp_path_factory.mktemp("customers")
    write_customers(folder / "customers.csv")
    return {
        target: train(recipe_of(folder / "customers.csv", target), folder / target, progress=False) for target in KINDS
    }


@pytest.fixture(params=KINDS)
def run(request: pytest.FixtureRequest, runs: dict[str, Run], tmp_path: Path) -> Run:
    """A copy of each run."""
    return Run(Path(shutil.copytree(runs[request.param].folder, tmp_path / "run")))


def predicted(run: Run, tmp_path: Path, **options: Any) -> list[dict[str, str]]:
    """The rows of the file of predictions of all customers."""
    predict_files(run, [Path(str(run.recipe.data.path))], tmp_path / "out.csv", **options)
    with (tmp_path / "out.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def rule_by_hand(run: Run, coverage: float = 0.9, samples: int | None = None) -> by.Conformal:
    trained, rows = run.load(), run.data().calibration
    return by.conformal(trained.predict(rows, samples), rows.targets, coverage)


# The rows.


def test_calibration_rows_are_rows_of_the_training_split_and_change_no_other() -> None:
    without, data = load("digits"), load("digits", calibration=200)
    assert str(data) == "digits: 1094 train, 144 validation, 359 test, 200 calibration; images (1, 8, 8), 10 classes"
    assert len(without.calibration) == 0 and "calibration" not in str(without)
    for split in ("validation", "test"):
        assert torch.equal(getattr(data, split).raw(torch.arange(144)), getattr(without, split).raw(torch.arange(144)))
    parts = [data.train, data.calibration]
    found, expected = (
        sorted(row.flatten().tolist() for part in some for row in part.raw(torch.arange(len(part))))
        for some in (parts, [without.train])
    )
    assert found == expected
    assert data.calibration.targets.bincount().tolist() == pytest.approx([20] * 10, abs=2)
    limited = load("digits", calibration=0.1, limit=50)
    assert (len(limited.train), len(limited.calibration)) == (50, 129)
    with pytest.raises(DataError, match=r"calibration=1\.5"):
        load("digits", calibration=1.5)


def test_calibration_rows_choose_nothing(tmp_path: Path) -> None:
    """Other targets in them change no weight, no noise, no prediction and no other metric."""
    write_customers(tmp_path / "customers.csv", 300)
    recipe = recipe_of(tmp_path / "customers.csv", "spends")
    first = train(recipe, tmp_path / "first", progress=False)
    data = first.data()
    own = {round(float(v), 3) for v in data.targets.restore(data.calibration.targets, torch.ones(1, 1))[0].flatten()}
    head, *lines = (tmp_path / "customers.csv").read_text().split()
    parts = [line.rsplit(",", 1) for line in lines]
    changed = [f"{rest},{1000.0 if min(abs(float(y) - v) for v in own) < 2e-3 else y}" for rest, y in parts]
    assert sum(line.endswith(",1000.0") for line in changed) >= len(data.calibration) > 40
    (tmp_path / "customers.csv").write_text("\n".join([head, *changed]) + "\n")
    second = train(recipe, tmp_path / "second", progress=False)
    for file in ("model.safetensors", "preprocessing.json"):
        assert (first.folder / file).read_bytes() == (second.folder / file).read_bytes()
    assert first.conformal_file.read_bytes() != second.conformal_file.read_bytes()
    for split in ("validation", "test"):
        one, other = first.metrics[split], second.metrics[split]
        assert {key for key in one if one[key] != other[key]} == {"conformal_coverage", "conformal_width", "interval"}


# Evaluation and prediction.


def test_evaluation_has_what_the_rule_of_the_calibration_rows_gives(run: Run) -> None:
    rule, data, trained = rule_by_hand(run), run.data(), run.load()
    for split in ("validation", "test"):
        rows, found = getattr(data, split), run.metrics[split]
        sets = rule(trained.predict(rows))
        hit = sets.covers(rows.targets).double()
        assert found["conformal_asked"] == 0.9
        assert found["conformal_coverage"] == pytest.approx(float(hit.mean()))
        low, high = found["interval"]["conformal_coverage"]
        assert low <= found["conformal_coverage"] <= high
        if "nll" in found:
            assert found["conformal_size"] == pytest.approx(float(sets.set.double().sum(1).mean()))
            worst = min(hit[rows.targets == k].mean() for k in range(3))
            assert found["conformal_worst_class"] == pytest.approx(float(worst))
        else:
            assert found["conformal_width"] == pytest.approx(float(sets.size.mean()) * data.targets.std[0], rel=1e-5)
    n = len(data.calibration)
    spread = beta(int(0.9 * (n + 1)) + 1, n - int(0.9 * (n + 1))).std() + 0.3 / len(data.test) ** 0.5
    assert abs(run.metrics["test"]["conformal_coverage"] - 0.9) < 4 * spread


def test_predictions_have_sets_or_intervals_that_hold_as_often_as_asked(run: Run, tmp_path: Path) -> None:
    with Path(str(run.recipe.data.path)).open(newline="") as file:
        truth = list(csv.DictReader(file))
    sizes, width = [], "conformal_size"
    for coverage in (None, 0.6, 0.9, 0.97):
        rows = predicted(run, tmp_path, coverage=coverage)
        if "label" in rows[0]:
            sets = [row["conformal_set"].split("; ") if row["conformal_set"] else [] for row in rows]
            assert [int(row["conformal_size"]) for row in rows] == list(map(len, sets))
            hit = [each["buys"] in found for each, found in zip(truth, sets, strict=True)]
            sizes.append(np.mean(list(map(len, sets))))
        else:
            width = "conformal_high"
            bounds = [(float(row["conformal_low"]), float(row["conformal_high"])) for row in rows]
            hit = [low <= float(each["spends"]) <= high for each, (low, high) in zip(truth, bounds, strict=True)]
            sizes.append(np.mean([high - low for low, high in bounds]))
        assert np.mean(hit) == pytest.approx(coverage or 0.9, abs=0.08)
    assert sizes[0] == sizes[2] and sizes[1] < sizes[2] < sizes[3] and width in rows[0]


def test_the_saved_rule_needs_no_data_and_another_coverage_does(run: Run, tmp_path: Path) -> None:
    new = tmp_path / "new.csv"
    new.write_text("age,income\n40,31\n70,20\n")
    text = run.recipe_file.read_text().replace("customers.csv", "nowhere.csv")
    run.recipe_file.write_text(text)
    assert predict_files(run, [new], tmp_path / "out.csv") == 2
    assert predict_files(run, [new], tmp_path / "out.csv", coverage=0.9, samples=4) == 2
    with pytest.raises(DataError, match=r"nowhere\.csv"):
        predict_files(run, [new], tmp_path / "out.csv", coverage=0.8)


def test_other_draws_have_a_rule_of_their_own_if_asked_for(run: Run, tmp_path: Path) -> None:
    assert not any(name.startswith("conformal") for name in predicted(run, tmp_path, samples=1)[0])
    rows = predicted(run, tmp_path, samples=1, coverage=0.9)
    rule, trained = rule_by_hand(run, samples=1), run.load()
    examples, _ = trained.inputs.read([str(run.recipe.data.path)])
    found = rule(trained.predict(examples, 1))
    if "label" in rows[0]:
        assert [int(row["conformal_size"]) for row in rows] == found.size.tolist()
    else:
        low = trained.targets.restore(found.interval[0], found.interval[0])[0].flatten()  # type: ignore[attr-defined]
        assert [float(row["conformal_low"]) for row in rows] == pytest.approx(low.tolist(), rel=1e-4, abs=1e-2)


def test_options_of_the_rule_are_keys_of_the_recipe(run: Run) -> None:
    is_classes = "nll" in run.metrics["test"]
    options = {"score": "aps", "class_conditional": True, "seed": 1} if is_classes else {"score": "cqr"}
    found = evaluate(run, splits=["test"], conformal={"coverage": 0.8, **options})
    assert found["test"]["conformal_asked"] == 0.8
    saved = by.Conformal.from_dict(json.loads(run.conformal_file.read_text())["rule"])
    assert (saved.score, saved.coverage, saved.seed) == (options["score"], 0.8, options.get("seed"))
    assert saved.threshold.shape == ((3,) if is_classes else (1,))


def test_a_model_that_is_saved_anew_has_no_rule_of_the_old_one(runs: dict[str, Run], tmp_path: Path) -> None:
    run = Run(Path(shutil.copytree(runs["buys"].folder, tmp_path / "run")))
    trained = run.load()
    run.save(trained.model, trained.likelihood, run.data())
    assert not run.conformal_file.exists()
    evaluate(run)
    assert run.conformal_file.exists()


def test_the_command_takes_a_coverage(runs: dict[str, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = runs["buys"], tmp_path / "out.csv"
    words = ["predict", str(run.folder), str(run.recipe.data.path), "--out", str(out)]
    assert main([*words, "--coverage", "0.5"]) == 0
    assert '"conformal_set","conformal_size"' in out.read_text().splitlines()[0]
    assert main([*words, "--coverage", "90"]) == 2
    assert "coverage=90.0; expected a number between 0 and 1" in capsys.readouterr().err


def test_the_report_has_a_table(runs: dict[str, Run], tmp_path: Path) -> None:
    for target, words in (("buys", "Conformal sets"), ("spends", "Conformal intervals")):
        write_report([runs[target]], tmp_path / "report.html")
        page = (tmp_path / "report.html").read_text()
        value = 100 * runs[target].metrics["test"]["conformal_coverage"]
        table = page[page.index(words) :].split("</table>")[0]
        assert f"{value:.1f}" in table and "covered" in table and "90.0" in table


# What is refused.


@pytest.mark.parametrize(
    ("target", "parts", "message"),
    [
        ("buys", {"data": {"calibration": 0}, "evaluation": {"conformal": {"coverage": 0.8}}}, "data.calibration=0.1"),
        ("buys", {"data": {"calibration": 5}}, "5 rows, with which .* give at least 9"),
        ("spends", {"data": {"calibration": 5}}, "5 rows, with which .* give at least 9"),
        ("buys", {"data": {"calibration": 20}, "evaluation": {"conformal": {"class_conditional": True}}}, "of class"),
        ("buys", {"evaluation": {"conformal": {"score": "cqr"}}}, "score='cqr' for classes"),
        ("spends", {"evaluation": {"conformal": {"score": "raps"}}}, "score='raps' for real targets"),
        ("spends", {"evaluation": {"conformal": {"class_conditional": True}}}, "class_conditional"),
        ("buys", {"evaluation": {"conformal": {"coverage": 1.0}}}, "conformal.coverage"),
    ],
)
def test_what_does_not_fit_is_said_before_training(target: str, parts: Any, message: str, tmp_path: Path) -> None:
    write_customers(tmp_path / "customers.csv", 200)
    with pytest.raises(BayesifyError, match=message):
        train(recipe_of(tmp_path / "customers.csv", target, **parts), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_a_coverage_needs_calibration_rows(tmp_path: Path) -> None:
    write_customers(tmp_path / "customers.csv", 200)
    recipe = recipe_of(tmp_path / "customers.csv", data={"calibration": 0}, training={"epochs": 1})
    run = train(recipe, tmp_path / "run", progress=False)
    assert not run.conformal_file.exists() and "conformal_coverage" not in run.metrics["test"]
    with pytest.raises(RunError, match=r"no calibration rows.*data\.calibration=0\.1"):
        predicted(run, tmp_path, coverage=0.9)
    with pytest.raises(BayesifyError, match=r"data\.calibration=0\.1"):
        evaluate(run, conformal={"coverage": 0.8})


def edits() -> dict[str, Callable[[dict[str, Any]], Any]]:
    return {
        "a list": lambda values: [values],
        "nothing": lambda values: {},
        "no rule": lambda values: {**values, "rule": None},
        "no draws": lambda values: {"rule": values["rule"]},
        "coverage": lambda values: {**values, "rule": {**values["rule"], "coverage": 9}},
        "shape": lambda values: {**values, "rule": {**values["rule"], "shape": [7]}},
        "kind": lambda values: {**values, "rule": {**values["rule"], "score": "cqr", "threshold": [1.0, 1.0, 1.0]}},
        "threshold": lambda values: {**values, "rule": {**values["rule"], "threshold": [float("nan")] * 3}},
    }


@pytest.mark.parametrize("edit", edits())
def test_a_damaged_rule_is_named(edit: str, runs: dict[str, Run], tmp_path: Path) -> None:
    run = Run(Path(shutil.copytree(runs["buys"].folder, tmp_path / "run")))
    values = edits()[edit](json.loads(run.conformal_file.read_text()))
    for text in (json.dumps(values), json.dumps(values)[:-9], ""):
        run.conformal_file.write_text(text)
        with pytest.raises(RunError, match=r"conformal\.json"):
            predicted(run, tmp_path)
