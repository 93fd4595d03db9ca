"""idx files and CIFAR's pickles, and what can be wrong with them."""

from __future__ import annotations

import gzip
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from raw_rows import LABELS, all_raw, pixels

from bayesify.lab.data import DataError, load

# idx.


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def idx_folder(folder: Path, end: str = "", separator: str = "-") -> Path:
    pack = gzip.compress if end else bytes
    for part, rows in (("train", 40), ("t10k", 12)):
        (folder / f"{part}-images{separator}idx3-ubyte{end}").write_bytes(pack(idx_bytes(pixels(rows, 6, 5))))
        (folder / f"{part}-labels{separator}idx1-ubyte{end}").write_bytes(pack(idx_bytes(LABELS[:rows])))
    return folder


@pytest.mark.parametrize("end, separator", [("", "-"), (".gz", "-"), (".gz", ".")])
def test_idx(tmp_path: Path, end: str, separator: str) -> None:
    data = load("idx", path=idx_folder(tmp_path, end, separator), validation=0)
    assert str(data) == "idx: 40 train, 0 validation, 12 test; images (1, 6, 5), 4 classes"
    assert torch.equal(all_raw(data)[:, 0], torch.from_numpy(pixels(40, 6, 5)))
    assert data.train.targets.tolist() == LABELS.tolist()


def test_a_known_set_is_found_in_the_data_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kmnist").mkdir()
    idx_folder(tmp_path / "kmnist")
    monkeypatch.setenv("BAYESIFY_DATA", str(tmp_path))
    with pytest.raises(DataError, match="6 of 10 classes: na, ha, ma, ya, re, wo"):
        load("kmnist")


def test_a_set_for_testing_alone(tmp_path: Path) -> None:
    for file in idx_folder(tmp_path).glob("train-*"):
        file.unlink()
    data = load("idx", path=tmp_path)
    assert (len(data.train), len(data.validation), len(data.test)) == (0, 0, 12)
    assert torch.equal(data.inputs.prepare(all_raw(data, "test")), all_raw(data, "test").float() / 255)


@pytest.mark.parametrize(
    "file, content, words",
    [
        ("train-images-idx3-ubyte", b"PK\x03\x04abc", "50 4b 03 04"),
        ("train-images-idx3-ubyte", b"", "none"),
        ("train-images-idx3-ubyte", idx_bytes(pixels(40, 6, 5))[:-1], "1215 bytes.*says 1216.*truncated"),
        ("train-images-idx3-ubyte", idx_bytes(pixels(39, 6, 5)), "39 inputs and 40 targets"),
        ("train-images-idx3-ubyte", idx_bytes(LABELS), "3 dimensions.*swapped"),
        ("t10k-images-idx3-ubyte", idx_bytes(pixels(12, 6, 6)), r"test inputs have shape \(1, 6, 6\)"),
        ("t10k-labels-idx1-ubyte", idx_bytes(LABELS[:12] + 1), "no training example of 1 of 5 classes: 4"),
    ],
)
def test_broken_idx_is_explained(tmp_path: Path, file: str, content: bytes, words: str) -> None:
    (idx_folder(tmp_path) / file).write_bytes(content)
    with pytest.raises(DataError, match=words):
        load("idx", path=tmp_path)


def test_truncated_gzip_and_lonely_files_are_explained(tmp_path: Path) -> None:
    file = idx_folder(tmp_path, ".gz") / "train-images-idx3-ubyte.gz"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(DataError, match="can't be decompressed"):
        load("idx", path=tmp_path)
    file.unlink()
    with pytest.raises(DataError, match="not its images"):
        load("idx", path=tmp_path)


def test_missing_paths_say_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "fashion").mkdir()
    with pytest.raises(DataError, match=r"fashoin doesn't exist.*did you mean 'fashion'"):
        load("idx", path=tmp_path / "fashoin")
    with pytest.raises(DataError, match="fashion has nothing; expected train-images-idx3-ubyte"):
        load("idx", path=tmp_path / "fashion")
    for name in ("idx", "folder", "table", "npz", "uci", "huggingface"):
        with pytest.raises(DataError, match=f"'{name}' needs path="):
            load(name)


# CIFAR.


def dump(path: Path, content: object) -> None:
    path.write_bytes(pickle.dumps(content, protocol=2))


def cifar_folder(folder: Path) -> Path:
    for i, file in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        dump(folder / file, {b"data": pixels(20, 3072) ^ i, b"labels": list(range(10)) * 2})
    dump(folder / "batches.meta", {b"label_names": [b"plane", *[str(i).encode() for i in range(1, 10)]]})
    return folder


def test_cifar10(tmp_path: Path) -> None:
    data = load("cifar10", path=cifar_folder(tmp_path), validation=0)
    assert str(data) == "cifar10: 100 train, 0 validation, 20 test; images (3, 32, 32), 10 classes"
    assert torch.equal(all_raw(data)[20:40].flatten(1), torch.from_numpy(pixels(20, 3072) ^ 1))
    assert data.targets.to_dict()["names"][:2] == ["plane", "1"]


@pytest.mark.parametrize("labels, count", [("fine", 100), ("coarse", 20)])
def test_cifar100(tmp_path: Path, labels: str, count: int) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for file in ("train", "test"):
        both = {b"fine_labels": list(range(100)) * 2, b"coarse_labels": list(range(20)) * 10}
        dump(folder / file, {b"data": pixels(200, 3072), **both})
    data = load("cifar100", path=tmp_path, labels=labels, validation=0)  # the folder above works too
    assert data.targets.count == count and len(data.test) == 200


class Evil:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.system, ("touch pwned",)


def test_a_malicious_pickle_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dump(cifar_folder(tmp_path) / "data_batch_3", {b"data": Evil(), b"labels": [0]})
    with pytest.raises(DataError, match=r"data_batch_3: the pickle asks for posix.system.*run code"):
        load("cifar10", path=tmp_path)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    "content, words",
    [
        ({b"data": pixels(20, 3071), b"labels": [0] * 20}, r"\(20, 3071\).*3072"),
        ({b"data": pixels(20, 3072).astype(int), b"labels": [0] * 20}, "int64"),
        ({b"data": [1, 2], b"labels": [0] * 20}, "data of list"),
        ({b"data": pixels(20, 3072), b"labels": [0] * 19}, "20 inputs and 19 targets"),
        ({b"data": pixels(20, 3072), b"labels": [10] * 20}, "the train split has the labels 10; expected 0 to 9"),
        ({b"data": pixels(20, 3072), b"labels": [0.5] * 20}, "20 labels that aren't integers.*0.5 in row 0"),
        ({b"data": pixels(20, 3072), b"labels": [-1] * 20}, "-1 in row 0"),
        ({b"data": pixels(20, 3072)}, "expected the entries data and labels"),
        ([1], "holds a list"),
    ],
)
def test_broken_cifar_is_explained(tmp_path: Path, content: object, words: str) -> None:
    dump(cifar_folder(tmp_path) / "data_batch_2", content)
    with pytest.raises(DataError, match=words):
        load("cifar10", path=tmp_path, validation=0)


def test_incomplete_cifar_is_explained(tmp_path: Path) -> None:
    file = cifar_folder(tmp_path) / "data_batch_4"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(DataError, match=r"data_batch_4 can't be read.*truncated"):
        load("cifar10", path=tmp_path)
    file.unlink()
    with pytest.raises(DataError, match="lacks data_batch_4"):
        load("cifar10", path=tmp_path)
    with pytest.raises(DataError, match="expected CIFAR's python batches"):
        load("cifar100", path=tmp_path)
    (tmp_path / "cifar.tar.gz").write_bytes(b"")
    with pytest.raises(DataError, match="unpack it"):
        load("cifar10", path=tmp_path / "cifar.tar.gz")
