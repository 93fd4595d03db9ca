"""Tables: CSV, Parquet and the UCI folders; what is learnt on the training split; what can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from bayesify.lab.data import Classes, Columns, Data, DataError, Reals, inputs_from_dict, load

RNG = np.random.default_rng(0)
ROWS = 60
TABLE: dict[str, list[object]] = {
    "age": [int(v) for v in RNG.integers(20, 80, ROWS)],
    "income": [float(v) for v in RNG.normal(1.7e9, 1000.0, ROWS)],
    "city": [["Rome", "Oslo", "Lima"][i % 3] for i in range(ROWS)],
    "zip": [["01", "02"][i % 2] for i in range(ROWS)],
    "same": [5] * ROWS,
    "member": [i % 2 == 0 for i in range(ROWS)],
    "price": [float(v) for v in RNG.normal(100, 20, ROWS)],
    "kind": [["good", "bad"][i % 2] for i in range(ROWS)],
    "stars": [i % 5 + 1 for i in range(ROWS)],
}


def csv_text(table: dict[str, list[object]], delimiter: str = ",") -> str:
    words = {None: "", True: "true", False: "false"}
    rows = (
        [words.get(v, str(v)) if v is None or isinstance(v, bool) else str(v) for v in row]
        for row in zip(*table.values(), strict=True)
    )
    return "\n".join(delimiter.join(row) for row in [list(table), *rows]) + "\n"


def write(path: Path, table: dict[str, list[object]]) -> Path:
    if path.suffix == ".parquet":
        pa.parquet.write_table(pa.table(table), path)
    else:
        path.write_text(csv_text(table, "\t" if path.suffix == ".tsv" else ","))
    return path


def raw(data: Data, split: str) -> torch.Tensor:
    rows = getattr(data, split)
    x: torch.Tensor = rows.raw(torch.arange(len(rows)))
    return x


def changed(name: str, row: int, value: object) -> dict[str, list[object]]:
    return {**TABLE, name: [value if i == row else v for i, v in enumerate(TABLE[name])]}


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.parquet"])
def test_regression(tmp_path: Path, name: str) -> None:
    data = load("table", path=write(tmp_path / name, TABLE), target="price", categorical=["zip"], drop=["stars"])
    assert str(data) == "table: 43 train, 5 validation, 12 test; columns (11,), 1 reals"
    assert isinstance(data.inputs, Columns) and isinstance(data.targets, Reals)
    one_hot = ("city=Lima", "city=Oslo", "city=Rome", "zip=01", "zip=02", "kind=bad", "kind=good")
    assert data.inputs.names == ("age", "income", "same", "member", *one_hot)
    x = data.inputs.prepare(raw(data, "train"))
    assert x.shape == (43, 11) and x.dtype == torch.float32
    varying = x[:, [0, 1, 3]]
    assert varying.mean(0).abs().max() < 1e-5 and (varying.std(0, correction=0) - 1).abs().max() < 1e-5
    assert (x[:, 2] == 0).all(), "a constant column says nothing"
    assert (x[:, 4:7].sum(1) == 1).all() and (x[:, 7:9].sum(1) == 1).all()
    assert data.train.targets.shape == (43, 1) and data.train.targets.mean().abs() < 1e-5
    assert inputs_from_dict(json.loads(json.dumps(data.inputs.to_dict()))) == data.inputs


def test_statistics_come_from_the_training_split_alone(tmp_path: Path) -> None:
    """The same training rows beside a wild test file teach the same."""
    train = write(tmp_path / "train.csv", TABLE)
    wild = {**TABLE, "age": [10**6] * ROWS, "price": [1e9] * ROWS}
    test = write(tmp_path / "test.csv", {**wild, "extra": TABLE["age"]})
    options = {"path": train, "target": "price", "validation": 0}
    alone = load("table", test=0, **options)
    beside = load("table", test_path=test, **options)
    assert alone.inputs == beside.inputs and alone.targets == beside.targets
    assert len(beside.test) == ROWS and raw(beside, "test")[:, 0].min() > 1000
    assert isinstance(alone.inputs, Columns)
    assert alone.inputs.mean[0] == pytest.approx(np.mean(TABLE["age"]))
    assert alone.inputs.std[0] == pytest.approx(np.std(TABLE["age"]))


def test_limit_teaches_from_what_is_left(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", TABLE)
    data = load("table", path=path, target="kind", drop=["city", "stars", "zip"], limit=10)
    x = data.inputs.prepare(raw(data, "train"))
    assert len(x) == 10 and x[:, 0].mean().abs() < 1e-6


@pytest.mark.parametrize(
    "target, task, expected",
    [
        ("kind", None, ("bad", "good")),
        ("member", None, ("false", "true")),
        ("stars", None, ("1", "2", "3", "4", "5")),
        ("stars", "regression", None),
        ("price", None, None),
        ("age", None, None),
        (["price", "age"], None, None),
    ],
)
def test_the_task_follows_from_the_target(
    tmp_path: Path, target: str | list[str], task: str | None, expected: tuple[str, ...] | None
) -> None:
    data = load("table", path=write(tmp_path / "t.csv", TABLE), target=target, task=task)
    if expected is None:
        assert isinstance(data.targets, Reals) and data.targets.count == len(
            [target] if isinstance(target, str) else target
        )
    else:
        assert data.targets == Classes(expected)
        assert torch.bincount(data.train.targets, minlength=len(expected)).min() > 0


def test_ten_comes_after_nine(tmp_path: Path) -> None:
    table = {"x": [float(i) for i in range(44)], "y": [i % 11 for i in range(44)]}
    data = load("table", path=write(tmp_path / "t.csv", table), target="y")
    assert isinstance(data.targets, Classes) and data.targets.names == tuple(map(str, range(11)))


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_missing_numbers(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, changed("age", 7, None))
    with pytest.raises(DataError, match=r"column 'age' of .* has 1 missing values \(rows 7\).*missing='mean'"):
        load("table", path=path, target="kind")
    data = load("table", path=path, target="kind", missing="mean", test=0, validation=0)
    assert raw(data, "train")[7, 0] == 0, "the training mean, standardised"
    assert isinstance(data.inputs, Columns)
    assert data.inputs.mean[0] == pytest.approx(np.mean([v for i, v in enumerate(TABLE["age"]) if i != 7]))


def test_new_rows(tmp_path: Path) -> None:
    data = load("table", path=write(tmp_path / "t.csv", TABLE), target="price", categorical="zip", test=0, validation=0)
    inputs = inputs_from_dict(data.inputs.to_dict())
    new = {name: values[:3] for name, values in TABLE.items() if name != "price"}
    examples, names = inputs.read([write(tmp_path / "new.csv", new), write(tmp_path / "new.parquet", new)])
    assert names == [*(f"new.csv:{i}" for i in range(3)), *(f"new.parquet:{i}" for i in range(3))]
    rows = examples.raw(torch.arange(6))
    assert torch.equal(rows[:3], raw(data, "train")[:3]) and torch.equal(rows[3:], rows[:3])
    assert examples.targets.isnan().all()
    with pytest.raises(DataError, match=r"no column 'age'.*did you mean 'agee'"):
        inputs.read([write(tmp_path / "bad.csv", {"agee": new.pop("age"), **new})])


def test_unseen_categories(tmp_path: Path) -> None:
    path, test = write(tmp_path / "t.csv", TABLE), write(tmp_path / "test.csv", changed("city", 3, "Bonn"))
    with pytest.raises(DataError, match=r"column 'city' of .*test.csv has categories.*lacks: 'Bonn'.*'Lima', 'Oslo'"):
        load("table", path=path, test_path=test, target="price")
    data = load("table", path=path, test_path=test, target="price", unseen="zeros", drop="zip")
    start = data.inputs.names.index("city=Lima")
    assert data.inputs.prepare(raw(data, "test"))[:, start : start + 3].sum(1).tolist() == [
        float(i != 3) for i in range(ROWS)
    ]


@pytest.mark.parametrize(
    "table, options, words",
    [
        (TABLE, {}, "set target=… to the column.*age, income"),
        (TABLE, {"target": "prize"}, "target='prize'.*did you mean 'price'"),
        (TABLE, {"target": "price", "categorical": ["town"]}, "categorical='town'"),
        (TABLE, {"target": "price", "drop": ["agee"]}, "no column 'agee'.*'age'"),
        (TABLE, {"target": "price", "task": "classification"}, "fractions.*task='regression'"),
        (TABLE, {"target": "price", "task": "ranking"}, "task='ranking': expected one of"),
        (TABLE, {"target": "kind", "task": "regression"}, "column 'kind'.*words, such as 'good' in row 0"),
        (TABLE, {"target": ["kind", "age"], "task": "classification"}, "one column for classification"),
        (TABLE, {"target": "price", "missing": "median"}, "missing='median'"),
        (changed("price", 4, None), {"target": "price"}, r"target 'price' of .* missing in 1 rows \(rows 4\)"),
        (changed("kind", 4, None), {"target": "kind"}, r"target 'kind' of .* is missing in 1 rows \(rows 4\)"),
        (changed("city", 9, None), {"target": "kind"}, r"'city' of .* 1 missing values \(rows 9\).*word of their own"),
        (changed("income", 2, float("inf")), {"target": "kind"}, r"'income' of .*infinity in 1 rows \(rows 2\)"),
        (changed("age", 2, "?"), {"target": "kind"}, r"'age' .*numbers and also '\?'.*na_values"),
        ({**TABLE, "id": [f"p{i}" for i in range(ROWS)] * 1}, {"target": "id"}, "fewer than the 60 classes"),
        ({"kind": TABLE["kind"]}, {"target": "kind"}, "no columns except the target"),
        ({"age": [], "kind": []}, {"target": "kind"}, "no rows"),
        ({**TABLE, "day": ["2020-01-01"] * ROWS}, {"target": "kind"}, r"'day' .* type date32.*drop=\['day'\]"),
    ],
)
def test_wrong_tables_are_explained(
    tmp_path: Path, table: dict[str, list[object]], options: dict[str, object], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        load("table", path=write(tmp_path / "t.csv", table), **options)


def test_words_for_nothing_are_missing_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", changed("age", 2, "?"))
    assert len(load("table", path=path, target="kind", na_values="?", missing="mean").train) == 43


def test_identifiers_are_not_categories_unless_said(tmp_path: Path) -> None:
    table = {"id": [f"p{i}" for i in range(300)], "y": [i % 2 for i in range(300)]}
    path = write(tmp_path / "t.csv", table)
    with pytest.raises(DataError, match=r"'id' .* distinct words, such as 'p.*drop=\['id'\]"):
        load("table", path=path, target="y")
    assert load("table", path=path, target="y", categorical=["id"], test=0, validation=0).inputs.shape == (300,)


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    for name, content, words in (
        ("ragged.csv", "a,b\n1,2\n3\n", "can't be read as CSV"),
        ("twice.csv", "a,a,b\n1,2,3\n", "more than one column 'a'"),
        ("parted.csv", "a;b\n1;2\n", "one column, 'a;b'; set delimiter="),
        ("t.xlsx", "", "expected a .csv, .tsv or .parquet file"),
        ("t.parquet", "PAR1 and no more", "can't be read as Parquet"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match=words):
            load("table", path=tmp_path / name, target="b")
    (tmp_path / "latin.csv").write_bytes("a,b\né,1\n".encode("latin1"))
    with pytest.raises(DataError, match=r"type binary.*UTF-8"):
        load("table", path=tmp_path / "latin.csv", target="b")
    with pytest.raises(DataError, match=r"expected a \.csv, \.tsv or \.parquet file"):
        load("table", path=tmp_path, target="b")


# The UCI folders.


def uci_folder(root: Path) -> Path:
    folder = root / "boat" / "data"
    folder.mkdir(parents=True)
    rows = RNG.normal(3, 2, (30, 4))
    np.savetxt(folder / "data.txt", rows)
    for split in range(2):
        order = RNG.permutation(30)
        np.savetxt(folder / f"index_train_{split}.txt", order[:25])
        np.savetxt(folder / f"index_test_{split}.txt", order[25:])
    np.savetxt(folder / "index_features.txt", [0, 1, 2])
    np.savetxt(folder / "index_target.txt", [3])
    return folder


def test_uci(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = uci_folder(tmp_path / "uci")
    monkeypatch.setenv("BAYESIFY_DATA", str(tmp_path))
    rows = np.loadtxt(folder / "data.txt")
    for split in range(2):
        by_path, by_name = (load("uci", path=path, split=split, validation=5) for path in (folder.parent, "boat"))
        assert str(by_path) == "uci: 20 train, 5 validation, 5 test; columns (3,), 1 reals"
        assert by_path.inputs == by_name.inputs and isinstance(by_path.inputs, Columns)
        index = np.loadtxt(folder / f"index_test_{split}.txt").astype(int)
        reals = by_path.targets
        assert isinstance(reals, Reals) and reals.names == ("x3",)
        assert np.allclose(
            reals.restore(by_path.test.targets, by_path.test.targets)[0][:, 0], rows[index, 3], atol=1e-5
        )
        units = raw(by_path, "test") * torch.tensor(by_path.inputs.std) + torch.tensor(by_path.inputs.mean)
        assert np.allclose(units, rows[index, :3], atol=1e-5)


@pytest.mark.parametrize(
    "file, content, words",
    [
        ("data.txt", "1 2 3 4\n1 2 x 4\n", "rows of numbers"),
        ("index_train_0.txt", "0\n31\n", "has 31; expected integers from 0 to 29"),
        ("index_test_0.txt", "0\n1\n2\n3\n4\n5\n6\n7\n8\n", "rows in both training and test"),
        ("index_target.txt", None, "index_target.txt doesn't exist"),
    ],
)
def test_wrong_uci_folders_are_explained(tmp_path: Path, file: str, content: str | None, words: str) -> None:
    path = uci_folder(tmp_path) / file
    path.write_text(content) if content is not None else path.unlink()
    with pytest.raises(DataError, match=words):
        load("uci", path=tmp_path / "boat")


def test_uci_folders_that_are_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAYESIFY_DATA", str(tmp_path))
    for path, words in (("bot", "path='bot' isn't here, and no folder uci in"), (tmp_path / "x", "x doesn't exist")):
        with pytest.raises(DataError, match=words):
            load("uci", path=path)
    uci_folder(tmp_path / "uci")
    with pytest.raises(DataError, match=r"path='bot'.*did you mean 'boat'"):
        load("uci", path="bot")


def test_uci_splits_and_nan(tmp_path: Path) -> None:
    folder = uci_folder(tmp_path)
    with pytest.raises(DataError, match=r"split=2: .* has 2 splits, 0 to 1"):
        load("uci", path=folder, split=2)
    rows = np.loadtxt(folder / "data.txt")
    rows[11, 2] = np.nan
    np.savetxt(folder / "data.txt", rows)
    with pytest.raises(DataError, match=r"NaN or infinity in 1 rows of x2 \(rows 11\)"):
        load("uci", path=folder)
