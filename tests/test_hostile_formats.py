"""Files of every format that were edited, damaged or made to harm: refused in words, before memory is allocated."""

from __future__ import annotations

import gzip
import json
import pickle
import random
import resource
import struct
import warnings
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
from bayesify.lab.data import Classes, Columns, DataError, Reals
from bayesify.lab.data.checks import require_shape
from bayesify.lab.data.cifar import cifar10
from bayesify.lab.data.files import read_idx, read_npz
from bayesify.lab.data.image_files import open_image
from bayesify.lab.data.plain_pickle import read_plain_pickle
from bayesify.lab.data.spreadsheets import safe_cell
from bayesify.lab.export_run import raw_inputs
from bayesify.lab.models import ModelError, load_weights
from bayesify.lab.recipes import Recipe, RecipeError
from bayesify.lab.run_files import open_new, write_file
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


def test_a_pickle_cannot_copy_the_same_bytes_again_and_again(tmp_path: Path) -> None:
    text = b"a" * 1_000_000
    start = (
        b"\x80\x02c_codecs\nencode\nq\x00X" + struct.pack("<I", len(text)) + text + b"q\x01X\x06\0\0\0latin1\x86q\x02"
    )
    (tmp_path / "x").write_bytes(start + b"h\x00h\x02R" * 50_000 + b".")
    most = memory()
    with pytest.raises(DataError, match="copy the same values"):
        read_plain_pickle(tmp_path / "x")
    assert memory() - most < 100e6


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
        ("0.weight", torch.full((8, 4), torch.inf), "'0.weight' holds NaN or infinity"),
        ("0.posterior.in_loc", torch.full((4, 4), -torch.inf), "'0.posterior.in_loc' holds NaN or infinity"),
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
    with pytest.raises(ModelError, match=r"'weight' holds torch\.int64, which can't be weights"):
        load_weights(nn.Linear(4, 3), tmp_path / "w.pt")


# Recipes and arrays.

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


MERGE = "a0: &a0 {k: v}\n" + "".join(f"a{i + 1}: &a{i + 1} {{<<: [{', '.join([f'*a{i}'] * 10)}]}}\n" for i in range(12))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "more than 100,000 values"),
        (BOMB.replace("[", "{k1: ").replace("]", "}").replace(", ", ", k{}: "), "r.yaml"),
        (MERGE, "merge keys"),
        ("a: &a {x: 1}\nb: {!!merge x: *a}", "merge keys"),
        ("a: &a 1\nb: [" + "*a, " * 1001 + "]", "more than 1,000 aliases"),
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


def npy(shape: str, descr: str, content: bytes) -> bytes:
    header = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + content


def patched_zip(path: Path, flags: int, method: int) -> None:
    """An archive with an array whose entries claim encryption or another compression."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", npy("(2,)", "<f4", bytes(8)))
    content = bytearray(path.read_bytes())
    directory = content.find(b"PK\x01\x02")
    for at, value in ((6, flags), (8, method), (directory + 8, flags), (directory + 10, method)):
        content[at] = value
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("shape", "descr", "size"),
    [
        *(("(True, 2)", "<f4", 8), ("(-1, -4)", "<f4", 16), ("(2.0,)", "<f4", 8), ("(10**12,)", "<f4", 0)),
        *(("(1000000000000,)", "|V0", 0), ("(1000000000000,)", "<U0", 0), ("(" + "1," * 65 + ")", "<f4", 4)),
    ],
)
def test_an_array_with_an_impossible_header_is_refused(shape: str, descr: str, size: int, tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(npy(shape, descr, bytes(size)))
    with pytest.raises(DataError, match=r"x\.npy can't be read"):
        read_npz(tmp_path / "x.npy")


def test_archives_that_are_encrypted_or_of_unknown_compression_are_refused(tmp_path: Path) -> None:
    for name, flags, method in (("encrypted", 1, 0), ("unknown", 0, 99), ("lzma", 0, 14), ("bzip2", 0, 12)):
        patched_zip(tmp_path / f"{name}.npz", flags, method)
        with pytest.raises(DataError, match=rf"{name}\.npz can't be read"):
            read_npz(tmp_path / f"{name}.npz")


def test_an_archive_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bayesify.lab.data.files.MOST_UNPACKED", 10_000)
    np.savez_compressed(tmp_path / "x.npz", x=np.zeros(2000), y=np.zeros(10))
    with pytest.raises(DataError, match="unpacks to 16"):
        read_npz(tmp_path / "x.npz")
    np.savez(tmp_path / "stored.npz", x=np.zeros(2000), y=np.zeros(10))  # what is stored as it is, is there already
    assert read_npz(tmp_path / "stored.npz")["x"].shape == (2000,)


def test_idx_files_are_read_up_to_the_size_in_their_header(tmp_path: Path) -> None:
    def idx(name: str, *shape: int, content: bytes = b"", megabytes: int = 0) -> Path:
        path = tmp_path / name
        with gzip.open(path, "wb") if name.endswith(".gz") else path.open("wb") as file:
            file.write(b"\0\0\x08" + bytes([len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + content)
            for _ in range(megabytes):
                file.write(bytes(1_000_000))
        return path

    assert read_idx(idx("right-idx1-ubyte.gz", 3, content=b"abc")).tolist() == [97, 98, 99]
    hostile = [
        idx("a-idx65-ubyte", *[1] * 65, content=b"x"),
        idx("b-idx4-ubyte", 0, 2**32 - 1, 2**32 - 1, 2**32 - 1),
        idx("c-idx1-ubyte.gz", 10, megabytes=200),
        idx("d-idx1-ubyte.gz", 2**32 - 1, content=b"x"),
        idx("e-idx3-ubyte", 2**32 - 1, 2**32 - 1, 2**32 - 1, content=b"x"),
        idx("f-idx3-ubyte.gz", 2**32 - 1, 2**32 - 1, 2**32 - 1, content=b"x"),
    ]
    before = memory()
    for path in hostile:
        with pytest.raises(DataError, match=path.name):
            read_idx(path)
    assert memory() - before < 50e6


def test_an_input_of_too_many_numbers_is_refused_by_its_size() -> None:
    with pytest.raises(DataError, match=r"9e\+08 numbers in one input; expected at most 10,000,000"):
        require_shape((1, 30_000, 30_000))
    with pytest.raises(DataError, match="numbers in one input"):
        require_shape((10**200, 10**200))


def test_an_image_file_of_another_format_starts_no_program(tmp_path: Path) -> None:
    """Pillow hands EPS to Ghostscript, whatever the file's name."""
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (8, 8)).save(tmp_path / "x.eps")
    (tmp_path / "x.eps").rename(tmp_path / "x.png")
    with image.open(tmp_path / "x.png") as opened:
        assert opened.format == "EPS"
    with pytest.raises(DataError, match="can't be read as an image"), open_image(tmp_path / "x.png"):
        pass
    for suffix in ("png", "jpg", "bmp", "gif", "webp", "tif", "ppm"):
        image.new("RGB", (8, 8)).save(tmp_path / f"x.{suffix}")
        with open_image(tmp_path / f"x.{suffix}") as opened:
            assert opened.size == (8, 8)


def test_weights_that_contain_themselves_are_refused(tmp_path: Path) -> None:
    saved: dict[str, Any] = {"x": torch.ones(1)}
    saved["model"] = saved
    torch.save(saved, tmp_path / "w.pt")
    with pytest.raises(ModelError, match="contain themselves"):
        load_weights(nn.Linear(4, 3), tmp_path / "w.pt")


def test_names_of_targets_are_distinct() -> None:
    with pytest.raises(DataError, match="'a' occurs twice"):
        Classes(("a", "b", "a"))
    with pytest.raises(DataError, match="'y' occurs twice"):
        Reals(("y", "y"), (0.0, 0.0), (1.0, 1.0))


# What is written.


def test_files_are_never_written_through_a_link(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("keep me")
    for name in ("a.json.part", "a.json"):
        (tmp_path / name).symlink_to(secret)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    write_file(tmp_path / "a.json", "new")
    with open_new(tmp_path / "dangling") as file:
        file.write(b"new")
    assert secret.read_text() == "keep me" and not (tmp_path / "nowhere").exists()
    assert all((tmp_path / name).read_text() == "new" for name in ("a.json", "dangling"))
    assert not any(path.is_symlink() for path in tmp_path.iterdir())


@pytest.mark.parametrize("unseen", ["error", "zeros"])
def test_codes_of_no_category_never_become_another_one(unseen: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    columns = Columns(("age",), (40.0,), (10.0,), ("kind",), (("a", "b", "c"),), unseen=unseen)
    example, prepare, text = raw_inputs(columns)
    model = by.convert(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), by.Rank1(2))
    rows = torch.tensor([[50.0, code] for code in (0, 2, -1, 3, 7, 1.5, torch.nan, torch.inf, -1e300)]).double()
    for name in ("m.onnx", "m.pt2"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the exporters
            by.export(model, tmp_path / name, example, samples=2, prepare=prepare)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    found = [torch.tensor(session.run(None, {"x": rows.numpy()})[0])]
    found.append(torch.export.load(tmp_path / "m.pt2").module()(rows)[0])
    clean = torch.tensor([[1.0, 1, 0, 0], [1, 0, 0, 1], [1, 0, 0, 0]])
    expected = by.predict(model, clean, 2).log_probs
    for log_probs in found:
        assert torch.allclose(log_probs[:2], expected[:2], atol=1e-4)
        if unseen == "error":
            assert log_probs[2:].isnan().all()
        else:
            assert torch.allclose(log_probs[2:], expected[2:].expand(7, 3), atol=1e-4)
    assert ("makes the outputs of its row NaN" in text.meaning) and ("no category" in text.meaning) == (
        unseen == "zeros"
    )


def test_infinity_in_a_buffer_is_no_damage(tmp_path: Path) -> None:
    def masked() -> nn.Module:
        model = network()
        model.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        return model

    by.save(by.convert(masked(), by.Rank1(2)), tmp_path / "m")
    assert by.load(masked(), tmp_path / "m").mask[0, 1] == -torch.inf


# Text in CSV files.


@pytest.mark.parametrize(
    "text", ["=1+1", "+1+1", "-1+1", "@a", "\t=x", "\r=x", "\n=x", " =1+1", "＝1", "-", "=", "+inf\n=1"]
)
def test_a_formula_gets_an_apostrophe(text: str) -> None:
    shown = text.replace("\t", " ").replace("\r", " ").replace("\n", " ")
    assert safe_cell(text) == f"'{shown}"


def test_characters_that_are_not_shown_reach_no_table() -> None:
    assert safe_cell("\x1b[31mred\x07 \u202etxt.exe\u200b\x00") == "[31mred txt.exe"
    assert safe_cell("\x1b=1+1") == "'=1+1" and safe_cell("New\u00a0York\nCity") == "New York City"


@pytest.mark.parametrize("value", ["-2", "+3.5", "-1e-3", "cat", "a=b", "", 3, -2.5, None, True])
def test_numbers_and_words_stay_as_they_are(value: Any) -> None:
    assert safe_cell(value) is value
