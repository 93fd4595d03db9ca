"""Folders of images and NumPy archives, what can be wrong with them, and how new inputs are read."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from raw_rows import LABELS, all_raw, pixels

from bayesify.lab.data import Arrays, DataError, FolderExamples, Images, inputs_from_dict, load

# Image folders: the files' colours tell which is which.


def image_folder(root: Path, splits: tuple[str, ...] = ("",), size: tuple[int, int] = (8, 6)) -> Path:
    for split in splits:
        for label, name in enumerate(["cat", "dog"]):
            (root / split / name).mkdir(parents=True)
            for i in range(10):
                Image.new("RGB", size, (100 * label, i, 7)).save(root / split / name / f"{i}.png")
    return root


def test_class_folders(tmp_path: Path) -> None:
    data = load("folder", path=image_folder(tmp_path), validation=4, test=0.2)
    assert str(data) == "folder: 12 train, 4 validation, 4 test; images (3, 6, 8), 2 classes"
    assert isinstance(data.train, FolderExamples)
    x, y = data.train.__getitems__([0, 11])
    assert x.dtype == torch.uint8 and torch.equal(x[:, 0, 0, 0].long(), 100 * y) and (x[:, 2] == 7).all()
    assert data.targets.to_dict()["names"] == ["cat", "dog"]


def test_split_folders_and_sizes(tmp_path: Path) -> None:
    image_folder(tmp_path, ("train", "val", "test"))
    Image.new("L", (30, 40), 9).save(tmp_path / "train/dog/other.PNG")
    with pytest.raises(DataError, match=r"different sizes.*8×6.*other.PNG has 30×40.*size="):
        load("folder", path=tmp_path)
    data = load("folder", path=tmp_path, size=5, channels=1)
    assert str(data) == "folder: 21 train, 20 validation, 20 test; images (1, 5, 5), 2 classes"
    with pytest.raises(DataError, match=r"validation=0.2.*own validation split"):
        load("folder", path=tmp_path, size=5, validation=0.2)
    with pytest.raises(DataError, match=r"test=3.*own test split"):
        load("folder", path=tmp_path, size=5, test=3)


def test_bad_folders_are_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="is a file; expected a folder"):
        load("folder", path=tmp_path / "file")
    with pytest.raises(DataError, match="has no folders; expected one for each class"):
        load("folder", path=tmp_path)
    image_folder(tmp_path, ("train",))
    (tmp_path / "test/bird").mkdir(parents=True)
    with pytest.raises(DataError, match=r"no image in 1 class folders of .*test: bird"):
        load("folder", path=tmp_path)
    Image.new("RGB", (8, 6)).save(tmp_path / "test/bird/a.png")
    with pytest.raises(DataError, match="no training example of 1 of 3 classes: bird"):
        load("folder", path=tmp_path)
    (tmp_path / "test/bird/a.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"a.png can't be read as an image"):
        load("folder", path=tmp_path)


def test_a_broken_image_is_named_when_it_is_met(tmp_path: Path) -> None:
    data = load("folder", path=image_folder(tmp_path), size=4, test=0, validation=0)
    (tmp_path / "cat/0.png").write_bytes((tmp_path / "cat/0.png").read_bytes()[:50])
    with pytest.raises(DataError, match=r"cat/0.png can't be read"):
        data.train[0]
    Image.new("I;16", (8, 6)).save(tmp_path / "cat/1.png")
    with pytest.raises(DataError, match=r"cat/1.png has pixels of mode 'I;16'"):
        data.train[1]


def test_new_images_are_read_from_everywhere(tmp_path: Path) -> None:
    inputs = inputs_from_dict(Images((3, 6, 8), (0.0,) * 3, (1.0,) * 3).to_dict())
    image_folder(tmp_path / "photos", size=(16, 12))
    np.savez(tmp_path / "x.npz", images=pixels(2, 6, 8, 3))
    single = tmp_path / "photos/dog/3.png"
    examples, names = inputs.read([single, tmp_path / "x.npz", tmp_path / "photos"])
    assert names[:4] == ["3.png", "x.npz:0", "x.npz:1", "cat/0.png"] and len(names) == len(examples) == 23
    assert examples.targets.unique().tolist() == [-1]
    x, _ = examples.__getitems__([22, 1, 0])
    assert x.shape == (3, 3, 6, 8) and x[2, :, 0, 0].tolist() == [100, 3, 7] and x[0, 0, 0, 0] == 100
    assert torch.equal(x[1], torch.from_numpy(pixels(2, 6, 8, 3))[0].permute(2, 0, 1))


def test_what_cannot_be_read_as_images_is_explained(tmp_path: Path) -> None:
    inputs = Images((1, 6, 5), (0.0,), (1.0,))
    np.savez(tmp_path / "x.npz", images=pixels(2, 7, 5))
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "empty").mkdir()
    for path, words in (
        ("x.npz", r"shape \(1, 7, 5\); expected \(1, 6, 5\)"),
        ("notes.txt", "expected a .npz, .npy, idx or image file"),
    ):
        with pytest.raises(DataError, match=words):
            inputs.read([tmp_path / path])
    with pytest.raises(DataError, match="has no image file"):
        inputs.read([tmp_path / "empty"])
    with pytest.raises(DataError, match="nothing to read"):
        inputs.read([])
    with pytest.raises(DataError, match="expected a list"):
        inputs.read("photo.png")
    header = struct.pack(">4B3I", 0, 0, 8, 3, 2, 6, 5)
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(header + pixels(2, 6, 5).tobytes())
    assert inputs.read([tmp_path / "t10k-images-idx3-ubyte"])[1] == [f"t10k-images-idx3-ubyte:{i}" for i in range(2)]


# NumPy archives.


def npz(path: Path, **arrays: object) -> Path:
    np.savez(path / "d.npz", **{key: np.asarray(value) for key, value in arrays.items()})
    return path / "d.npz"


@pytest.mark.parametrize("shape", [(40, 6, 5), (40, 6, 5, 1), (40, 1, 6, 5)])
def test_npz_images(tmp_path: Path, shape: tuple[int, ...]) -> None:
    data = load("npz", path=npz(tmp_path, images=pixels(*shape), labels=LABELS[:, None]), test=0, validation=0)
    assert str(data) == "npz: 40 train, 0 validation, 0 test; images (1, 6, 5), 4 classes"
    assert torch.equal(all_raw(data).flatten(), torch.from_numpy(pixels(*shape)).flatten())


def test_npz_splits_and_regression(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(3, 2, (60, 4)), np.arange(60) * 0.5
    path = npz(tmp_path, x_train=x[:40], y_train=y[:40], val_x=x[40:50], val_y=y[40:50], x_test=x[50:], y_test=y[50:])
    data = load("npz", path=path)
    assert str(data) == "npz: 40 train, 10 validation, 10 test; arrays (4,), 1 reals"
    assert isinstance(data.inputs, Arrays) and np.allclose(data.inputs.mean, x[:40].mean(0), atol=1e-6)
    assert data.train.targets.shape == (40, 1) and data.train.targets.mean().abs() < 1e-6
    restored, _ = data.targets.restore(data.test.targets, data.test.targets)
    assert np.allclose(restored.numpy()[:, 0], y[50:])
    np.savez(tmp_path / "new.npz", x=x[:3])
    examples, names = data.inputs.read([tmp_path / "new.npz"])
    assert names == ["new.npz:0", "new.npz:1", "new.npz:2"] and examples.targets.isnan().all()


def test_npz_kinds_and_names(tmp_path: Path) -> None:
    path = npz(tmp_path, a=np.random.default_rng(0).random((40, 3, 4, 4)), b=LABELS, c=LABELS)
    with pytest.raises(DataError, match="has the arrays a, b, c; expected exactly one of x"):
        load("npz", path=path)
    with pytest.raises(DataError, match="no array 'd'"):
        load("npz", path=path, x="a", y="d")
    assert load("npz", path=path, x="a", y="b", kind="images").inputs.shape == (3, 4, 4)
    plain = load("npz", path=path, x="a", y="b", standardise=False)
    assert torch.equal(plain.inputs.prepare(all_raw(plain)), all_raw(plain))
    assert len(load("npz", path=path, x="a", y="b", task="regression").targets.to_dict()["mean"]) == 1
    test = load("npz", path=path, x="a", unlabelled=True)
    assert len(test.test) == 40 and test.test.targets.unique().tolist() == [-1] and test.targets.count == 0


@pytest.mark.parametrize(
    "arrays, options, words",
    [
        ({"x": [[1.0, np.nan], [2, 3]], "y": [0, 1]}, {}, r"in 1 of 2 rows \(rows 0, columns 1\)"),
        ({"x": [[1.0], [2]], "y": [0.5, np.inf]}, {}, r"targets of .*infinity in 1 of 2 rows \(rows 1"),
        ({"x": [[1.0], [2]], "y": [0, 2]}, {}, "no training example of 1 of 3 classes: 1.*without gaps"),
        ({"x": [[1.0], [2]], "y": [[0, 2], [1, 0]]}, {}, r"shape \(2, 2\); expected one integer"),
        ({"x": [[1.0], [2]], "y": ["a", "b"]}, {}, "labels of type <U1"),
        ({"x": [["a"], ["b"]], "y": [0, 1]}, {}, "expected numbers"),
        ({"x": [[1.0], [2]], "y": [0, 1]}, {"kind": "images"}, "expected images"),
        ({"x": np.full((2, 4, 4), 7.0), "y": [0, 1]}, {"kind": "images"}, "from 7.0 to 7.0; expected 0 to 1"),
        ({"x": np.zeros((2, 3, 4, 3), np.uint8), "y": [0, 1]}, {}, "or 4 channels"),
        ({"x": np.zeros((0, 3)), "y": []}, {}, "no rows"),
        ({"x_test": [[1.0]], "y_test": [1]}, {}, "none to train on"),
        ({"x": [[1.0], [2]], "y": [0, 1]}, {"mean": [0.0]}, "for images only"),
        ({"x": [[1.0], [2]], "y": [0, 1]}, {"kind": "image"}, "kind='image': expected one of"),
    ],
)
def test_wrong_arrays_are_explained(
    tmp_path: Path, arrays: dict[str, object], options: dict[str, object], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        load("npz", path=npz(tmp_path, **arrays), test=0, validation=0, **options)


def test_pickled_and_broken_archives_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "o.npz", x=np.array([{}], dtype=object), y=np.array([0]))
    with pytest.raises(DataError, match="Python objects, which aren't loaded"):
        load("npz", path=tmp_path / "o.npz")
    path = npz(tmp_path, x=np.zeros((50, 3)), y=[0] * 50)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DataError, match="can't be read as NumPy arrays"):
        load("npz", path=path)
