"""Metrics against scikit-learn, scipy and numpy; evaluation and prediction files against what the model itself says."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from scipy.stats import norm
from sklearn import metrics as sk
from torch import Tensor

import bayesify as by
from bayesify.lab import metrics
from bayesify.lab.data import Arrays, Columns, DataError, Images, Reals, TensorExamples
from bayesify.lab.evaluation import EvaluationError, evaluate, noise, predictive, rows_of, threshold
from bayesify.lab.metrics import MetricError
from bayesify.lab.prediction_files import predict_files
from bayesify.lab.recipes import Recipe
from bayesify.lab.runs import Run, RunError, build_network, load_data, make_likelihood
from bayesify.prediction import Classification, Regression

# Metrics.


def classes(rows: int = 400, count: int = 5, draws: int = 7) -> tuple[Classification, Tensor]:
    outputs = 2 * torch.randn(draws, rows, count) + 2 * torch.randn(rows, count)
    p = by.Categorical().predictive(outputs)
    assert isinstance(p, Classification)
    return p, torch.randint(count, (rows,))


def reals(targets: int = 1, rows: int = 300, keep: bool = True) -> tuple[Regression, Tensor]:
    p = by.Gaussian(2.0).predictive(torch.randn(6, rows, targets), keep=keep)
    assert isinstance(p, Regression)
    return p, torch.randn(rows, targets)


def test_class_metrics_are_those_of_scikit_learn() -> None:
    p, y = classes()
    found = metrics.classification_metrics(p, y)
    probs, truth = p.probs.double().numpy(), y.numpy()
    probs /= probs.sum(1, keepdims=True)
    assert found["accuracy"] == pytest.approx(sk.accuracy_score(truth, probs.argmax(1)))
    assert found["nll"] == pytest.approx(sk.log_loss(truth, probs, labels=range(5)), abs=1e-6)
    each = [sk.brier_score_loss(truth == k, probs[:, k]) for k in range(5)]
    assert found["brier"] == pytest.approx(sum(each), abs=1e-6)
    assert found["entropy"] == pytest.approx(-(probs * np.log(probs)).sum(1).mean(), abs=1e-6)
    assert found["entropy"] == pytest.approx(found["aleatoric"] + found["epistemic"], abs=1e-6)


@pytest.mark.parametrize("bins", [15, 7])
def test_ece_is_its_formula(bins: int) -> None:
    p, y = classes()
    confidence, correct = p.confidence.double().numpy(), (p.label == y).numpy()
    place = np.digitize(confidence, np.linspace(0, 1, bins + 1)[1:-1])
    inside = [place == b for b in range(bins) if (place == b).any()]
    expected = sum(rows.mean() * abs(correct[rows].mean() - confidence[rows].mean()) for rows in inside)
    assert float(metrics.ece(p.probs, y, bins)) == pytest.approx(expected, abs=1e-6)


def test_a_probability_above_one_by_rounding_is_no_logit() -> None:
    probs, y = torch.tensor([[0.0, 1.0000001], [0.2, 0.8]]), torch.tensor([1, 0])
    assert float(metrics.ece(probs, y)) == pytest.approx(0.4)


@pytest.mark.parametrize("scale", [0.1, 1.0, 1000.0])
def test_detection_is_that_of_scikit_learn_whatever_the_scale(scale: float) -> None:
    familiar, strange = scale * torch.rand(200).round(decimals=2), scale * (0.2 + torch.rand(100)).round(decimals=2)
    truth, values = np.r_[np.zeros(200), np.ones(100)], torch.cat([familiar, strange]).numpy()
    assert float(metrics.auroc(familiar, strange)) == pytest.approx(sk.roc_auc_score(truth, values), abs=1e-6)
    expected = sk.average_precision_score(truth, values)
    assert float(metrics.average_precision(familiar, strange)) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("targets", [1, 3])
def test_real_metrics_are_in_the_targets_units(targets: int) -> None:
    p, y = reals(targets)
    units = Reals(tuple("abc"[:targets]), mean=(5.0, -1.0, 0.0)[:targets], std=(10.0, 0.5, 2.0)[:targets])
    found = metrics.regression_metrics(p, y, units)
    scale, shift = np.array(units.std), np.array(units.mean)
    truth, guess = y.double().numpy() * scale + shift, p.mean.double().numpy() * scale + shift
    assert found["rmse"] == pytest.approx(sk.root_mean_squared_error(truth, guess), rel=1e-6)
    assert p.draws is not None and p.draw_stds is not None
    means, widths = p.draws.double().numpy() * scale + shift, p.draw_stds.double().numpy() * scale
    density = norm.pdf(truth, means, widths).prod(-1).mean(0)
    assert found["log_density"] == pytest.approx(np.log(density).mean(), rel=1e-5)
    below = norm.cdf(truth, means, widths).mean(0)
    assert found["coverage"] == pytest.approx(((below > 0.05) & (below < 0.95)).mean())
    assert np.allclose(metrics.quantile_of(p, y), below, atol=1e-6)
    assert [key for key in found if key.startswith("rmse_")] == ([] if targets == 1 else ["rmse_a", "rmse_b", "rmse_c"])


def test_without_kept_draws_one_gaussian_stands_for_them() -> None:
    p, y = reals(keep=False)
    expected = norm.cdf(y, p.mean, p.std)
    assert np.allclose(metrics.quantile_of(p, y), expected, atol=1e-6)


def test_a_calibrated_model_has_the_coverage_it_claims() -> None:
    p = by.Gaussian(4.0).predictive(torch.zeros(1, 20000, 1), keep=True)
    assert isinstance(p, Regression)
    assert float(metrics.coverage(p, 0.5 * torch.randn(20000, 1))) == pytest.approx(0.9, abs=0.01)


def test_what_does_not_fit_is_refused() -> None:
    p, y = classes(rows=4)
    with pytest.raises(MetricError, match=r"labels must have shape \(4,\); got \(3,\)"):
        metrics.classification_metrics(p, y[:3])
    with pytest.raises(MetricError, match=r"labels from -1 to .*: expected 0 to 4"):
        metrics.classification_metrics(p, torch.tensor([-1, 0, 1, 2]))
    real, _ = reals()
    with pytest.raises(MetricError, match="they must be equal"):
        metrics.regression_metrics(real, torch.zeros(300), Reals(("a",), (0.0,), (1.0,)))
    with pytest.raises(MetricError, match="expected some of both"):
        metrics.auroc(torch.zeros(3), torch.zeros(0))
    with pytest.raises(MetricError, match="BinaryPrediction"):
        metrics.scores(by.Bernoulli().predictive(torch.zeros(1, 3)))


# Runs without training.


def make_run(folder: Path, method: Any = "Rank1", **parts: Any) -> Run:
    """A run whose model was never trained: evaluation doesn't mind."""
    recipe = Recipe.of({"method": method, "data": {"limit": 50}, **parts})
    run = Run.create(folder, recipe)
    data = load_data(recipe)
    network = build_network(recipe, data.inputs, data.targets)
    families = recipe.method.families()
    run.save(by.convert(network, families) if families else network, make_likelihood(recipe, data.targets), data)
    run.note(seconds=1.5, status="finished")
    return run


def table_run(folder: Path, method: str = "MeanField", rows: int = 120, precision: Any = 4.0) -> Run:
    x = np.random.default_rng(0).normal(size=rows)
    lines = ["x,kind,price", *(f"{v:.4f},{'ab'[i % 2]},{100 + 20 * v:.4f}" for i, v in enumerate(x))]
    (folder / "data.csv").write_text("\n".join(lines) + "\n")
    data = {"name": "table", "path": str(folder / "data.csv"), "options": {"target": "price", "task": "regression"}}
    return make_run(folder / "run", method, data=data, model={"name": "mlp"}, likelihood={"precision": precision})


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = make_run(tmp_path_factory.mktemp("digits") / "run")
    evaluate(run)
    return run


# Predictions and their evaluation.


def test_a_bayesian_predictive_is_that_of_predict_whatever_the_batches(digits_run: Run) -> None:
    trained, test = digits_run.load(), digits_run.data().test
    x = trained.inputs.prepare(test.raw(torch.arange(len(test))))
    expected = by.predict(trained.model, x, 6, seed=3)
    for batch_size in (None, 50):
        p = predictive(trained, test, samples=6, seed=3, batch_size=batch_size)
        assert isinstance(p, Classification) and p.samples == 6
        assert torch.allclose(p.log_probs, expected.log_probs, atol=1e-5)


def test_a_plain_predictive_is_one_call_in_eval_mode(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "none")
    trained, test = run.load(), run.data().test
    x = trained.inputs.prepare(test.raw(torch.arange(len(test))))
    expected = trained.model(x).softmax(-1)
    trained.model.train()
    p = predictive(trained, test, batch_size=100)
    assert isinstance(p, Classification) and p.samples == 1 and trained.model.training
    assert torch.allclose(p.probs, expected, atol=1e-5) and not p.epistemic.any()


def test_evaluate_writes_what_it_measures(digits_run: Run) -> None:
    written = json.loads((digits_run.folder / "metrics.json").read_text())
    trained, data = digits_run.load(), digits_run.data()
    p = predictive(trained, data.test)
    assert isinstance(p, Classification)
    for name, value in metrics.classification_metrics(p, data.test.targets).items():
        assert written["test"][name] == pytest.approx(value)
    assert written["test"]["n"] == 359 and written["validation"]["n"] == 144 and written["draws"] == 20
    assert written["overhead"] == pytest.approx(by.summary(trained.model).overhead)
    strange = predictive(trained, noise(trained.inputs, 1000))
    assert isinstance(strange, Classification)
    for kind in ("entropy", "epistemic"):
        truth = np.r_[np.zeros(359), np.ones(1000)]
        expected = sk.roc_auc_score(truth, np.r_[getattr(p, kind), getattr(strange, kind)])
        assert written["test"]["ood"]["noise"][kind] == pytest.approx(expected, abs=1e-6)


def test_the_rows_behind_the_metrics_are_kept(digits_run: Run) -> None:
    rows, written = rows_of(digits_run), digits_run.metrics
    assert rows["test_correct"].mean() == pytest.approx(written["test"]["accuracy"])
    assert rows["test_entropy"].mean() == pytest.approx(written["test"]["entropy"], rel=1e-5)
    above = rows["validation_entropy"] > written["threshold"]["value"]
    assert above.sum() == int(0.05 * 144) and len(rows["noise_epistemic"]) == 1000


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0])
def test_the_share_asked_for_lies_above_the_threshold(share: float) -> None:
    p, _ = classes(rows=200)
    found = threshold(p, share)
    assert int((p.entropy > found["value"]).sum()) == 200 * share


def test_one_draw_has_no_epistemic_part_to_detect_by(tmp_path: Path) -> None:
    found = evaluate(make_run(tmp_path / "run", "none"))
    assert found["test"]["ood"]["noise"]["epistemic"] is None and found["overhead"] == 0 and found["draws"] == 1


def test_empty_splits_are_skipped_and_test_sets_the_threshold(tmp_path: Path) -> None:
    found = evaluate(make_run(tmp_path / "run", "none", data={"validation": 0, "limit": 50}))
    assert "validation" not in found and found["threshold"]["split"] == "test"


def test_evaluation_says_what_is_wrong(tmp_path: Path, digits_run: Run) -> None:
    with pytest.raises(EvaluationError, match="no split is called 'tset'"):
        evaluate(digits_run, splits=("tset",))
    run = make_run(tmp_path / "run", "none", data={"validation": 0, "limit": 50})
    with pytest.raises(EvaluationError, match="no row in validation"):
        evaluate(run, splits=("validation",))
    with pytest.raises(EvaluationError, match="not evaluated yet"):
        rows_of(run)
    trained = run.load()
    trained.model.fc.bias.data[0] = torch.nan
    with pytest.raises(EvaluationError, match="359 of 359 predictions are NaN or infinite; its training diverged"):
        predictive(trained, run.data().test)
    with pytest.raises(EvaluationError, match="there are no examples"):
        predictive(trained, run.data().validation)


@pytest.mark.parametrize("precision", [4.0, "input"])
def test_regression_is_evaluated(tmp_path: Path, precision: Any) -> None:
    run = table_run(tmp_path, precision=precision)
    found = evaluate(run)
    assert found["test"].keys() >= {"rmse", "log_density", "coverage"} and found["threshold"]["by"] == "std"
    assert 0 <= found["test"]["ood"]["noise"]["epistemic_std"] <= 1
    assert rows_of(run)["test_quantile"].shape == (24, 1)


def test_noise_is_raw_and_wide() -> None:
    images = Images((3, 4, 4), mean=(0.5,) * 3, std=(0.25,) * 3)
    x = images.prepare(noise(images, 500).raw(torch.arange(500)))
    assert x.min() >= -2 and x.max() <= 2 and abs(float(x.mean())) < 0.05
    columns = Columns(("a",), (7.0,), (2.0,), ("b",), (("u", "v", "w"),))
    seen = columns.prepare(noise(columns, 2000).raw(torch.arange(2000)))
    assert float(seen[:, 0].std()) == pytest.approx(3, rel=0.1) and seen[:, 1:].sum(1).eq(1).all()
    arrays = Arrays((6, 2), mean=(1.0, -1.0), std=(5.0, 0.1))
    assert float(arrays.prepare(noise(arrays, 500).raw(torch.arange(500))).std()) == pytest.approx(3, rel=0.1)
    assert torch.equal(noise(arrays, 5).raw(torch.arange(5)), noise(arrays, 5).raw(torch.arange(5)))


# Prediction files.


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_class_predictions_as_csv_and_parquet(tmp_path: Path, digits_run: Run) -> None:
    x = digits_run.data().test.raw(torch.arange(40))
    np.save(tmp_path / "new.npy", x.numpy())
    assert predict_files(digits_run, [tmp_path / "new.npy"], tmp_path / "sub" / "out.csv", samples=8) == 40
    rows = read_csv(tmp_path / "sub" / "out.csv")
    head = ["input", "label", "probability", "entropy", "aleatoric", "epistemic", *(f"p_{k}" for k in range(10))]
    assert list(rows[0]) == [*head, "abstain"] and rows[3]["input"] == "new.npy:3"
    trained = digits_run.load()
    p = predictive(trained, TensorExamples(x, torch.zeros(40)), samples=8)
    assert isinstance(p, Classification)
    assert [row["label"] for row in rows] == [str(label) for label in p.label.tolist()]
    assert [float(row["epistemic"]) for row in rows] == pytest.approx(p.epistemic.tolist(), rel=1e-5)
    flags = (p.entropy > digits_run.metrics["threshold"]["value"]).tolist()
    assert [row["abstain"] == "true" for row in rows] == flags
    predict_files(digits_run, [tmp_path / "new.npy"], tmp_path / "out.parquet", samples=8)
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pydict()
    assert table["abstain"] == flags and table["p_4"] == pytest.approx(p.probs[:, 4].tolist())
    assert not list(tmp_path.rglob("*.part"))


def test_real_predictions_are_in_their_own_units(tmp_path: Path) -> None:
    run = table_run(tmp_path)
    evaluate(run)
    assert predict_files(run, [tmp_path / "data.csv"], tmp_path / "out.csv") == 120
    rows = [
        {key: float(row[key]) for key in row if key not in ("input", "abstain")}
        for row in read_csv(tmp_path / "out.csv")
    ]
    assert list(rows[0]) == ["mean", "std", "aleatoric_std", "epistemic_std", "low", "high"]
    assert 60 < np.mean([row["mean"] for row in rows]) < 140
    for row in rows:
        assert row["low"] < row["mean"] < row["high"]
        assert row["std"] ** 2 == pytest.approx(row["aleatoric_std"] ** 2 + row["epistemic_std"] ** 2, rel=1e-4)
    prices = [20 * float(row["x"]) + 100 for row in read_csv(tmp_path / "data.csv")]
    assert np.mean([row["aleatoric_std"] for row in rows]) == pytest.approx(0.5 * np.std(prices), rel=0.1)


def test_prediction_says_what_is_wrong(tmp_path: Path, digits_run: Run) -> None:
    with pytest.raises(RunError, match=r"out\.xlsx: .* expected one that ends in \.csv or \.parquet"):
        predict_files(digits_run, [tmp_path], tmp_path / "out.xlsx")
    with pytest.raises(DataError, match=r"nowhere\.npy"):
        predict_files(digits_run, [tmp_path / "nowhere.npy"], tmp_path / "out.csv")
    run = table_run(tmp_path)
    with pytest.raises(RunError, match=r"no metrics\.json to say when to abstain; `bayesify evaluate"):
        predict_files(run, [tmp_path / "data.csv"], tmp_path / "out.csv")
    evaluate(run)
    (tmp_path / "holes.csv").write_text("x,kind\n1.0,a\n,b\n")
    with pytest.raises(DataError, match="'x'"):
        predict_files(run, [tmp_path / "holes.csv"], tmp_path / "out.csv")
    assert not (tmp_path / "out.csv").exists()


def test_measuring_one_split_again_keeps_what_is_known_of_others(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    before = evaluate(run)
    after = evaluate(run, splits=["test"], samples=3)
    assert after["validation"] == before["validation"] and after["threshold"] == before["threshold"]
    assert after["test"]["draws"] == 3 and after["test"] != before["test"]
    assert {name.split("_")[0] for name in rows_of(run)} == {"validation", "test", "noise"}
