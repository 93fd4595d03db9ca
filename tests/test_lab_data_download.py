"""Downloads from a stand-in server on loopback: whole, resumed, refused, or nothing; and never unless asked for."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import os
import pickle
import re
import signal
import socket
import struct
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bayesify.lab import Recipe
from bayesify.lab.data import DataError, downloadable_sets, fetch_file, load
from bayesify.lab.data.downloadable_sets import IDX, SETS, UCI_SETS, RemoteSet, UciSet
from bayesify.lab.data.fetch_file import RemoteFile, fetch
from bayesify.lab.from_recipe import load_data

CONTENT = bytes(range(256)) * 4000


class Server(ThreadingHTTPServer):
    """Files by their paths; `short` sends only so many bytes of a body, `hold` waits in the middle of each."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.asked: list[tuple[str, str | None]] = []
        self.short: int | None = None
        self.resumes = True
        self.hold: threading.Event | None = None

    def url(self, path: str = "") -> str:
        return f"http://127.0.0.1:{self.server_port}/{path}"

    def remote(self, name: str, content: bytes, **changes: Any) -> RemoteFile:
        """A file that this server has, with its true size and checksum."""
        self.files[f"/{name}"] = content
        facts = {"size": len(content), "checksum": f"sha256:{hashlib.sha256(content).hexdigest()}", **changes}
        return RemoteFile(name, (self.url(name),), **facts)


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted, server = self.headers.get("Range"), self.server
        server.asked.append((self.path, wanted))
        if self.path not in server.files:
            self.send_error(404)
            return
        content, start = server.files[self.path], 0
        if wanted and server.resumes:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        body = content[start:] if server.short is None else content[start : start + server.short]
        if server.hold is not None:
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            server.hold.wait(30)
            body = body[len(body) // 2 :]
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BAYESIFY_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def idx_file(array: np.ndarray) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return gzip.compress(header + array.astype(np.uint8).tobytes(), mtime=0)


def small_idx_set() -> dict[str, bytes]:
    """Twenty images for training and ten for testing."""
    arrays = [np.full((20, 4, 4), 7), np.arange(20) % 10, np.full((10, 4, 4), 9), np.arange(10)]
    return dict(zip(IDX, map(idx_file, arrays), strict=True))


def serve_mnist(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    files = tuple(server.remote(name, content) for name, content in small_idx_set().items())
    monkeypatch.setitem(SETS, "mnist", RemoteSet("mnist", files))


def cifar_archive(members: Mapping[str, bytes]) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as opened:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            opened.addfile(info, io.BytesIO(content))
    return archive.getvalue()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".download"}


# One file.


def test_a_file_is_downloaded_and_not_asked_for_again(server: Server, tmp_path: Path) -> None:
    file = server.remote("a.gz", CONTENT)
    assert fetch(file, tmp_path).read_bytes() == CONTENT
    assert fetch(file, tmp_path).name == "a.gz.part"
    assert server.asked == [("/a.gz", None)]


def test_a_truncated_body_is_continued(server: Server, tmp_path: Path) -> None:
    file = server.remote("a.gz", CONTENT)
    server.short = len(CONTENT) * 2 // 3
    assert fetch(file, tmp_path).read_bytes() == CONTENT
    assert [wanted for _, wanted in server.asked] == [None, f"bytes={server.short}-"]


def test_a_server_that_cannot_continue_sends_all_of_it_again(server: Server, tmp_path: Path) -> None:
    file = server.remote("a.gz", CONTENT)
    (tmp_path / "a.gz.part").write_bytes(b"the beginning of something")
    server.resumes = False
    assert fetch(file, tmp_path).read_bytes() == CONTENT


def test_a_body_that_always_ends_early_is_an_error_that_keeps_what_came(server: Server, tmp_path: Path) -> None:
    file = server.remote("a.gz", CONTENT)
    server.short = 1000
    with pytest.raises(DataError, match=r"a\.gz: the connection ended after 1,000 of 1,024,000 bytes") as error:
        fetch(file, tmp_path)
    assert "continues" in str(error.value) and (tmp_path / "a.gz.part").stat().st_size == 2000
    server.short = None
    assert fetch(file, tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("kind", ["sha256", "md5"])
def test_a_wrong_checksum_leaves_nothing(server: Server, tmp_path: Path, kind: str) -> None:
    value = hashlib.new(kind, CONTENT).hexdigest()
    assert fetch(server.remote("right.gz", CONTENT, checksum=f"{kind}:{value}"), tmp_path).read_bytes() == CONTENT
    file = server.remote("a.gz", CONTENT[::-1], checksum=f"{kind}:{value}")
    with pytest.raises(DataError, match=f"its {kind} is [0-9a-f]+; expected {value}"):
        fetch(file, tmp_path)
    assert names(tmp_path) == {"right.gz.part"}


def test_a_file_of_another_length_leaves_nothing(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="it has 1,024,000 bytes; expected 1,024,001"):
        fetch(server.remote("short.gz", CONTENT, size=len(CONTENT) + 1), tmp_path)
    with pytest.raises(DataError, match="it would send 1,024,000 bytes; expected 1,000"):
        fetch(server.remote("long.gz", CONTENT, size=1000), tmp_path)
    assert not names(tmp_path)


def test_a_missing_file_names_every_address(server: Server, tmp_path: Path) -> None:
    file = RemoteFile("a.gz", (server.url("one"), server.url("two")), 5, None)
    with pytest.raises(DataError, match=r"one: HTTP Error 404.*two: HTTP Error 404") as error:
        fetch(file, tmp_path)
    assert f"put the file into {tmp_path} yourself" in str(error.value)
    assert not names(tmp_path)


def test_the_next_address_continues(server: Server, tmp_path: Path) -> None:
    file = server.remote("a.gz", CONTENT)
    both = RemoteFile(file.name, (server.url("gone"), *file.addresses), file.size, file.checksum)
    (tmp_path / "a.gz.part").write_bytes(CONTENT[:777])
    assert fetch(both, tmp_path).read_bytes() == CONTENT
    assert server.asked[-1] == ("/a.gz", "bytes=777-")


def test_nobody_there(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(DataError, match="Connection refused"):
        fetch(RemoteFile("a.gz", (f"http://127.0.0.1:{port}/a.gz",)), tmp_path)


def test_too_little_space_is_told_before_anything_is_sent(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 5000})
    monkeypatch.setattr(fetch_file.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(DataError, match=r"has 5,000 bytes free, but the download needs 1,024,000; make room"):
        fetch(server.remote("a.gz", CONTENT), tmp_path)
    assert not names(tmp_path)


@pytest.mark.skipif(not os.access("/dev/full", os.W_OK), reason="no /dev/full")
def test_a_disk_that_fills_up(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.gz.part").symlink_to("/dev/full")  # where every write ends with ENOSPC
    with pytest.raises(DataError, match=rf"a\.gz\.part: {os.strerror(errno.ENOSPC)}; make room there"):
        fetch(server.remote("a.gz", CONTENT), tmp_path)
    assert not names(tmp_path)


def test_a_download_that_is_killed_is_continued(server: Server, tmp_path: Path) -> None:
    file = server.remote("a.gz", CONTENT)
    server.hold = threading.Event()
    code = (
        "import sys, pathlib; from bayesify.lab.data.fetch_file import RemoteFile, fetch; "
        "fetch(RemoteFile('a.gz', (sys.argv[1],), int(sys.argv[2])), pathlib.Path(sys.argv[3]))"
    )
    words = [sys.executable, "-c", code, file.addresses[0], str(len(CONTENT)), str(tmp_path)]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as process:
        part = tmp_path / "a.gz.part"
        while process.poll() is None and not (part.is_file() and part.stat().st_size):
            threading.Event().wait(0.02)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    server.hold.set()
    there = part.stat().st_size
    assert 0 < there < len(CONTENT)
    assert fetch(file, tmp_path).read_bytes() == CONTENT
    assert server.asked[-1] == ("/a.gz", f"bytes={there}-")


def test_the_progress_is_a_sentence_where_there_is_no_terminal(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch(server.remote("a.gz", CONTENT), tmp_path)
    assert capsys.readouterr().err == "downloading a.gz (1.0 MB)\n"


# Data sets.


def test_an_idx_set_is_downloaded_once(server: Server, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_mnist(server, monkeypatch)
    data = load("mnist", download=True, validation=10)
    assert (len(data.train), len(data.validation), len(data.test)) == (10, 10, 10)
    assert names(root / "mnist") == set(IDX)
    assert str(load("mnist", download=True, validation=10)) == str(data)
    assert len(server.asked) == 4


def test_nothing_of_a_set_is_in_place_before_all_of_it_is_there(
    server: Server, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_mnist(server, monkeypatch)
    gone = server.files.pop(f"/{IDX[3]}")
    with pytest.raises(DataError, match=f"{IDX[3]} can't be downloaded"):
        load("mnist", download=True)
    assert names(root / "mnist") == {f"{name}.part" for name in IDX[:3]}
    with pytest.raises(DataError, match=r"expected train-images-idx3-ubyte"):  # rather than a set without test images
        load("mnist")
    server.files[f"/{IDX[3]}"], server.asked = gone, []
    assert len(load("mnist", download=True, validation=10).test) == 10
    assert [path for path, _ in server.asked] == [f"/{IDX[3]}"]


def test_files_that_are_there_stay(server: Server, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_mnist(server, monkeypatch)
    (root / "mnist").mkdir(parents=True)
    test_images = small_idx_set()[IDX[2]]
    (root / "mnist" / IDX[2].removesuffix(".gz")).write_bytes(gzip.decompress(test_images))
    load("mnist", download=True, validation=10)
    assert sorted(path for path, _ in server.asked) == sorted(f"/{name}" for name in IDX if name != IDX[2])


def test_two_at_a_time_download_once(server: Server, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_mnist(server, monkeypatch)
    threads = [threading.Thread(target=downloadable_sets.download, args=("mnist", None)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(server.asked) == 4 and names(root / "mnist") == set(IDX)


def test_an_archive_is_unpacked_and_gives_away_nothing_else(
    server: Server, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def batch(rows: int) -> bytes:
        pixels = np.random.default_rng(rows).integers(256, size=(rows, 3072), dtype=np.uint8)
        return pickle.dumps({b"data": pixels, b"labels": [i % 10 for i in range(rows)]}, 2)

    meta = pickle.dumps({b"label_names": [b"class %d" % i for i in range(10)]}, 2)
    members = {f"cifar-10-batches-py/data_batch_{i}": batch(10 + i) for i in range(1, 6)}
    members |= {"cifar-10-batches-py/test_batch": batch(20), "cifar-10-batches-py/batches.meta": meta}
    archive = cifar_archive({"../../escaped": b"x", **members, "cifar-10-batches-py/readme.html": b"hello"})
    wanted = SETS["cifar10"]
    file = server.remote(wanted.files[0].name, archive)
    monkeypatch.setitem(SETS, "cifar10", RemoteSet(wanted.folder, (file,), wanted.members))
    data = load("cifar10", download=True, validation=0)
    assert (len(data.train), len(data.test), data.targets.names[3]) == (65, 20, "class 3")
    assert names(root / "cifar-10-batches-py") == set(wanted.members)
    assert not list(root.parent.rglob("escaped"))
    (root / "cifar-10-batches-py" / "data_batch_2").unlink()
    load("cifar10", download=True)
    assert len(server.asked) == 2


def test_an_archive_without_a_file_says_so(server: Server, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = server.remote("cifar.tar.gz", cifar_archive({"cifar-100-python/train": b"x"}))
    monkeypatch.setitem(SETS, "cifar100", RemoteSet("cifar-100-python", (file,), ("train", "test", "meta")))
    with pytest.raises(DataError, match=r"cifar\.tar\.gz\.part has no meta; delete it"):
        load("cifar100", download=True)
    assert names(root / "cifar-100-python") == {"cifar.tar.gz.part"}


def serve_uci(server: Server, monkeypatch: pytest.MonkeyPatch, test_rows: str = "1\n3\n") -> None:
    text = "".join(f"{i} {i * i} {3 * i}\n" for i in range(6))
    files = {"data.txt": text, "index_features.txt": "0\n1\n", "index_target.txt": "2\n"}
    files |= {"index_train_0.txt": "0\n2\n4\n5\n", "index_test_0.txt": test_rows}
    server.files |= {f"/tiny/data/{name}": content.encode() for name, content in files.items()}
    monkeypatch.setattr(downloadable_sets, "UCI", server.url())
    monkeypatch.setitem(UCI_SETS, "tiny", UciSet(6, 1))


def test_a_regression_set_with_its_splits(server: Server, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_uci(server, monkeypatch)
    data = load("uci", path="tiny", download=True, validation=0)
    assert (len(data.train), len(data.test)) == (4, 2) and names(root / "uci") == {"tiny"}
    load("uci", path="tiny", download=True, validation=0)
    assert len(server.asked) == 5


def test_splits_that_share_or_lose_rows_are_refused(
    server: Server, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_uci(server, monkeypatch, test_rows="1\n2\n")
    with pytest.raises(
        DataError, match="tiny that was downloaded is not the expected one: split 0 does not have every"
    ):
        load("uci", path="tiny", download=True)
    assert not names(root / "uci")


def test_a_recipe_can_ask_for_it(server: Server, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_mnist(server, monkeypatch)
    recipe = Recipe.of({"data": {"name": "mnist", "validation": 10}}, ["data.download=true"])
    assert len(load_data(recipe).test) == 10 and len(server.asked) == 4


# What never happens.


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(("name", "path"), [*((name, None) for name in SETS), ("uci", "yacht")])
def test_no_connection_unless_it_is_asked_for(root: Path, name: str, path: str | None) -> None:
    with pytest.raises(DataError, match="download=True"):
        load(name, path=path)
    assert not root.exists()


@pytest.mark.usefixtures("no_network")
def test_no_connection_for_what_is_there(root: Path) -> None:
    (root / "mnist").mkdir(parents=True)
    for name, content in small_idx_set().items():
        (root / "mnist" / name).write_bytes(content)
    assert len(load("mnist", download=True, validation=10).test) == 10


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "digits"}, "'digits' can't be downloaded, only mnist, .*uci; get it yourself"),
        ({"name": "mnist", "path": "mine"}, "path='mine': a download goes to the data root"),
        ({"name": "uci", "path": "yatch"}, "path='yatch': no regression set has this name; did you mean 'yacht'?"),
        ({"name": "uci", "path": "../yacht"}, "no regression set has this name"),
        ({"name": "uci"}, "path='': no regression set has this name; expected one of: bostonHousing"),
    ],
)
def test_what_cannot_be_downloaded(root: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message) if "*" not in message else message):
        load(**given, download=True)
    assert not root.exists()


def test_every_file_has_a_checksum_and_an_address_that_ends_in_its_name() -> None:
    digits = {"sha256": 64, "md5": 32}
    for name, wanted in SETS.items():
        for file in wanted.files:
            assert file.checksum is not None, name
            kind, _, value = file.checksum.partition(":")
            assert re.fullmatch(f"[0-9a-f]{{{digits[kind]}}}", value), file
            assert file.addresses and all(address.endswith(f"/{file.name}") for address in file.addresses)


@pytest.mark.parametrize("name", ["fashion-mnist", "mnist", "notmnist"])
def test_the_checksums_are_those_of_the_files_at_hand(name: str) -> None:
    folder = Path(os.environ.get("BAYESIFY_DATA", "data")) / name
    files = [file for file in SETS[name].files if (folder / file.name).is_file()]
    if not files:
        pytest.skip(f"no files of {name} in $BAYESIFY_DATA")
    for file in files:
        content = (folder / file.name).read_bytes()
        assert file.checksum is not None and file.size in (None, len(content))
        kind, _, value = file.checksum.partition(":")
        assert hashlib.new(kind, content).hexdigest() == value, file.name


@pytest.mark.parametrize("name", UCI_SETS)
def test_the_regression_sets_are_those_at_hand(name: str) -> None:
    folder = Path(os.environ.get("BAYESIFY_DATA", "data")) / "uci" / name / "data"
    if not folder.is_dir():
        pytest.skip(f"no {name} in $BAYESIFY_DATA")
    assert downloadable_sets._uci_fault(folder, UCI_SETS[name]) is None
    checksum = hashlib.sha256((folder / "data.txt").read_bytes()).hexdigest()
    assert UCI_SETS[name].checksum in (None, f"sha256:{checksum}")
