"""Files of every format that were edited, damaged or made to harm: refused in words, before memory is allocated."""

from __future__ import annotations

import json
import pickle
import random
import resource
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import Architecture, converted, every_case
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import bayesify as by
from bayesify.errors import CheckpointError
from bayesify.files.checkpoint import require_fit
from bayesify.lab.data import DataError
from bayesify.lab.data.cifar import cifar10
from bayesify.lab.data.files import read_npz
from bayesify.lab.data.plain_pickle import read_plain_pickle
from bayesify.lab.data.spreadsheets import safe_cell
from bayesify.lab.models import ModelError, load_weights
from bayesify.lab.recipes import Recipe, RecipeError
from bayesify.methods.base import Method


def memory() -> float:
    """The most bytes that this process has had."""
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# CIFAR's pickles.


def cifar(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "test_batch").write_bytes(content)
    return folder


PLAIN: dict[Any, Any] = {
    "data": np.arange(2 * 3072).astype(np.uint8).reshape(2, 3072),
    b"labels": [3, 1],
    "names": ["a", "ü"],
    b"bytes": b"yz",
    "more": (None, 1.5, -1, 2**40, True, (), (1, 2, 3, 4)),
    "scalar": np.int64(7),
    "real": np.linspace(0, 1, 5),
    "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_are_read_as_pickle_reads_them(tmp_path: Path, protocol: int) -> None:
    (tmp_path / "x").write_bytes(pickle.dumps(PLAIN, protocol))
    found = read_plain_pickle(tmp_path / "x")
    assert found.keys() == PLAIN.keys()
    for key, value in PLAIN.items():
        assert np.array_equal(found[key], value) if isinstance(value, np.ndarray) else found[key] == value
        assert not isinstance(value, np.ndarray) or found[key].dtype == value.dtype


def test_a_pickle_cannot_choose_an_address(tmp_path: Path) -> None:
    """An array whose state is not bytes but a number was taken for an address."""
    start = b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01btR"
    dtype = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR"
    for state in (b"\x8a\x08" + struct.pack("<q", 0x41414141), b"N", b"]", b"U\x03abc"):
        folder = cifar(
            tmp_path / "x", start + b"(K\x01M\x00\x0c\x85" + dtype + b"\x89" + state + b"tbU\x06labels](K\x01eu."
        )
        with pytest.raises(DataError, match="test_batch"):
            cifar10(folder)
    objects = b"cnumpy\ndtype\n(U\x02O8K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x3ftb"
    folder = cifar(tmp_path / "x", start + b"(K\x01K\x01\x85" + objects + b"\x89](K\x01etbU\x06labels](K\x01eu.")
    with pytest.raises(DataError, match="something other than numbers"):
        cifar10(folder)


def test_nested_labels_are_not_written_out(tmp_path: Path) -> None:
    nested: list[Any] = [1] * 10
    for _ in range(15):
        nested = [nested] * 10
    content = {"data": np.zeros((10, 3072), np.uint8), "labels": nested}
    with pytest.raises(DataError, match=r"labels .* is a list; expected a list of integers"):
        cifar10(cifar(tmp_path / "x", pickle.dumps(content, 2)))


@pytest.mark.parametrize("seed", range(4))
def test_mutated_pickles_are_read_or_refused(tmp_path: Path, seed: int) -> None:
    chance, path = random.Random(seed), tmp_path / "x"
    originals = [pickle.dumps(PLAIN, protocol) for protocol in (2, 3, 4, 5)]
    words = [b"(", b"t", b"R", b"b", b"}", b"]", b"h\0", b"0", b"c", b"\x85", b"u", b"e", b"J\xff\xff\xff\xff", b"."]
    outcomes = {"read": 0, "refused": 0}
    for _ in range(400):
        content = bytearray(chance.choice(originals))
        for _ in range(chance.randint(1, 5)):
            at = chance.randrange(min(len(content), 500) + 1)
            content[at : at + chance.choice((0, 1, 8))] = chance.choice([*words, bytes([chance.randrange(256)])])
        path.write_bytes(content)
        try:
            read_plain_pickle(path)
            outcomes["read"] += 1
        except DataError:
            outcomes["refused"] += 1
    assert outcomes["refused"] > 100 and outcomes["read"] > 0


# Saved models.


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "model.safetensors"
    by.save(by.convert(network(), by.Rank1(4)), path)
    return path


def rewritten(source: Path, path: Path, header: Callable[[dict[str, Any]], Any] = bool, **tensors: Any) -> Path:
    """A copy of a saved model with another header and other tensors."""
    with safe_open(source, "pt") as file:
        description = json.loads(file.metadata()["bayesify"])
        values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    changed = header(description)
    text = json.dumps(changed if isinstance(changed, (dict, list, str)) else description)
    values.update(tensors)
    save_file({name: value for name, value in values.items() if value is not None}, path, {"bayesify": text})
    return path


def all_options(**options: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda header: [each["options"].update(options) for each in header["families"].values()] and None


def put(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda header: header.update({key: value})


HEADERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda header: ["x"],
    "a word": lambda header: "x",
    "another format": put("format", 2),
    "a format that is a list": put("format", [1]),
    "no layers": lambda header: header.pop("layers") and None,
    "layers of others": put("layers", {"0": "Linear"}),
    "layers that are a list": put("layers", ["Linear"]),
    "layers that are numbers": put("layers", {"0": 1, "2": 2}),
    "methods that are a list": put("families", []),
    "methods that are words": put("families", {"0": "Rank1", "2": "Rank1"}),
    "methods without options": put("families", {"0": {"name": "Rank1"}, "2": {"name": "Rank1"}}),
    "methods with a list of options": put("families", {key: {"name": "Rank1", "options": [4]} for key in "02"}),
    "a method that is a list": put("families", {key: {"name": ["Rank1"], "options": {}} for key in "02"}),
    "an unknown method": put("families", {key: {"name": "system", "options": {}} for key in "02"}),
    "a method that is no method": put("families", {key: {"name": "Method", "options": {}} for key in "02"}),
    "an unknown option": all_options(command="x"),
    "components that are words": all_options(components="4"),
    "negative components": all_options(components=-4),
    "fractional components": all_options(components=4.5),
    "NaN for a prior": all_options(prior_std=float("nan")),
    "10**10 components": all_options(components=10**10),
    "99,999 components": all_options(components=99_999),
    "10**9 samples of the KL": all_options(kl_samples=10**9),
    "a batch_dim that is a word": put("batch_dim", "x"),
    "a negative batch_dim": put("batch_dim", -1),
    "a batch_dim that is null": put("batch_dim", None),
    "keep_dropout that is a word": put("keep_dropout", "yes"),
    "aliases that are a list": put("aliases", ["x"]),
    "aliases to lists": put("aliases", {"x": ["0.weight"]}),
    "aliases to nothing": put("aliases", {"x": "nothing"}),
    "aliases of what is there": put("aliases", {"0.weight": "2.weight"}),
    "left out that is a list": put("left_out", ["x"]),
    "left out with a wrong shape": put("left_out", {"x": "y"}),
    "left out that is there": put("left_out", {"0.weight": [8, 4]}),
    "left out and huge": put("left_out", {"x": [10**12]}),
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_malformed_header_is_refused_before_anything_is_allocated(saved: Path, tmp_path: Path, what: str) -> None:
    path, model = rewritten(saved, tmp_path / "m", HEADERS[what]), network()
    before, most = {name: t.clone() for name, t in model.state_dict().items()}, memory()
    with pytest.raises(CheckpointError, match=str(path)):
        by.load(model, path)
    assert memory() - most < 100e6
    assert model.state_dict().keys() == before.keys() and all(
        torch.equal(model.state_dict()[n], before[n]) for n in before
    )


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("0.weight", torch.ones(8, 4, dtype=torch.int32), "has the type torch.int32 in the file and torch.float32"),
        ("0.weight", torch.ones(8, 4, dtype=torch.bool), "has the type torch.bool"),
        ("0.weight", torch.ones(8, 4).to(torch.float8_e4m3fn), "has the type F8_E4M3"),
        ("0.weight", torch.full((8, 4), torch.nan), "'0.weight' holds NaN"),
        ("0.posterior.in_rho", torch.full((4, 4), torch.nan), "'0.posterior.in_rho' holds NaN"),
        ("0.weight", torch.ones(4, 8), r"has shape \(4, 8\) in the file and \(8, 4\)"),
        ("0.weight", torch.ones(8, 0), r"has shape \(8, 0\)"),
        ("0.posterior.in_loc", torch.ones(5, 4), r"has shape \(5, 4\)"),
        ("0.posterior.in_loc", torch.ones(4, 4, dtype=torch.int64), "has the type torch.int64"),
        ("0.posterior.more", torch.ones(4), "extra 1 tensor"),
        ("0.posterior.in_loc", None, "missing 1 tensor"),
    ],
)
def test_a_tensor_that_is_not_the_networks_is_refused(
    saved: Path, tmp_path: Path, name: str, tensor: Any, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        by.load(network(), rewritten(saved, tmp_path / "m", **{name: tensor}))


def test_half_precision_still_loads_into_single(saved: Path, tmp_path: Path) -> None:
    model = by.load(network(), rewritten(saved, tmp_path / "m", **{"0.weight": torch.ones(8, 4).half()}))
    assert torch.equal(model.state_dict()["0.weight"], torch.ones(8, 4))


@every_case
def test_what_a_file_must_have_is_known_without_converting(
    method: Method, architecture: Architecture, tmp_path: Path
) -> None:
    """The shapes and types that a header is compared with are those of the converted network."""
    model = converted(method, architecture)
    by.save(model, tmp_path / "m")
    with torch.device("meta"):
        outline = architecture.make()
    _, kinds = require_fit(outline, tmp_path / "m")
    assert kinds == {name: (tuple(t.shape), t.dtype) for name, t in model.state_dict().items()}


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, 100, -1])
def test_a_truncated_model_is_refused(saved: Path, tmp_path: Path, cut: int) -> None:
    (tmp_path / "m").write_bytes(saved.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        by.load(network(), tmp_path / "m")


def test_integers_are_no_weights_of_a_plain_network(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(3, 4, dtype=torch.int64), "bias": torch.ones(3)}, tmp_path / "w.pt")
    with pytest.raises(ModelError, match=r"'weight' holds torch\.int64, which are no weights"):
        load_weights(nn.Linear(4, 3), tmp_path / "w.pt")


# Recipes and arrays.

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "more than 100,000 values"),
        (BOMB.replace("[", "{k1: ").replace("]", "}").replace(", ", ", k{}: "), "r.yaml"),
        ("data: &a {options: *a}", "nested too deeply, or contain themselves|more than 100,000"),
        ("a: " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("# " + "x" * 2_000_000, "a recipe has at most 1,000,000"),
        ("seed: " + "9" * 5000, "r.yaml"),
        ("seed: 2001-99-99", "not a YAML file"),
        ("model: !!python/object/apply:os.system [touch x]", "not a YAML file"),
        ("model: !!python/name:os.system", "not a YAML file"),
        ("? [a, b]\n: 3", "not a YAML file"),
        ("- a\n- b", "expected keys such as data"),
        ("\x00\x01", "not a YAML file"),
    ],
)
def test_yaml_bombs_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(RecipeError, match=message):
        Recipe.read(tmp_path / "r.yaml")


def test_aliases_within_reason_are_read(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(
        "data: {options: &size {size: 8}}\nevaluation: {ood: [{name: digits, options: *size}]}"
    )
    assert Recipe.read(tmp_path / "r.yaml").evaluation.ood[0].options == {"size": 8}  # type: ignore[union-attr]


def test_arrays_that_claim_more_than_they_hold_are_refused(tmp_path: Path) -> None:
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }"
    content = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + b"\0" * 80
    (tmp_path / "x.npy").write_bytes(content)
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x.npy", content)
    most = memory()
    for name in ("x.npy", "x.npz"):
        with pytest.raises(DataError, match=r"needs 8000000000\d+ bytes, but there are"):
            read_npz(tmp_path / name)
    assert memory() - most < 100e6


# Text in CSV files.


@pytest.mark.parametrize(
    "text", ["=1+1", "+1+1", "-1+1", "@a", "\tx", "\r=x", "\n=x", " =1+1", "＝1", "-", "=", "+inf\n=1"]
)
def test_a_formula_gets_an_apostrophe(text: str) -> None:
    assert safe_cell(text) == f"'{text}"


@pytest.mark.parametrize("value", ["-2", "+3.5", "-1e-3", "cat", "a=b", "", 3, -2.5, None, True])
def test_numbers_and_words_stay_as_they_are(value: Any) -> None:
    assert safe_cell(value) is value
