"""Download files: resumed where they broke off, checked, and in place only when they are whole."""

from __future__ import annotations

import errno
import hashlib
import http.client
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from bayesify.lab.data.errors import DataError

try:
    import fcntl
except ImportError:  # Windows has no such locks; there, two processes can download the same files at once
    fcntl = None  # type: ignore[assignment]

TRIES = 2
"""How often each address is asked; a second try goes on where the first broke off."""
TIMEOUT = 60
"""Seconds without an answer after which a connection is given up."""
CHUNK = 1 << 18
MOST_BYTES = 10**9
"""The most bytes of a file whose size is not known."""
ELSEWHERE = "make room there, or set BAYESIFY_DATA to a folder that can be written to and has room"


@dataclass(frozen=True)
class RemoteFile:
    """A file and where it is to be had.

    Attributes:
        name: Its name on the disk.
        addresses: Its URLs, tried in order.
        size: Its bytes, or None if they are not known.
        checksum: The name of a hash and its value, such as `sha256:6d95…`, or None if none was published.
    """

    name: str
    addresses: tuple[str, ...]
    size: int | None = None
    checksum: str | None = None


def fetch(file: RemoteFile, folder: Path) -> Path:
    """Download a file, unless it was before, and leave it under the name with `.part` that it has until all are there.

    Args:
        file: The file.
        folder: Where to.

    Returns:
        The path with `.part`.

    Raises:
        DataError: If no address has the file, what came is another one, or it can't be written. The bytes of a download
            that broke off are kept, and the next call continues from them.
    """
    part = folder / f"{file.name}.part"
    if part.is_file() and part.stat().st_size == file.size and file.checksum and _fault(part, file) is None:
        return part
    problems = []
    for address in [address for address in file.addresses for _ in range(TRIES)]:
        problem = _try(address, file, part)
        if problem is None:
            return part
        problems.append(f"{address}: {problem}")
    raise DataError(
        f"{file.name} can't be downloaded: {'; '.join(dict.fromkeys(problems))}. Try again later, which continues from "
        f"what is there, or put the file into {folder} yourself"
    )


def _try(address: str, file: RemoteFile, part: Path) -> str | None:
    """Download from one address; returns what went wrong, if anything."""
    try:
        expected = _receive(address, file, part)
    except (OSError, http.client.HTTPException) as error:  # of the connection: those of the disk are DataErrors
        return str(error) or type(error).__name__
    found = part.stat().st_size
    if expected is not None and found < expected:
        return f"the connection ended after {found:,} of {expected:,} bytes"
    fault = _fault(part, file)
    if fault is not None:
        part.unlink()  # otherwise the next try would continue from it
    return fault


def _fault(part: Path, file: RemoteFile) -> str | None:
    """How a downloaded file differs from the expected one, or None."""
    found = part.stat().st_size
    if file.size is not None and found != file.size:
        return f"it has {found:,} bytes; expected {file.size:,}"
    if file.checksum is None:
        return None
    kind, _, value = file.checksum.partition(":")
    with part.open("rb") as opened:
        digest = hashlib.file_digest(opened, kind).hexdigest()
    return None if digest == value else f"its {kind} is {digest}; expected {value}"


def _receive(address: str, file: RemoteFile, part: Path) -> int | None:
    """Write what an address sends behind what is there already; returns how many bytes there should then be."""
    have = part.stat().st_size if part.is_file() else 0
    if file.size is not None and have >= file.size:
        part.unlink()
        have = 0
    headers = {"User-Agent": f"bayesify/{version('bayesify')}"} | ({"Range": f"bytes={have}-"} if have else {})
    with urlopen(Request(address, headers=headers), timeout=TIMEOUT) as answer:
        continues = answer.status == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        have = have if continues else 0
        length = answer.headers.get("Content-Length", "")
        total = have + int(length) if length.isdecimal() else file.size
        most = MOST_BYTES if file.size is None else file.size
        if total is not None and total > most:
            raise URLError(f"it would send {total:,} bytes; expected {most:,}")
        _require_space(part.parent, (total or 0) - have)
        with _line(file.name, total, have) as line:
            _write(answer, part, "ab" if continues else "wb", most - have, line)
    return total


def _write(answer: http.client.HTTPResponse, part: Path, mode: str, most: int, line: Progress) -> None:
    """Write an answer to a file, up to one chunk more than `most` bytes."""
    with _disk_errors(part):
        opened = part.open(mode)
    with opened:
        while most >= 0 and (chunk := answer.read(CHUNK)):
            with _disk_errors(part):
                opened.write(chunk)
                opened.flush()
            most -= len(chunk)
            line.advance(line.task_ids[0], len(chunk))


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Name the file that can't be written, and how to go on."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            path.unlink(missing_ok=True)  # a full disk troubles others too
        raise DataError(f"{path}: {error.strerror}; {ELSEWHERE}") from error


def _require_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(f"{folder} has {free:,} bytes free, but the download needs {needed:,}; {ELSEWHERE}")


@contextmanager
def _line(name: str, total: int | None, done: int) -> Iterator[Progress]:
    """A line on stderr: a bar on a terminal, elsewhere a sentence."""
    console = Console(stderr=True)
    if not console.is_terminal:
        print(f"downloading {name}" + (f" ({total / 1e6:.1f} MB)" if total else ""), file=sys.stderr)
    parts = (TextColumn("downloading {task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*parts, console=console, disable=not console.is_terminal) as line:
        line.add_task(name, total=total, completed=done)
        yield line


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Let one process at a time download into a folder, and make the folder; others wait, and then find the files."""
    with _disk_errors(folder / ".download"):
        folder.mkdir(parents=True, exist_ok=True)
        opened = (folder / ".download").open("a")
    with opened:
        if fcntl is not None:
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def put_in_place(parts: list[Path]) -> None:
    """Give files without `.part` in their names, all of them right after each other."""
    for part in parts:
        os.replace(part, part.with_suffix(""))
