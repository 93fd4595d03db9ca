"""Hugging Face data sets from disk: images, arrays and tables, lazily; text is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from bayesify.lab.data import Arrays, Classes, Columns, DataError, Images, Reals, load

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def pictures(rows: int, size: int = 8) -> object:
    names = datasets.ClassLabel(names=["cat", "dog"])
    features = datasets.Features({"image": datasets.Image(), "label": names})
    images = [Image.new("RGB", (size, 6), (i, 0, 0)) for i in range(rows)]
    return datasets.Dataset.from_dict({"image": images, "label": [i % 2 for i in range(rows)]}, features=features)


def saved(path: Path, **splits: object) -> Path:
    datasets.DatasetDict(splits).save_to_disk(str(path / "saved"))
    return path / "saved"


def table(**columns: object) -> object:
    return datasets.Dataset.from_dict(columns)


def test_images(tmp_path: Path) -> None:
    data = load("huggingface", path=saved(tmp_path, train=pictures(20), test=pictures(6)), validation=4)
    assert str(data) == "huggingface: 16 train, 4 validation, 6 test; images (3, 6, 8), 2 classes"
    assert isinstance(data.inputs, Images) and data.targets == Classes(("cat", "dog"))
    x, y = data.train.__getitems__([0, 5])
    assert x.dtype == torch.uint8 and torch.equal(x[:, 0, 0, 0] % 2, y)
    assert data.train[3][0].shape == (3, 6, 8)


def test_images_of_several_sizes(tmp_path: Path) -> None:
    path = saved(tmp_path, train=pictures(20), test=pictures(6, size=9))
    data = load("huggingface", path=path)
    with pytest.raises(DataError, match=r"row 0 of 'image' has 9×6 pixels, the first one 8×6; set size="):
        data.test[0]
    fitted = load("huggingface", path=path, size=(4, 5), channels=1)
    assert fitted.test[0][0].shape == (1, 4, 5)


def test_arrays_and_real_targets(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(5, 2, (30, 4))
    data = load("huggingface", path=saved(tmp_path, train=table(features=x.tolist(), target=x[:, 0].tolist())))
    assert str(data) == "huggingface: 22 train, 2 validation, 6 test; arrays (4,), 1 reals"
    assert isinstance(data.inputs, Arrays) and isinstance(data.targets, Reals)
    prepared = data.inputs.prepare(data.train.raw(torch.arange(22)))
    assert prepared.mean(0).abs().max() < 1e-5


def test_columns(tmp_path: Path) -> None:
    rows = table(age=list(range(30)), city=["Rome", "Oslo"] * 15, y=["a", "b", "c"] * 10, day=[None] * 30)
    rows = rows.remove_columns("day")
    data = load("huggingface", path=saved(tmp_path, train=rows))
    assert isinstance(data.inputs, Columns) and data.inputs.names == ("age", "city=Oslo", "city=Rome")
    assert load("huggingface", path=tmp_path / "saved", x="age").inputs.shape == (1,)


def test_a_folder_of_parquet_files(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    table(age=list(range(30)), y=[0, 1] * 15).to_parquet(str(tmp_path / "set/train.parquet"))
    assert len(load("huggingface", path=tmp_path / "set", test=0, validation=0).train) == 30


def test_splits_by_name(tmp_path: Path) -> None:
    path = saved(tmp_path, train=pictures(20), validation=pictures(8), hidden=pictures(4))
    data = load("huggingface", path=path, test_split="validation", validation_split="none")
    assert (len(data.train), len(data.validation), len(data.test)) == (18, 2, 8)
    with pytest.raises(DataError, match=r"test_split='hiden'.*'hidden'"):
        load("huggingface", path=path, test_split="hiden")
    with pytest.raises(DataError, match="no training rows"):
        load("huggingface", path=path, train_split="none")


@pytest.mark.parametrize(
    "columns, options, words",
    [
        ({"text": ["a b"] * 4, "label": [0, 1] * 2}, {}, "text, which isn't supported here.*tokenizer"),
        ({"v": [[1.0]] * 4, "w": [[1.0]] * 4, "y": [0, 1] * 2}, {}, "set x=… to the input column: there are v, w"),
        ({"v": [[1.0]] * 4, "u": [0, 1] * 2}, {}, "set y=… to the column to predict: there are v, u"),
        ({"v": [[1.0]] * 4, "y": [0, 1] * 2}, {"y": "yy"}, "y='yy': no such column"),
        ({"v": [[1.0]] * 4, "y": [0, 1] * 2}, {"x": "vv"}, "x='vv': no such column; did you mean 'v'|x='vv'"),
        ({"v": [[1.0]] * 4, "n": [1] * 4, "y": [0, 1] * 2}, {"x": ["v", "n"]}, r"inputs v \(array\), n \(number\)"),
        ({"v": [[1.0], [1.0, 2.0]] * 2, "y": [0, 1] * 2}, {}, "different shapes"),
        ({"v": [[1.0], [float("nan")]] * 2, "y": [0, 1] * 2}, {}, r"column 'v' has NaN or infinity in 2 of 4 rows"),
        ({"v": [[1.0]] * 4, "y": [0, 1] * 2}, {"task": "sort"}, "task='sort'"),
    ],
)
def test_wrong_columns_are_explained(
    tmp_path: Path, columns: dict[str, object], options: dict[str, object], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        load("huggingface", path=saved(tmp_path, train=table(**columns)), test=0, validation=0, **options)


def test_what_is_no_data_set(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="can't be loaded as a Hugging Face data set"):
        load("huggingface", path=tmp_path)
    (tmp_path / "t.csv").write_text("a,b")
    with pytest.raises(DataError, match="is a file; expected a folder"):
        load("huggingface", path=tmp_path / "t.csv")


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'bayesify\[hub\]'"):
        load("huggingface", path=tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow.csv", None)
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match=r"CSV files needs the package pyarrow.*bayesify\[lab\]"):
        load("table", path=tmp_path / "t.csv", target="a")
