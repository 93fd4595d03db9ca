"""Familiarity in the lab: fitted by training, used to abstain, and the reasons in the file of predictions."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import bayesify as by
from bayesify.cli import main
from bayesify.lab.data import TensorExamples
from bayesify.lab.evaluation import EvaluationError, evaluate
from bayesify.lab.familiarity import fit_familiarity
from bayesify.lab.metrics import scores
from bayesify.lab.runs import Run

METHODS = ("none", "Rank1", "MCDropout", "ECMP", "MeanField")
ABSURD = ("-400,30000,a", "40,1e9,b", "-400,1e9,a", "9000,-1e9,b")


def write_customers(path: Path, rows: int, seed: int = 0) -> None:
    generator = np.random.default_rng(seed)
    age, income = generator.normal(45, 12, rows), np.exp(generator.normal(10.4, 0.4, rows))
    kind = generator.choice(["a", "b"], rows)
    buys = (age - 45) / 12 + np.log(income) - 10.4 + (kind == "a") + generator.normal(0, 0.5, rows) > 0.5
    lines = [f"{a:.1f},{i:.0f},{k},{'yes' if b else 'no'}" for a, i, k, b in zip(age, income, kind, buys, strict=True)]
    path.write_text("age,income,kind,buys\n" + "\n".join(lines) + "\n")


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def trained_run(folder: Path, method: str, *options: str) -> Path:
    """A run on customers, trained by the command."""
    write_customers(folder / "train.csv", 600)
    data = (f"data.path={folder / 'train.csv'}", "data.name=table", "data.options={target: buys, unseen: zeros}")
    words = [*data, "model.name=mlp", "model.options={hidden: [16, 16]}", f"method.name={method}"]
    words += ["data.validation=0.2"]
    words += ["training.epochs=3", "evaluation.samples=4", *options, "--out", str(folder / "run"), "-q"]
    assert main(["train", *words]) == 0
    return folder / "run"


@pytest.mark.parametrize("method", METHODS)
def test_absurd_rows_are_flagged_with_their_columns(method: str, tmp_path: Path) -> None:
    run = trained_run(tmp_path, method)
    (tmp_path / "absurd.csv").write_text("age,income,kind\n" + "\n".join([*ABSURD, "45,33000,c"]) + "\n")
    assert main(["predict", str(run), str(tmp_path / "absurd.csv"), "--out", str(tmp_path / "out.csv")]) == 0
    *absurd, unknown = read_rows(tmp_path / "out.csv")
    assert all(row["abstain"] == "true" and "unfamiliar" in row["why"] for row in absurd)
    assert all(float(row["familiarity"]) < 1e-3 for row in absurd)
    named = [["age" in row["why"], "income" in row["why"]] for row in absurd]
    assert named == [[True, False], [False, True], [True, True], [True, True]]
    assert "column age out of range" in absurd[0]["why"]
    assert unknown["abstain"] == "true" and "column kind has an unknown category" in unknown["why"]
    write_customers(tmp_path / "new.csv", 400, seed=1)
    assert main(["predict", str(run), str(tmp_path / "new.csv"), "--out", str(tmp_path / "out.csv")]) == 0
    rows = read_rows(tmp_path / "out.csv")
    assert np.mean([row["abstain"] == "true" for row in rows]) < 0.12  # 5% are asked for
    assert all((row["abstain"] == "true") == bool(row["why"]) for row in rows)
    assert 0.3 < np.mean([float(row["familiarity"]) for row in rows]) < 0.7


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_run(tmp_path_factory.mktemp("home"), "Rank1")


def test_metrics_have_familiarity_and_doubt(run: Path) -> None:
    metrics = Run.open(run).metrics
    assert metrics["threshold"]["by"] == "entropy" and metrics["abstain"]["by"] == "doubt"
    noise = metrics["test"]["ood"]["noise"]
    assert noise["familiarity"]["auroc"] > 0.8 and noise["doubt"]["auroc"] > 0.8
    assert main(["report", str(run), "--out", str(run.parent / "r.html")]) == 0
    assert "AUROC doubt" in (run.parent / "r.html").read_text()


def test_the_share_of_validation_rows_exceeds_the_threshold(run: Path) -> None:
    opened = Run.open(run)
    p = opened.load().predict(opened.data().validation)
    assert p.doubt is not None and p.familiarity is not None
    flagged = (scores(p)["doubt"] > opened.metrics["abstain"]["value"]).double().mean()
    assert float(flagged) == pytest.approx(0.05, abs=0.01)


def test_the_validation_rows_have_uniform_familiarity(run: Path) -> None:
    opened = Run.open(run)
    found = opened.load().predict(opened.data().validation).familiarity
    assert found is not None
    assert torch.allclose(found.sort().values, torch.linspace(0, 1, len(found)), atol=0.06)


@pytest.mark.parametrize(("score", "by_score"), [("total", "entropy"), ("epistemic",) * 2, ("familiarity",) * 2])
def test_another_score_can_be_chosen(score: str, by_score: str, run: Path, tmp_path: Path) -> None:
    copied = Run.open(shutil.copytree(run, tmp_path / "run"))
    assert evaluate(copied, splits=["validation"], abstain_by=score)["abstain"]["by"] == by_score
    assert main(["predict", str(copied.folder), str(run.parent / "train.csv"), "--out", str(tmp_path / "o.csv")]) == 0
    why = {row["why"] for row in read_rows(tmp_path / "o.csv") if row["abstain"] == "true"}
    allowed = {"total": {"ambiguous", "models disagree"}, "epistemic": {"models disagree"}}
    if score in allowed:
        assert why and why <= allowed[score]
    else:
        assert any("unfamiliar" in each for each in why)


def test_a_run_without_familiarity_works_as_before(run: Path, tmp_path: Path) -> None:
    copied = Run.open(shutil.copytree(run, tmp_path / "run"))
    copied.familiarity_file.unlink()
    words = ["predict", str(copied.folder), str(run.parent / "train.csv"), "--out", str(tmp_path / "o.csv")]
    assert main(words) == 2  # it abstains by a score that it has no more
    metrics = json.loads((copied.folder / "metrics.json").read_text())
    del metrics["abstain"]
    (copied.folder / "metrics.json").write_text(json.dumps(metrics))  # as earlier versions wrote it
    assert main(words) == 0
    rows = read_rows(tmp_path / "o.csv")
    assert "familiarity" not in rows[0] and any(row["abstain"] == "true" for row in rows)
    for row in rows:
        assert (row["abstain"] == "true") == (float(row["entropy"]) > metrics["threshold"]["value"] + 1e-7)
    assert evaluate(copied)["abstain"]["by"] == "entropy"
    with pytest.raises(EvaluationError, match="the run has no familiarity"):
        evaluate(copied, abstain_by="familiarity")


def test_a_network_without_features_goes_without(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = Run.open(shutil.copytree(run, tmp_path / "run"))
    copied.familiarity_file.unlink()

    def refuse(*_: object, **__: object) -> None:
        raise by.BayesifyError("no layer")

    monkeypatch.setattr(by.Familiarity, "fit", refuse)
    fit_familiarity(copied, copied.data())
    assert copied.facts["familiarity"] == "not fitted: no layer" and copied.load().familiarity is None


def test_small_data_without_a_validation_split(tmp_path: Path) -> None:
    run = Run.open(trained_run(tmp_path, "Rank1", "data.validation=0", "data.limit=40"))
    p = run.load().predict(TensorExamples(torch.full((2, 3), 1e6) * torch.tensor([1.0, 1.0, 0.0]), torch.zeros(2)))
    assert p.familiarity is not None and float(p.familiarity.max()) < 1e-3


def test_a_loaded_run_has_its_own_familiarity(run: Path) -> None:
    trained = Run.open(run).load()
    assert trained.familiarity is not None and trained.familiarity.low is not None
    with pytest.raises(by.BayesifyError, match="leave out likelihood, draws, call and familiarity"):
        by.predict(trained, torch.zeros(2, 3), familiarity=trained.familiarity)


def test_an_absurd_row_is_unfamiliar_also_where_its_standard_deviation_is_large(tmp_path: Path) -> None:
    run = trained_run(tmp_path, "MeanField", "data.options={target: income, drop: [buys], unseen: zeros}")
    (tmp_path / "absurd.csv").write_text("age,kind\n-400,a\n40000000,b\n")
    assert main(["predict", str(run), str(tmp_path / "absurd.csv"), "--out", str(tmp_path / "out.csv")]) == 0
    rows = read_rows(tmp_path / "out.csv")
    assert all("column age out of range" in row["why"] and "unfamiliar" in row["why"] for row in rows)


def test_a_familiarity_of_another_network_is_refused_by_the_name_of_its_file(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    model = torch.nn.Sequential(torch.nn.Linear(4, 3))
    by.Familiarity.fit(model, torch.randn(50, 4)).save(folder / "familiarity.safetensors")
    (tmp_path / "new.csv").write_text("age,income,kind\n45,33000,a\n")
    assert main(["predict", str(folder), str(tmp_path / "new.csv"), "--out", str(tmp_path / "out.csv")]) == 2
    error = capsys.readouterr().err
    assert "familiarity.safetensors" in error and "no layer '0'" in error and "remove the file" in error


def test_the_model_card_quotes_only_scores_that_the_exported_file_has(run: Path, tmp_path: Path) -> None:
    assert main(["export", str(run), "--out", str(tmp_path / "model.pt2")]) == 0
    card = (tmp_path / "model.card.md").read_text()
    assert "for telling `noise`" in card and "familiarity" not in card and "doubt" not in card
