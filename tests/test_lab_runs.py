"""Runs: opened by a string or a path, loaded, used for prediction, and readable when an earlier version wrote them."""

from __future__ import annotations

import pkgutil
import shutil
from inspect import ismodule
from pathlib import Path

import numpy as np
import pytest
import torch

import bayesify as by
from bayesify import lab
from bayesify.cli import main
from bayesify.lab.data import Columns
from bayesify.lab.evaluation import EvaluationError
from bayesify.lab.trained import Trained
from bayesify.prediction.results import Classification

EARLIER = Path(__file__).parent / "fixtures" / "version-0.1" / "run"
"""A run that version 0.1 wrote."""


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, because evaluation writes to it."""
    folder = tmp_path_factory.mktemp("earlier") / "run"
    shutil.copytree(EARLIER, folder)
    return folder


@pytest.fixture(scope="module")
def trained(earlier: Path) -> Trained:
    return lab.Run(str(earlier)).load()


def test_a_run_takes_a_string_or_a_path(earlier: Path) -> None:
    assert lab.Run(str(earlier)) == lab.Run(earlier) == lab.Run.open(str(earlier))
    assert isinstance(lab.Run("runs/first").folder, Path) and lab.Run("runs/first").name == "first"
    assert lab.Run(str(earlier)).recipe.method.name == "Rank1"


def test_no_public_name_is_hidden_by_a_module() -> None:
    assert not {module.name for module in pkgutil.iter_modules(lab.__path__)} & set(lab.__all__)
    for _ in range(2):
        assert all(callable(getattr(lab, name)) and not ismodule(getattr(lab, name)) for name in lab.__all__)


# Prediction.


def test_a_loaded_run_predicts_examples_and_raw_inputs(trained: Trained, earlier: Path) -> None:
    test = lab.Run(earlier).data().test
    raw = test.raw(torch.arange(5))
    assert raw.dtype == torch.uint8
    by_split = trained.predict(test, 4, seed=1)
    assert isinstance(by_split, Classification) and len(by_split.label) == len(test)
    for inputs in (raw, raw.numpy(), raw.float() / 255):
        p = trained.predict(inputs, 4, seed=1, batch_size=2)
        assert torch.allclose(p.probs, by_split.probs[:5], atol=1e-5)


def test_predictive_is_the_same(trained: Trained, earlier: Path) -> None:
    test = lab.Run(earlier).data().test.take(torch.arange(20))
    ours, other = trained.predict(test, 4, seed=2), lab.predictive(trained, test, samples=4, seed=2)
    assert torch.equal(ours.probs, other.probs) and ours.samples == other.samples == 4
    assert trained.predict(test).samples == lab.predictive(trained, test).samples


def test_by_predict_takes_a_loaded_run(trained: Trained, earlier: Path) -> None:
    raw = lab.Run(earlier).data().test.raw(torch.arange(6))
    assert torch.equal(by.predict(trained, raw, 4, seed=2).probs, trained.predict(raw, 4, seed=2).probs)


def test_a_loaded_run_where_a_network_belongs_is_told_where_its_network_is(trained: Trained, earlier: Path) -> None:
    batch = torch.rand(2, *trained.inputs.raw_shape)
    for call in (by.kl, by.summary, by.draw, by.members, lambda model: by.check(model, batch)):
        with pytest.raises(by.BayesifyError, match="got Trained; its attribute `model` is one"):
            call(trained)
    with pytest.raises(by.BayesifyError, match=r"expected what run.load\(\) returns, got Run"):
        lab.predictive(lab.Run(earlier), batch)  # type: ignore[arg-type]


def test_a_folder_that_is_no_run_is_not_called_unfinished(tmp_path: Path) -> None:
    with pytest.raises(by.BayesifyError, match="not a run"):
        lab.Run(tmp_path / "typo").load()


def test_inputs_that_are_not_raw_are_refused(trained: Trained, earlier: Path) -> None:
    raw = lab.Run(earlier).data().test.raw(torch.arange(3))
    with pytest.raises(EvaluationError, match="expected raw ones, bytes or floats from 0 to 1"):
        trained.predict(trained.inputs.prepare(raw))
    with pytest.raises(EvaluationError, match=r"shape \(1, 8, 8\): expected a batch of raw inputs, \(N, 1, 8, 8\)"):
        trained.predict(raw[0])
    with pytest.raises(EvaluationError, match="list: expected a path, a tensor or array of raw inputs, or Examples"):
        trained.predict([raw])
    with pytest.raises(EvaluationError, match="pixels from 0 to 300: expected bytes, 0 to 255"):
        trained.predict((raw.int() * 0 + torch.tensor([0, 300] * 4)).tolist())
    assert trained.predict(raw.int().tolist()).probs.equal(trained.predict(raw).probs)


def test_rows_of_a_table_come_from_files(trained: Trained) -> None:
    columns = Columns(("age",), (40.0,), (10.0,))
    table = Trained(trained.model, trained.likelihood, columns, trained.targets, trained.recipe)
    with pytest.raises(EvaluationError, match="expected a path, a DataFrame, a dict of columns or a list of dicts"):
        table.predict(np.zeros((2, 1)))


# Runs of the version before.


def test_a_run_of_an_earlier_version_has_its_metrics(trained: Trained, earlier: Path) -> None:
    run = lab.Run(str(earlier))
    assert run.facts["status"] == "finished" and run.metrics["test"]["n"] == len(run.data().test)
    p, test = trained.predict(run.data().test), run.data().test
    assert isinstance(p, Classification)
    assert float((p.label == test.targets).double().mean()) == pytest.approx(run.metrics["test"]["accuracy"], abs=0.03)
    assert "test_entropy" in lab.evaluation.rows_of(run) and "test_inputs" in lab.evaluation.gallery_of(run)


def test_a_run_of_an_earlier_version_has_a_report(earlier: Path, tmp_path: Path) -> None:
    assert main(["report", str(earlier), "--out", str(tmp_path / "report.html")]) == 0
    text = (tmp_path / "report.html").read_text()
    for section in ("numbers", "calibration", "selective", "ood", "gallery", "run"):
        assert f'<details class="section" id="{section}" ' in text


def test_a_run_of_an_earlier_version_predicts_and_is_evaluated_again(earlier: Path, tmp_path: Path) -> None:
    run = lab.Run(str(earlier))
    np.save(tmp_path / "new.npy", run.data().test.raw(torch.arange(4)).numpy())
    assert lab.predict_files(run, [tmp_path / "new.npy"], tmp_path / "table.csv") == 4
    assert "abstain" in (tmp_path / "table.csv").read_text().splitlines()[0]
    before = run.metrics
    after = lab.evaluate(run, splits=["test"])
    assert after["test"]["nll"] == pytest.approx(before["test"]["nll"], abs=0.02)  # draws may be others
    assert after["validation"] == before["validation"] and after["threshold"] == before["threshold"]
