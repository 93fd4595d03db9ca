"""Evaluation and prediction files against what the model itself says, and scikit-learn of it."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from sklearn import metrics as sk
from torch import Tensor

import bayesify as by
from bayesify.errors import BayesifyError
from bayesify.lab import metrics
from bayesify.lab.data import Arrays, Classes, Columns, DataError, Images, TensorExamples
from bayesify.lab.data.examples import evenly_spread
from bayesify.lab.data.resized_images import ResizedImages
from bayesify.lab.evaluation import (
    EvaluationError,
    abstention_threshold,
    evaluate,
    gallery_of,
    noise,
    predictive,
    rows_of,
)
from bayesify.lab.evaluation.ood_sets import load_ood_sets
from bayesify.lab.evaluation.robustness import require_measurable
from bayesify.lab.prediction_files import predict_files
from bayesify.lab.recipes import Recipe
from bayesify.lab.runs import Run, RunError, build_network, load_data, make_likelihood
from bayesify.lab.shift import CORRUPTIONS, shifted
from bayesify.lab.training import train
from bayesify.prediction.results import Classification


def classes(rows: int = 400, count: int = 5, draws: int = 7) -> tuple[Classification, Tensor]:
    outputs = 2 * torch.randn(draws, rows, count) + 2 * torch.randn(rows, count)
    p = by.Categorical().predictive(outputs)
    assert isinstance(p, Classification)
    return p, torch.randint(count, (rows,))


# Runs without training.


def make_run(folder: Path, method: Any = "Rank1", **parts: Any) -> Run:
    """A run whose model was never trained: evaluation doesn't mind."""
    recipe = Recipe.of({"method": method, "data": {"limit": 50}, **parts})
    run = Run.create(folder, recipe)
    data = load_data(recipe)
    network = build_network(recipe, data.inputs, data.targets)
    methods = recipe.method.for_convert()
    run.save(by.convert(network, methods) if methods else network, make_likelihood(recipe, data.targets), data)
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


def test_evaluation_may_be_adaptive(digits_run: Run, tmp_path: Path) -> None:
    """Then a split's number of draws is the mean of what its rows took."""
    run = Run(Path(shutil.copytree(digits_run.folder, tmp_path / "run")))
    found = evaluate(run, splits=["test"], samples={"max": 40, "tolerance": 0.1})
    trained, test = run.load(), run.data().test
    x = trained.inputs.prepare(test.raw(torch.arange(len(test))))
    p = by.predict(trained.model, x, by.Adaptive(max=40, tolerance=0.1))
    assert 16 <= found["test"]["draws"] <= 40 and found["test"]["draws"] == pytest.approx(p.draws_used.double().mean())
    assert found["test"]["nll"] == pytest.approx(float(metrics.nll(p.log_probs, test.targets)), abs=1e-5)
    with pytest.raises(BayesifyError, match="tolerance"):
        evaluate(run, samples={"tolerance": -1})


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
    ood = predictive(trained, noise(trained.inputs, 1000))
    assert isinstance(ood, Classification)
    for kind in ("entropy", "epistemic"):
        truth = np.r_[np.zeros(359), np.ones(1000)]
        expected = sk.roc_auc_score(truth, np.r_[getattr(p, kind), getattr(ood, kind)])
        assert written["test"]["ood"]["noise"][kind]["auroc"] == pytest.approx(expected, abs=1e-6)


def test_metrics_describe_the_data(digits_run: Run) -> None:
    known, data = digits_run.metrics["data"], digits_run.data()
    parts = {"train": data.train, "validation": data.validation, "test": data.test}
    assert known["rows"] == {split: len(rows) for split, rows in parts.items()} and not known["missing"]
    for split, rows in parts.items():
        assert known["classes"][split] == np.bincount(rows.targets.numpy(), minlength=10).tolist()


def test_missing_values_and_the_range_of_targets_are_described(tmp_path: Path) -> None:
    lines = [f"{'' if i % 7 == 0 else i},{i % 5},{10 * i}" for i in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["age,size,price", *lines]))
    options = {"target": "price", "task": "regression", "missing": "mean"}
    given = {"data": {"name": "table", "path": str(tmp_path / "t.csv"), "options": options}, "model": {"name": "mlp"}}
    run = train(Recipe.of({**given, "method": "none", "training": {"epochs": 1}}), tmp_path / "r", progress=False)
    known = run.metrics["data"]
    assert known["missing"] == {"age": 9} and sum(known["rows"].values()) == 60  # in all splits
    train_prices = run.data().targets.restore(*[run.data().train.targets] * 2)[0]
    expected = [train_prices.min(), train_prices.median(), train_prices.max()]
    assert known["targets"] == {"price": pytest.approx([float(value) for value in expected])}
    with np.load(run.folder / "evaluation.npz") as rows:  # in their own units
        own = {name: rows[f"test_{name}"].mean() for name in ("log_density", "crps", "width")}
        rmse = np.sqrt(np.square(rows["test_residual"]).mean())
    test = run.metrics["test"]
    assert own == pytest.approx({name: test[name] for name in own}) and rmse == pytest.approx(test["rmse"])


def test_the_rows_behind_the_metrics_are_kept(digits_run: Run) -> None:
    rows, written = rows_of(digits_run), digits_run.metrics
    assert rows["test_correct"].mean() == pytest.approx(written["test"]["accuracy"])
    assert rows["test_entropy"].mean() == pytest.approx(written["test"]["entropy"], rel=1e-5)
    above = rows["validation_entropy"] > written["threshold"]["value"]
    assert above.sum() == int(0.05 * 144) and len(rows["noise_epistemic"]) == 1000


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0])
def test_the_share_asked_for_lies_above_the_threshold(share: float) -> None:
    p, _ = classes(rows=200)
    found = abstention_threshold(p, share)
    assert int((p.entropy > found["value"]).sum()) == 200 * share


def test_one_draw_has_no_epistemic_part_to_detect_by(tmp_path: Path) -> None:
    found = evaluate(make_run(tmp_path / "run", "none"))
    assert (
        found["test"]["ood"]["noise"]["epistemic"] is None is found["test"]["ood"]["noise"]["variance"]
        and found["overhead"] == 0
        and found["draws"] == 1
    )


def test_empty_splits_are_skipped_and_test_sets_the_threshold(tmp_path: Path) -> None:
    found = evaluate(make_run(tmp_path / "run", "none", data={"validation": 0, "limit": 50}))
    assert "validation" not in found and found["threshold"]["split"] == "test"


def test_evaluation_says_what_is_wrong(tmp_path: Path, digits_run: Run) -> None:
    with pytest.raises(EvaluationError, match="no split is called 'tset'"):
        evaluate(digits_run, splits=("tset",))
    run = make_run(tmp_path / "run", "none", data={"validation": 0, "limit": 50})
    with pytest.raises(EvaluationError, match="no rows in validation"):
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
    assert 0 <= found["test"]["ood"]["noise"]["epistemic_std"]["auroc"] <= 1
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


# Other sets, shifts and attacks.


def test_other_sets_are_told_from_the_test_rows(tmp_path: Path, digits_run: Run) -> None:
    np.savez(tmp_path / "colour.npz", x=np.random.default_rng(0).integers(0, 256, (40, 3, 12, 12), dtype=np.uint8))
    folder = tmp_path / "test"  # the name of a split
    folder.mkdir()
    Image.new("L", (20, 20), 255).save(folder / "white.png")
    found = evaluate(digits_run, splits=["test"], ood=[str(tmp_path / "colour.npz"), str(folder), "digits"])
    assert set(found["test"]["ood"]) == {"noise", "colour", "test 2", "digits"}
    assert found["test"]["ood"]["digits"]["entropy"]["auroc"] == pytest.approx(0.5, abs=0.05)
    rows = rows_of(digits_run)
    assert len(rows["colour_variance"]) == 40 and len(rows["test 2_entropy"]) == 1 and len(rows["test_entropy"]) == 359
    trained = digits_run.load()
    ood = load_ood_sets([str(tmp_path / "colour.npz")], trained.inputs, ())["colour"]
    p = predictive(trained, ood)
    expected = sk.roc_auc_score(np.r_[np.zeros(359), np.ones(40)], np.r_[rows["test_entropy"], p.entropy])
    assert found["test"]["ood"]["colour"]["entropy"]["auroc"] == pytest.approx(expected, abs=1e-6)
    with pytest.raises(EvaluationError, match=r"evaluation.ood='mnits': no such file, folder or data set"):
        evaluate(digits_run, ood=["mnits"])


def test_images_are_fitted_as_pillow_fits_them() -> None:
    colour = torch.randint(256, (2, 3, 40, 30), dtype=torch.uint8)
    fitted = ResizedImages(TensorExamples(colour, torch.zeros(2)), (1, 20, 16)).raw(torch.tensor([1]))
    image = Image.fromarray(colour[1].permute(1, 2, 0).numpy())
    expected = np.asarray(image.convert("L").resize((16, 20), Image.Resampling.BILINEAR)) / 255
    assert np.abs(fitted[0, 0].numpy() - expected).max() < 0.01


def test_what_was_measured_with_as_many_draws_stays(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "IBNN", data={"limit": 100})
    evaluate(run, splits=["test"], ood=["digits"], shift=["salt_and_pepper"], rows=50)
    again = evaluate(run, splits=["test"])
    assert set(again["test"]["ood"]) == {"noise", "digits"} and list(again["test"]["shift"]) == ["salt_and_pepper"]
    other = evaluate(run, splits=["test"], shift=["mixing"], rows=40)["test"]  # not comparable with the 50 rows
    assert list(other["shift"]) == ["mixing"] and other["shift_rows"] == 40
    fewer = evaluate(run, splits=["test"], samples=2)
    assert set(fewer["test"]["ood"]) == {"noise"} and "shift" not in fewer["test"]


def test_areas_and_shares_have_intervals(digits_run: Run) -> None:
    found = digits_run.metrics["test"]
    low, high = found["ood"]["noise"]["entropy"]["interval"]["auroc"]
    assert low < found["ood"]["noise"]["entropy"]["auroc"] < high
    for share, value in found["accuracy_at"].items():
        low, high = found["interval"]["accuracy_at"][share]
        assert low <= value <= high and high - low < 0.2
    assert len(found["interval"]["buckets"]) == 10


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["evaluation.shift=[foggy]"], "evaluation.shift='foggy': did you mean 'fog'"),
        (["evaluation.attack={name: pgdd}"], "no attack is called 'pgdd'"),
        (["evaluation.ood=[nothere]"], "evaluation.ood='nothere': no such file"),
        (["data.validation=0", "data.test=0"], "there are no rows to evaluate on"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_training(overrides: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(BayesifyError, match=re.escape(message)):
        train(Recipe.of({"data": {"limit": 60}}, overrides), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_only_mixing_is_for_tables(tmp_path: Path) -> None:
    run = table_run(tmp_path, precision=4.0)
    with pytest.raises(EvaluationError, match=r"evaluation.shift is for classification"):
        evaluate(run, shift=["mixing"])
    columns = Columns(("a",), (7.0,), (2.0,), (), ())
    part = Recipe.of({}, ["evaluation.shift=[mixing, fog]"]).evaluation
    with pytest.raises(EvaluationError, match=r"evaluation.shift='fog' is for images; .* 'mixing'"):
        require_measurable(part, columns, Classes(("no", "yes")))


def test_the_gallery_has_the_least_and_the_most_certain(digits_run: Run) -> None:
    gallery, rows = gallery_of(digits_run), rows_of(digits_run)
    order = np.argsort(-rows["test_entropy"], kind="stable")
    assert gallery["test_row"].tolist() == [*order[:12], *order[-12:]]
    data = digits_run.data()
    images = data.test.raw(torch.tensor(gallery["test_row"]))
    assert np.allclose(gallery["test_inputs"], images / 255) and gallery["test_probs"].shape == (24, 10)
    assert np.array_equal(gallery["test_truth"], data.test.targets[gallery["test_row"]])


def test_shift_is_measured_on_the_shifted_rows(digits_run: Run) -> None:
    found = evaluate(digits_run, splits=["test"], shift=["gaussian_noise", "mixing"], rows=60)["test"]["shift"]
    assert set(found) >= {"gaussian_noise", "mixing"} and list(found["gaussian_noise"]) == list("012345")
    trained, few = digits_run.load(), evenly_spread(digits_run.data().test, 60)
    p = predictive(trained, shifted(few, "gaussian_noise", 5, inputs=trained.inputs))
    assert isinstance(p, Classification)
    right = (p.label == few.targets).double().mean()
    assert len(few) == 60 and found["gaussian_noise"]["5"]["accuracy"] == pytest.approx(float(right))
    with pytest.raises(EvaluationError, match=r"evaluation.shift='mixng': .*did you mean 'mixing'"):
        evaluate(digits_run, shift=["mixng"])


def test_all_corruptions_have_a_mean(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "none", data={"limit": 100})
    found = evaluate(run, splits=["test"], shift=["corruptions"], rows=20)["test"]
    again = evaluate(run, splits=["test"], shift=["fog"], rows=20)["test"]
    assert again["corrupted"] == found["corrupted"]
    each = [found["shift"][kind][severity]["nll"] for kind in CORRUPTIONS for severity in "12345"]
    assert len(each) == 75 and found["corrupted"]["nll"] == pytest.approx(np.mean(each))


def test_attack_is_part_of_evaluation(tmp_path: Path) -> None:
    pytest.importorskip("foolbox")
    run = train(Recipe.of({"method": "none", "training": {"epochs": 3}}), tmp_path / "run", progress=False)
    found = evaluate(run, splits=["test"], attack={"name": "fgsm", "epsilon": 0.1}, rows=40)["test"]["attack"]["fgsm"]
    assert found["clean_accuracy"] > 0.7 and found["epsilon"] == 0.1
    assert found["robust_accuracy"] < found["clean_accuracy"] - 0.2


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
    assert list(rows[0]) == [*head, "score", "abstain", "why"] and rows[3]["input"] == "new.npy:3"
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
    written = read_csv(tmp_path / "out.csv")
    copied = list(read_csv(tmp_path / "data.csv")[0])
    numbers = ["mean", "std", "aleatoric_std", "epistemic_std", "low", "high"]
    assert list(written[0]) == ["input", *copied, *numbers, "score", "abstain", "why"]
    rows = [{key: float(row[key]) for key in numbers} for row in written]
    assert 60 < np.mean([row["mean"] for row in rows]) < 140
    for row in rows:
        assert row["low"] < row["mean"] < row["high"]
        assert row["std"] ** 2 == pytest.approx(row["aleatoric_std"] ** 2 + row["epistemic_std"] ** 2, rel=1e-4)
    prices = [20 * float(row["x"]) + 100 for row in read_csv(tmp_path / "data.csv")]
    assert np.mean([row["aleatoric_std"] for row in rows]) == pytest.approx(0.5 * np.std(prices), rel=0.1)


def test_prediction_says_what_is_wrong(tmp_path: Path, digits_run: Run) -> None:
    with pytest.raises(RunError, match=r"out\.xlsx: expected a file name that ends in \.csv or \.parquet"):
        predict_files(digits_run, [tmp_path], tmp_path / "out.xlsx")
    with pytest.raises(DataError, match=r"nowhere\.npy"):
        predict_files(digits_run, [tmp_path / "nowhere.npy"], tmp_path / "out.csv")
    run = table_run(tmp_path)
    with pytest.raises(RunError, match=r"no metrics\.json with the abstention threshold; run `bayesify evaluate"):
        predict_files(run, [tmp_path / "data.csv"], tmp_path / "out.csv")
    evaluate(run)
    (tmp_path / "holes.csv").write_text("x,kind\n1.0,a\n,b\n")
    predict_files(run, [tmp_path / "holes.csv"], tmp_path / "out.csv")
    assert ["column x has no number" in row["why"] for row in read_csv(tmp_path / "out.csv")] == [False, True]
    (tmp_path / "out.csv").unlink()
    (tmp_path / "other.csv").write_text("kind\na\n")
    with pytest.raises(DataError, match="'x'"):
        predict_files(run, [tmp_path / "other.csv"], tmp_path / "out.csv")
    assert not (tmp_path / "out.csv").exists()


def test_measuring_one_split_again_keeps_what_is_known_of_others(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    before = evaluate(run)
    after = evaluate(run, splits=["test"], samples=3)
    assert after["validation"] == before["validation"] and after["threshold"] == before["threshold"]
    assert after["test"]["draws"] == 3 and after["test"] != before["test"]
    assert {name.split("_")[0] for name in rows_of(run)} == {"validation", "test", "noise"}
