"""Several labels for each input, and a class for each pixel: from files to a trained model, its report and its use."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.metrics import average_precision_score, brier_score_loss, f1_score, jaccard_score, log_loss, roc_auc_score

import bayesify as by
from bayesify import lab
from bayesify.lab import metrics
from bayesify.lab.data import DataError, Labels, Masks
from bayesify.lab.export_run import export_run
from bayesify.lab.metrics.by_task import measures_of
from bayesify.lab.models import UNet
from bayesify.lab.recipe_for_data import recipe_for
from bayesify.lab.report import write_report
from bayesify.lab.runs import RunError

DIGITS = load_digits()
PICTURES = (15 * DIGITS.images).astype(np.uint8)
NAMES = ("odd", "above 4", "has a loop")
LABELS = np.stack([DIGITS.target % 2, DIGITS.target > 4, np.isin(DIGITS.target, (0, 6, 8, 9))], 1).astype(np.uint8)


def composed(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Digits on a noisy background, and which pixels are of an even digit (1) or an odd one (2)."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 60, (rows, 16, 16)).astype(np.uint8), np.zeros((rows, 16, 16), np.uint8)
    for i in range(rows):
        digit, (top, left) = rng.integers(len(PICTURES)), rng.integers(0, 8, 2)
        inside = np.s_[i, top : top + 8, left : left + 8]
        is_ink = PICTURES[digit] > 100
        x[inside] = np.where(is_ink, PICTURES[digit], x[inside])
        y[inside] = np.where(is_ink, 1 + DIGITS.target[digit] % 2, 0)
    return x, y


def measured(p: Any, y: torch.Tensor, targets: Any) -> dict[str, float]:
    once = torch.ones(1, len(y), dtype=torch.float64)
    return {name: float(measure(once)) for name, measure in measures_of(p, y, targets).items()}


# Metrics, compared with those of scikit-learn.


def test_metrics_of_labels_are_those_of_scikit_learn() -> None:
    logits, y = torch.randn(5, 60, 3), (torch.rand(60, 3) < 0.4).long()
    p = by.Bernoulli().predictive(logits)
    found = measured(p, y, Labels(("a", "b", "c")))
    probs, truth = p.probs.double().numpy(), y.numpy()
    assert found["auroc"] == pytest.approx(roc_auc_score(truth, probs, average="macro"))
    assert found["average_precision"] == pytest.approx(average_precision_score(truth, probs, average="macro"))
    assert found["auroc_b"] == pytest.approx(roc_auc_score(truth[:, 1], probs[:, 1]))
    assert found["f1"] == pytest.approx(f1_score(truth, probs >= 0.5, average="macro"))
    assert found["exact_match"] == pytest.approx(((probs >= 0.5) == truth).all(1).mean())
    assert found["nll"] == pytest.approx(np.mean([log_loss(truth[:, i], probs[:, i]) for i in range(3)]), rel=1e-5)
    assert found["brier"] == pytest.approx(np.mean([brier_score_loss(truth[:, i], probs[:, i]) for i in range(3)]))
    confidence, correct = p.confidence.flatten(), (p.label == y).flatten()
    pairs = torch.stack([1 - confidence, confidence], 1)
    assert found["ece"] == pytest.approx(float(metrics.ece(pairs, correct.long())))


def test_metrics_of_pixels_are_those_of_scikit_learn() -> None:
    logits, y = torch.randn(4, 7, 3, 5, 6).double(), torch.randint(3, (7, 5, 6))
    p = by.Categorical(class_dim=1).predictive(logits)
    found = measured(p, y, Masks(("a", "b", "c")))
    ious = jaccard_score(y.flatten(), p.label.flatten(), average=None)
    assert [found[f"iou_{name}"] for name in "abc"] == pytest.approx(list(ious))
    assert found["mean_iou"] == pytest.approx(ious.mean())
    assert found["nll"] == pytest.approx(log_loss(y.flatten(), p.probs.flatten(0, 2)), rel=1e-5)
    assert found["accuracy"] == pytest.approx(float((p.label == y).double().mean()))
    assert found["ece"] == pytest.approx(float(metrics.ece(p.probs.flatten(0, 2), y.flatten())))
    assert found["brier"] == pytest.approx(float(metrics.brier(p.probs.flatten(0, 2), y.flatten())), rel=1e-5)


def test_intervals_resample_rows_not_pixels() -> None:
    """Two kinds of images, all right and all wrong: the share of right pixels varies as that of 20 images does."""
    logits = torch.zeros(1, 20, 2, 8, 8)
    logits[:, :10, 0], logits[:, 10:, 1] = 9.0, 9.0
    p = by.Categorical(class_dim=1).predictive(logits)
    low, high = metrics.intervals(p, torch.zeros(20, 8, 8).long(), Masks(("a", "b")))["accuracy"]
    assert low == pytest.approx(0.3, abs=0.06) and high == pytest.approx(0.7, abs=0.06)


# Files.


def test_a_table_with_several_columns_of_0_and_1_has_several_labels(tmp_path: Path) -> None:
    rows = [",".join(map(str, (*map(int, x[:4]), *y))) for x, y in zip(DIGITS.data[:200, 2:6], LABELS, strict=False)]
    (tmp_path / "t.csv").write_text("a,b,c,d,odd,big,loop\n" + "\n".join(rows))
    data = lab.load("table", path=tmp_path / "t.csv", target=["odd", "loop"], drop=["big"])
    assert data.targets == Labels(("odd", "loop")) and data.train.targets.dtype == torch.uint8
    reals = lab.load("table", path=tmp_path / "t.csv", target=["odd", "loop"], task="regression")
    assert reals.train.targets.is_floating_point()
    with pytest.raises(DataError, match=r"target 'a' of .* has other values than 0 and 1"):
        lab.load("table", path=tmp_path / "t.csv", target=["a", "odd"], task="multilabel")


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (np.array([[0, 1], [1, 1]] * 20), "1 of 2 labels is the same in all training rows: y1"),
        (np.full((40, 8, 8), 255), "no training example of 255 of 256 classes"),
        (np.full((40, 8, 8), -1), "2560 values that aren't integers from 0 to 255, such as -1"),
    ],
)
def test_labels_and_masks_that_can_not_be_learnt_are_refused(y: np.ndarray, message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=PICTURES[:40], y=y)
    with pytest.raises(DataError, match=message):
        lab.load("npz", path=tmp_path / "d.npz")


def test_images_and_masks_in_folders_are_cropped_alike(tmp_path: Path) -> None:
    x, y = composed(12)
    for name, arrays in (("images", x), ("masks", 100 * y)):
        (tmp_path / name).mkdir()
        for i, array in enumerate(arrays):
            Image.fromarray(array).save(tmp_path / name / f"{i:02}.png")
    options: dict[str, Any] = {"path": tmp_path, "channels": 1, "test": 4, "validation": 2}
    data = lab.load("segmentation", **options, names=["ground", "even", "odd"])
    assert data.targets == Masks(("ground", "even", "odd")) and len(data.train) == 6
    for raw, mask in zip(data.train.raw(torch.arange(6)), data.train.targets, strict=True):
        i = next(i for i in range(12) if np.array_equal(x[i], raw[0].numpy()))
        assert np.array_equal(mask.numpy(), y[i])
    cropped = lab.load("segmentation", **options, size=(8, 16))
    assert cropped.train.targets.shape == (6, 8, 16) and cropped.targets.names == ("0", "100", "200")
    (tmp_path / "masks" / "03.png").unlink()
    with pytest.raises(DataError, match=r"1 of 12 images in .* have no mask in .*: 03"):
        lab.load("segmentation", **options)


@pytest.mark.parametrize(
    ("y", "network", "told"),
    [(LABELS[:50], "cnn", "3 labels, each yes or no"), (composed(50)[1], "unet", "3 classes, one for each pixel")],
    ids=["labels", "masks"],
)
def test_what_to_train_is_chosen_by_the_archive(y: np.ndarray, network: str, told: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=composed(50)[0], y=y)
    found = recipe_for(tmp_path / "d.npz")
    assert found.model.name == network and told in {choice.chosen for choice in found.choices}


# From files to a report.


def recipe(tmp_path: Path, x: np.ndarray, y: np.ndarray, network: dict[str, Any], **training: Any) -> dict[str, Any]:
    np.savez(tmp_path / "data.npz", x=x, y=y)
    return {
        "data": {"name": "npz", "path": str(tmp_path / "data.npz"), "batch_size": 32},
        "model": network,
        "method": {"name": "BatchEnsemble", "components": 2},
        "training": {"epochs": 2, "lr": 0.01, "optimizer": "adam", **training},
        "evaluation": {"samples": 2},
    }


def finished(tmp_path: Path, given: dict[str, Any]) -> lab.Run:
    run = lab.train(lab.Recipe.of(given), tmp_path / "run")
    lab.evaluate(run)
    write_report([run], tmp_path / "report.html")
    lab.predict_files(run, [tmp_path / "data.npz"], tmp_path / "p.csv")
    return run


def test_several_labels_from_a_file_to_a_report(tmp_path: Path) -> None:
    run = finished(
        tmp_path, recipe(tmp_path, PICTURES[:400], LABELS[:400], {"name": "cnn", "options": {"channels": [8]}})
    )
    found = run.metrics["test"]
    assert {"accuracy", "nll", "auroc", "auroc_y1", "exact_match", "ece"} <= found.keys() and found["n"] == 80
    assert found["auroc"] > 0.6 and "auroc" in found["interval"]
    with (tmp_path / "p.csv").open() as file:
        rows = list(csv.DictReader(file))
    chosen = [name for name in ("y0", "y1", "y2") if float(rows[0][f"p_{name}"]) >= 0.5]
    assert len(rows) == 400 and rows[0]["labels"] == "; ".join(chosen)
    assert "Least certain" in (tmp_path / "report.html").read_text()


def test_masks_from_a_file_to_a_report_and_an_exported_file(tmp_path: Path) -> None:
    x, y = composed(160)
    network = {"name": "unet", "options": {"width": 4, "depth": 1}}
    run_recipe = recipe(tmp_path, x, np.minimum(y, 1), network, epochs=30, lr=0.05)
    run = finished(tmp_path, run_recipe)
    found = run.metrics["test"]
    assert found["mean_iou"] > 0.8 and found["accuracy"] > 0.95 and "mean_iou" in found["interval"]
    arrays = np.load(tmp_path / "p.masks.npz")
    assert arrays["label"].shape == arrays["entropy"].shape == (160, 16, 16) and len(arrays["input"]) == 160
    with (tmp_path / "p.csv").open() as file:
        first = next(csv.DictReader(file))
    assert float(first["share_0"]) == pytest.approx((arrays["label"][0] == 0).mean())
    card = export_run(run, tmp_path / "m.pt2", samples=1)
    assert "| `log_probs` | (N, H, W, 2) |" in card.read_text()
    log_probs, *_ = torch.export.load(tmp_path / "m.pt2").module()(run.data().test.raw(torch.arange(5)))
    expected = run.load().predict(run.data().test.take(torch.arange(5)), 1).log_probs
    assert torch.allclose(log_probs, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"name": "cnn"}}, r"cnn returns outputs of shape \(4, 3\); .* model.name=unet"),
        ({"data": {"augment": ["flip"]}}, "data.augment changes images but not their masks"),
        ({"data": {"calibration": 20}}, "data.calibration: conformal sets are for one class"),
        ({"method": {"name": "temperature"}}, "method.name='temperature' is for one class or real numbers"),
        ({"likelihood": {"name": "bernoulli"}}, "the targets are classes of pixels, which need 'categorical'"),
        ({"evaluation": {"shift": ["gaussian_noise"]}}, "evaluation.shift is for classification"),
    ],
)
def test_what_does_not_fit_masks_is_refused_before_training(
    change: dict[str, dict[str, Any]], message: str, tmp_path: Path
) -> None:
    given = recipe(tmp_path, *composed(60), {"name": "unet", "options": {"width": 4, "depth": 1}})
    part, options = next(iter(change.items()))
    given[part] = options if part in ("model", "method") else {**given.get(part, {}), **options}
    with pytest.raises((by.BayesifyError, RunError), match=message):
        lab.train(lab.Recipe.of(given), tmp_path / "run")


def test_the_objective_does_not_grow_with_the_number_of_pixels() -> None:
    """Four copies of an image side by side have the loss of one, so that learning rates keep their meaning."""
    x, y = torch.rand(6, 1, 8, 8), torch.randint(2, (6, 8, 8))
    network = torch.nn.Conv2d(1, 2, 1)
    module = lab.BayesianModule(network, n=6, likelihood=by.Categorical(1))
    one, four = (float(module.loss((x.repeat(1, 1, k, k), y.repeat(1, k, k))).detach()) for k in (1, 2))
    assert one == pytest.approx(four, rel=1e-5)


def test_a_unet_keeps_the_size_of_the_image() -> None:
    for size in ((7, 12), (16, 16), (5, 5)):
        assert UNet(4, in_channels=3, width=2)(torch.zeros(2, 3, *size)).shape == (2, 4, *size)
