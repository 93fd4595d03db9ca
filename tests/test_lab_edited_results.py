"""Results of a run that were edited or damaged: each message names the file and says how to make it again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import tiny_run

from bayesify.cli import main

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run(tmp_path_factory.mktemp("home") / "run")


@pytest.fixture
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, to be edited."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(trained, tmp_path / "run")


def edit(path: Path, change: Change) -> None:
    if path.suffix == ".json":
        values = json.loads(path.read_text())
        change(values)
        path.write_text(json.dumps(values))
    else:
        with np.load(path) as file:
            arrays = dict(file.items())
        change(arrays)
        np.savez(path, **arrays)


def of_test(**entries: Any) -> Change:
    """Replaces metrics of the test split."""
    return lambda values: values["test"].update(entries)


METRICS: dict[str, Change] = {
    "half an interval": of_test(interval={"nll": [1.0]}),
    "half an interval inside": of_test(interval={"accuracy_at": {"0.9": [1.0]}}),
    "half an interval of a set": of_test(ood={"noise": {"entropy": {"auroc": 0.5, "interval": {"auroc": [1.0]}}}}),
    "words for a share": of_test(accuracy_at={"abc": 0.5}),
    "shift without levels": of_test(shift={"mixing": {}}),
    "shift without metrics": of_test(shift={"mixing": {"0.1": {}}}),
    "shift of words": of_test(shift={"mixing": {"much": {"accuracy": 0.5}}}),
    "attack of words": of_test(attack={"pgd": {"clean_accuracy": 1.0, "robust_accuracy": 0.0, "epsilon": "x"}}),
    "no NLL": of_test(nll=None),
    "no accuracy": lambda values: values["test"].pop("accuracy"),
    "no split": lambda values: values.update(test=None),
    "data of words": lambda values: values.update(data={"rows": {"train": "many"}}),
    "classes of words": lambda values: values["data"].update(classes={"train": ["a"]}),
    "no NLL of validation": lambda values: (values.pop("test"), values["validation"].update(nll=None)),
}
ROWS: dict[str, Change] = {
    "words": lambda arrays: arrays.update(test_entropy=np.array(["a"] * len(arrays["test_entropy"]))),
    "words elsewhere": lambda arrays: arrays.update(more=np.array(["a"])),
    "rows cut": lambda arrays: arrays.update(test_correct=arrays["test_correct"][:-1]),
    "all rows cut": lambda arrays: arrays.update({k: a[:3] for k, a in arrays.items() if k.startswith("test_")}),
    "a number": lambda arrays: arrays.update(test_correct=np.array(1)),
    "no labels": lambda arrays: arrays.pop("test_label"),
    "labels cut": lambda arrays: arrays.update(test_label=arrays["test_label"][:-1]),
    "unknown labels": lambda arrays: arrays.update(test_label=arrays["test_label"] + 99),
    "true classes of another shape": lambda arrays: arrays.update(test_truth=arrays["test_truth"][:, None] * 1.5),
    "no scores": lambda arrays: arrays.pop("test_entropy"),
    "no outcomes": lambda arrays: arrays.pop("test_correct"),
    "no confidence": lambda arrays: arrays.pop("test_confidence"),
    "no noise": lambda arrays: arrays.pop("noise_entropy"),
    "empty noise": lambda arrays: arrays.update(noise_entropy=np.zeros(0)),
    "nothing": lambda arrays: arrays.clear(),
}
GALLERY: dict[str, Change] = {
    "words": lambda arrays: arrays.update(test_probs=np.array([["a"] * 10] * len(arrays["test_probs"]))),
    "rows cut": lambda arrays: arrays.update({k: a[:-2] for k, a in arrays.items() if k.startswith("test_")}),
    "one array cut": lambda arrays: arrays.update(test_inputs=arrays["test_inputs"][:-1]),
    "no split": lambda arrays: [arrays.pop(key) for key in list(arrays) if key.startswith("test_")],
    "no inputs": lambda arrays: arrays.pop("test_inputs"),
    "no images": lambda arrays: arrays.update(test_inputs=arrays["test_inputs"][:, 0, 0, 0]),
    "too few classes": lambda arrays: arrays.update(test_probs=arrays["test_probs"][:, :2, None]),
    "an unknown class": lambda arrays: arrays.update(test_truth=arrays["test_truth"] + 99),
    "a negative class": lambda arrays: arrays.update(test_truth=arrays["test_truth"] * 0 - 1),
    "no number": lambda arrays: arrays.update(test_truth=arrays["test_truth"] * np.nan),
}
CASES = [
    (f"{file}: {name}", file, change)
    for file, changes in (("metrics.json", METRICS), ("evaluation.npz", ROWS), ("gallery.npz", GALLERY))
    for name, change in changes.items()
]


@pytest.mark.parametrize(("file", "change"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_report_of_edited_results_is_refused_with_the_way_to_make_them_again(
    file: str, change: Change, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(run / file, change)
    assert main(["report", "run"]) == 2
    message = capsys.readouterr().err
    assert file in message and "bayesify evaluate run" in message and "delete it" in message and "bug" not in message
    assert not list(run.parent.glob("report*"))


@pytest.mark.parametrize("file", ["metrics.json", "evaluation.npz", "gallery.npz"])
def test_the_way_to_make_results_again_works(file: str, run: Path) -> None:
    (run / file).write_text("edited")
    assert main(["report", "run"]) == 2
    (run / file).unlink()
    assert main(["evaluate", "run"]) == 0 and main(["report", "run"]) == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values["threshold"].pop("share"),
        lambda values: values["threshold"].pop("split"),
        lambda values: values.pop("overhead"),
        lambda values: values.pop("draws"),
        lambda values: values["test"]["ood"]["noise"]["entropy"].pop("auroc"),
    ],
    ids=["share", "split", "overhead", "draws", "auroc"],
)
def test_what_earlier_versions_did_not_write_may_be_missing(change: Change, run: Path) -> None:
    edit(run / "metrics.json", change)
    assert main(["train", "--resume", "run"]) == 0  # prints them
    assert main(["report", "run"]) == 0 and main(["evaluate", "run"]) == 0


def test_a_run_without_its_seconds_resumes(run: Path) -> None:
    edit(run / "run.json", lambda values: values.update(status="started", seconds=None))
    assert main(["train", "--resume", "run", "-q"]) == 0
    assert json.loads((run / "run.json").read_text())["seconds"] > 0


@pytest.mark.parametrize("versions", [5, ["torch"], {"torch": 5}])
def test_versions_that_are_no_words_are_refused(versions: Any, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(run / "run.json", lambda values: values.update(versions=versions, status="started"))
    assert main(["train", "--resume", "run", "-q"]) == 2
    assert "run.json: versions" in capsys.readouterr().err
