"""`bayesify export`: a run's model as a file that takes raw inputs, and its model card."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bayesify as by
from bayesify import lab
from bayesify.cli import main
from bayesify.lab.data import Arrays, Columns, Images, Inputs, Reals, Series
from bayesify.lab.data.frame import Frame
from bayesify.lab.export_run import export_run, in_own_units, raw_inputs

pytestmark = pytest.mark.filterwarnings("ignore")  # of the exporters
onnxruntime = pytest.importorskip("onnxruntime")
OLD_RUN = Path(__file__).parent / "fixtures/version-0.1/run"


def outputs_of(path: Path, x: np.ndarray) -> dict[str, Tensor]:
    session = onnxruntime.InferenceSession(path)
    values = session.run(None, {"x": x})
    return {each.name: torch.tensor(value) for each, value in zip(session.get_outputs(), values, strict=True)}


def test_bayesify_export_writes_a_file_and_a_model_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(OLD_RUN, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert main(["export", "run", "--out", "model.onnx", "--samples", "4", "--seed", "3"]) == 0
    done = capsys.readouterr()
    assert done.out == "wrote model.onnx and model.card.md\n" and done.err == ""
    images = torch.randint(256, (5, 1, 8, 8), dtype=torch.uint8)
    expected = lab.Run("run").load().predict(images, 4, seed=3)
    found = outputs_of(tmp_path / "model.onnx", images.numpy())
    assert list(found) == ["log_probs", "entropy", "epistemic"]
    for name, value in found.items():
        assert torch.allclose(value, getattr(expected, name), atol=1e-4), name
    card = (tmp_path / "model.card.md").read_text()
    accuracy = lab.Run("run").metrics["test"]["accuracy"]
    for part in (
        "`Rank1(2, prior_std=0.1, mean_std=0.1)`",
        "`digits`",
        f"{accuracy:.4f}",
        "uint8",
        "(N, 1, 8, 8)",
        "4 draws of seed 3",
        "## Limits",
    ):
        assert part in card
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.card.md", "model.onnx", "run"]


def test_export_of_a_table_takes_its_own_units_and_gives_the_targets(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    age, kind = rng.normal(40, 10, 80), rng.choice(["a|b", "c"], 80)
    price = 1000 + 5 * age + 100 * (kind == "c") + rng.normal(0, 5, 80)
    rows = [f"{a},{k},{p}" for a, k, p in zip(age, kind, price, strict=True)]
    (tmp_path / "houses.csv").write_text("\n".join(["age,kind,price", *rows]))
    recipe = lab.Recipe.of(
        {
            "data": {"name": "table", "path": str(tmp_path / "houses.csv"), "options": {"target": "price"}},
            "model": {"name": "mlp", "options": {"hidden": [8]}},
            "method": {"name": "MeanField"},
            "training": {"epochs": 1},
            "evaluation": {"samples": 4},
        }
    )
    run = lab.train(recipe, tmp_path / "run", progress=False)
    card = export_run(run, tmp_path / "model.onnx").read_text()
    trained = run.load()
    examples, _ = trained.inputs.read([tmp_path / "houses.csv"])
    expected = trained.predict(examples)
    assert isinstance(trained.targets, Reals)
    mean, std = trained.targets.restore(expected.mean, expected.std)
    found = outputs_of(tmp_path / "model.onnx", np.stack([age, (kind == "c").astype(float)], 1))
    assert list(found) == ["mean", "std", "epistemic_std", "aleatoric_std"]
    assert torch.allclose(found["mean"], mean, rtol=1e-4) and torch.allclose(found["std"], std, rtol=1e-3)
    assert "| 0 | `age` | a number |" in card and "| 1 | `kind` | `0: a/b`, `1: c` |" in card
    threshold = run.metrics["threshold"]["value"] * trained.targets.std[0]
    assert f"std above {threshold:.4g}" in card
    plain = lab.train(lab.Recipe.of({**recipe.plain(), "method": {"name": "none"}}), tmp_path / "plain", progress=False)
    card = export_run(plain, tmp_path / "plain.onnx").read_text()
    assert "none, a plain network" in card and "epistemic uncertainty is 0" in card
    p = plain.load().predict(examples)
    found = outputs_of(tmp_path / "plain.onnx", np.stack([age, (kind == "c").astype(float)], 1))
    assert torch.allclose(found["mean"], trained.targets.restore(p.mean, p.std)[0], rtol=1e-4)


KINDS: dict[str, tuple[Inputs, Tensor, Tensor]] = {}
"""Inputs of each kind, raw ones as a file takes them, and as `Inputs.prepare` takes them."""
_images = torch.randint(256, (3, 2, 4, 4), dtype=torch.uint8)
KINDS["images"] = (Images((2, 4, 4), (0.4, 0.5), (0.2, 0.3)), _images, _images)
_arrays = 5 + 3 * torch.randn(3, 4)
KINDS["arrays"] = (Arrays((4,), (5.0,) * 4, (3.0,) * 4), _arrays, _arrays)
_series = torch.randn(3, 5, 2).where(torch.rand(3, 5, 2) < 0.6, torch.nan)
KINDS["series"] = (Series(5, (-2.0, -1.0), (2.0, 1.0), (0.1, 0.2), (1.5, 0.5)), _series, _series)
_columns = Columns(("t", "n"), (1.7e9, 0.0), (10.0, 1.0), ("k",), (("a", "b", "c"),), missing="mean", unseen="zeros")
_rows = torch.tensor([[1.7e9 + 3, torch.nan, 0], [1.7e9 - 7.5, 1.0, 2], [1.7e9, -1.0, -1]], dtype=torch.float64)
_words = np.array(["a", "c", "new"], dtype=object)
_frame = Frame("rows", {"t": _rows[:, 0].numpy(), "n": _rows[:, 1].numpy(), "k": _words})
KINDS["columns"] = (_columns, _rows, _columns.encode(_frame))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_preparation_of_every_kind_of_input_is_part_of_the_file(
    kind: tuple[Inputs, Tensor, Tensor], tmp_path: Path
) -> None:
    inputs, raw, encoded = kind
    example, prepare, text = raw_inputs(inputs)
    assert tuple(example.shape[1:]) == text.shape and str(example.dtype) == f"torch.{text.dtype}"
    size = inputs.prepare(encoded)[0].numel()
    model = by.convert(nn.Sequential(nn.Flatten(), nn.Linear(size, 3)), by.Rank1(2))
    by.export(model, tmp_path / "model.onnx", example, samples=2, prepare=prepare)
    found = outputs_of(tmp_path / "model.onnx", raw.numpy())
    assert torch.allclose(found["log_probs"], by.predict(model, inputs.prepare(encoded), 2).log_probs, atol=1e-4)


def test_real_targets_are_given_in_their_own_units() -> None:
    targets = Reals(("price",), (100.0,), (10.0,))
    named = in_own_units(targets)({"mean": torch.tensor([[0.5]]), "std": torch.tensor([[0.2]])})
    assert named["mean"].item() == 105 and named["std"].item() == pytest.approx(2)


def test_what_can_not_be_exported_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(OLD_RUN, tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "model.tflite")]) == 2
    assert "expected a name that ends in .pt2 or .onnx" in capsys.readouterr().err
    assert main(["export", str(tmp_path), "--out", str(tmp_path / "model.onnx")]) == 2
    assert "not a run" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
