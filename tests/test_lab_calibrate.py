"""The noise of real targets: set by validation rows, one for all inputs or one for each, saved and loaded."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bayesify as by
from bayesify.lab.comparison import CompareError
from bayesify.lab.comparison.compare_recipes import compare
from bayesify.lab.data import Reals
from bayesify.lab.metrics import coverage
from bayesify.lab.recipes import Recipe, RecipeError
from bayesify.lab.runs import load_data
from bayesify.lab.training import train
from benchmarks import regression


def recipe(folder: Path, method: str = "none", rows: int = 300, **parts: Any) -> Recipe:
    """A table whose noise is ten times as large where x is positive."""
    path, draw = folder / "data.csv", np.random.default_rng(0)
    if not path.exists():
        x = draw.normal(size=(rows, 2))
        y = 50 + 10 * x[:, 0] + np.where(x[:, 0] > 0, 5, 0.5) * draw.normal(size=rows)
        lines = [f"{a:.4f},{b:.4f},{c:.4f}" for (a, b), c in zip(x, y, strict=True)]
        path.write_text("\n".join(["a,b,price", *lines]))
    data = {"name": "table", "path": str(path), "options": {"target": "price"}, "validation": 60, "batch_size": 64}
    model = {"name": "mlp", "options": {"hidden": [16]}, **parts.pop("model", {})}
    training = {"epochs": 3, "lr": 0.05, **parts.pop("training", {})}
    given = {"data": {**data, **parts.pop("data", {})}, "model": model, "method": method, "training": training}
    return Recipe.of({**given, **parts})


def test_the_noise_is_that_of_the_validation_rows(tmp_path: Path) -> None:
    runs = {
        calibrate: train(
            recipe(tmp_path, likelihood={"calibrate": calibrate}), tmp_path / str(calibrate), progress=False
        )
        for calibrate in (True, False)
    }
    trained, as_trained = (run.load() for run in runs.values())
    data = runs[True].data()
    x = data.inputs.prepare(data.validation.raw(torch.arange(60)))
    squares = (trained.model(x) - data.validation.targets).detach().double().square()
    variance = float((-trained.likelihood.log_precision).exp())
    assert variance == pytest.approx(float(squares.mean()) * 60 / 58, rel=2e-3)
    before = float((-as_trained.likelihood.log_precision).exp())
    assert runs[True].facts["noise_factor"] == pytest.approx(math.sqrt(variance / before), rel=1e-3)
    assert "by 60 validation rows" in runs[True].facts["noise"] and "noise" not in runs[False].facts
    assert list(runs[True].metrics["test"])[:3] == ["n", "draws", "coverage"]


@pytest.mark.parametrize("likelihood", [{"precision": 2.0}, {"precision": "learned"}])
def test_a_number_stays_and_so_does_noise_without_rows_to_set_it_by(likelihood: dict[str, Any], tmp_path: Path) -> None:
    given = {} if likelihood["precision"] == 2.0 else {"data": {"validation": 2}}
    run = train(recipe(tmp_path, likelihood=likelihood, **given), tmp_path / "run", progress=False)
    if likelihood["precision"] == 2.0:
        assert float(run.load().likelihood.log_precision.exp()) == pytest.approx(2.0) and "noise" not in run.facts
    else:
        assert "2 validation rows are too few" in run.facts["noise"] and "noise_factor" not in run.facts


def test_a_precision_in_the_targets_units_is_that_of_the_regression_benchmark(tmp_path: Path) -> None:
    """EMP, D.7, as Gal's code computes it: log Σ_s exp(-τ/2 (y - ŷ_s)²) - log S - ½ log 2π + ½ log τ."""
    likelihood = {"precision": 0.1, "units": "target", "training_precision": 2.0}
    run = train(
        recipe(tmp_path, "MCDropout", likelihood=likelihood, evaluation={"samples": 30}),
        tmp_path / "run",
        progress=False,
    )
    trained, data = run.load(), run.data()
    p = trained.predict(data.test)
    assert isinstance(data.targets, Reals) and p.draws is not None
    means = data.targets.restore(p.draws, p.draws)[0].double().numpy()
    y = data.targets.restore(data.test.targets, data.test.targets)[0].double().numpy()
    exponents = -0.1 / 2 * (y - means) ** 2
    each = np.log(np.exp(exponents).mean(0)) - 0.5 * np.log(2 * np.pi) + 0.5 * np.log(0.1)
    assert run.metrics["test"]["log_density"] == pytest.approx(each.mean(), rel=1e-5)
    assert run.metrics["test"]["aleatoric_std"] == pytest.approx(0.1**-0.5, rel=1e-5)
    squared = train(recipe(tmp_path, "MCDropout", likelihood={"precision": 2.0}), tmp_path / "2", progress=False)
    weights, same = trained.model.state_dict(), squared.load().model.state_dict()
    assert all(torch.equal(weights[name], same[name]) for name in weights)  # which is what training had


@pytest.mark.parametrize(
    ("likelihood", "target", "message"),
    [
        ({"units": "target"}, "price", "units and training_precision need a number for precision, not 'learned'"),
        ({"training_precision": 2.0}, "price", "units and training_precision need a number for precision"),
        ({"precision": 1.0, "units": "target"}, ["price", "b"], "is for one target, but there are 2: price, b"),
    ],
)
def test_units_without_a_number_or_of_several_targets_are_refused(
    likelihood: dict[str, Any], target: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(by.BayesifyError, match=message):
        given = recipe(tmp_path, likelihood=likelihood)
        options = {"data": {**given.data.model_dump(), "options": {"target": target}}}
        train(Recipe.of({**given.plain(), **options}), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_networks_in_double_precision_have_their_noise_set(tmp_path: Path) -> None:
    run = train(recipe(tmp_path, "MeanField", training={"precision": "64-true"}), tmp_path / "run", progress=False)
    data = run.data()
    held = coverage(run.load().predict(data.validation), data.validation.targets)
    assert float(held) == pytest.approx(0.9, abs=0.07)


def test_noise_for_each_input_is_chosen_where_it_pays(tmp_path: Path) -> None:
    training = {"epochs": 25}
    run = train(
        recipe(tmp_path, "MeanField", likelihood={"precision": "auto"}, training=training),
        tmp_path / "a",
        progress=False,
    )
    trained, data = run.load(), run.data()
    assert trained.likelihood.per_input and trained.recipe.likelihood.precision == "input"
    assert "one noise for all inputs" in run.facts["noise"] and "a noise for each input" in run.facts["noise"]
    p, a = trained.predict(data.test), data.test.raw(torch.arange(len(data.test)))[:, 0]
    assert p.aleatoric_std[a > 0.5].mean() > 3 * p.aleatoric_std[a < -0.5].mean()
    assert float(coverage(trained.predict(data.validation), data.validation.targets)) == pytest.approx(0.9, abs=0.07)
    alone = train(
        recipe(tmp_path, "MeanField", likelihood={"precision": "input"}, training=training),
        tmp_path / "b",
        progress=False,
    )
    torch.testing.assert_close(alone.load().predict(data.test).std, p.std)  # and the factor was saved
    assert json.loads((alone.folder / "preprocessing.json").read_text())["precision_factor"] != 1
    for name in ("learned", "input"):  # a finished half is not trained again
        (tmp_path / "a" / f"noise-{name}" / "checkpoint.ckpt").unlink()
    run.note(status="started")
    again = train(run.recipe, run.folder, resume=True, progress=False)
    torch.testing.assert_close(again.load().predict(data.test).std, p.std)


def test_a_choice_of_noise_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    auto = {"precision": "auto"}
    with pytest.raises(RecipeError, match="'auto' is chosen by validation rows, but there are none"):
        train(recipe(tmp_path, likelihood=auto, data={"validation": 0}), tmp_path / "a", progress=False)
    with pytest.raises(RecipeError, match="trained weights have a fixed number"):
        train(recipe(tmp_path, likelihood=auto, model={"weights": "any"}), tmp_path / "b", progress=False)
    with pytest.raises(CompareError, match=r"the base has .*'auto'"):
        compare({"a": {"method": "Rank1"}}, tmp_path / "c", base=recipe(tmp_path, likelihood=auto))


@pytest.mark.parametrize("method, way", [("Rank1", "one noise"), ("none", "per input")])
def test_the_benchmark_trains_as_the_lab_does(method: str, way: str, tmp_path: Path) -> None:
    """With gradients clipped to a norm of 1, and the same noise."""
    own = recipe(tmp_path, method, training={"lr": 0.1}, **regression.WAYS[way])
    network, likelihood = regression.train(own, load_data(own))
    trained = train(own, tmp_path / "run", progress=False).load()
    torch.testing.assert_close(dict(network.state_dict()), dict(trained.model.state_dict()), rtol=0, atol=0)
    assert likelihood.log_precision.item() == pytest.approx(trained.likelihood.log_precision.item(), abs=1e-5)
    free, _ = regression.train(own, load_data(own), clip=1e9)
    assert not torch.equal(next(iter(free.state_dict().values())), next(iter(network.state_dict().values())))


def test_the_page_is_that_of_the_results() -> None:
    results = json.loads(regression.RESULTS.read_text())
    assert regression.RESULTS.with_suffix(".md").read_text() == regression.markdown(results)
    page = Path(__file__).parents[1] / "docs" / "recipes.md"
    assert regression.summary(results) in page.read_text()


def classes(folder: Path, method: str, **likelihood: Any) -> Recipe:
    """A table of classes, a fifth of them by chance."""
    path, draw = folder / "classes.csv", np.random.default_rng(1)
    x = draw.normal(size=(400, 2))
    y = np.where(draw.random(400) < 0.2, draw.random(400) < 0.5, x[:, 0] > 0)
    lines = [f"{a:.4f},{b:.4f},{'yes' if k else 'no'}" for (a, b), k in zip(x, y, strict=True)]
    path.write_text("\n".join(["a,b,kind", *lines]))
    data = {"name": "table", "path": str(path), "options": {"target": "kind"}, "validation": 100, "batch_size": 64}
    model, training = {"name": "mlp", "options": {"hidden": [16]}}, {"epochs": 2, "lr": 0.05}
    given = {"data": data, "model": model, "method": method, "training": training}
    return Recipe.of({**given, "likelihood": likelihood})


def test_the_temperature_of_classes_is_set_by_validation_rows_and_saved(tmp_path: Path) -> None:
    run = train(classes(tmp_path, "Rank1"), tmp_path / "run", progress=False)
    other = train(classes(tmp_path, "Rank1", calibrate=False), tmp_path / "other", progress=False)
    assert run.facts["temperature"] == run.load().likelihood.temperature != 1
    assert other.load().likelihood.temperature == 1 and "temperature" not in other.facts
    validation = run.data().validation
    nll = {
        each: -each.load().predict(validation, 20).log_probs.gather(1, validation.targets[:, None]).mean()
        for each in (run, other)
    }
    assert nll[run] < nll[other]


def test_a_plain_network_keeps_its_temperature(tmp_path: Path) -> None:
    run = train(classes(tmp_path, "none"), tmp_path / "run", progress=False)
    assert run.load().likelihood.temperature == 1 and "temperature" not in run.facts
