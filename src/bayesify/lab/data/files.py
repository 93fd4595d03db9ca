"""Find data sets on disk, and read arrays from idx, .npz and .npy files, never from pickles."""

from __future__ import annotations

import gzip
import lzma
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import IO, BinaryIO

import numpy as np

from bayesify.lab.data.errors import DataError, list_some, suggest

ROOT = "BAYESIFY_DATA"
"""The environment variable with the folder of all data sets."""
IDX_TYPES = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
INPUT_KEYS = ("x", "X", "images", "data", "inputs", "features")
TARGET_KEYS = ("y", "Y", "labels", "targets", "target", "label", "masks", "mask")
STATIC_KEYS = ("static",)
MOST_COMPRESSION = 1100
"""No file is compressed by more than this factor, which is that of zeros."""
MOST_UNPACKED = 8 * 10**9
"""The most bytes that a compressed file may unpack to."""
MOST_DIMENSIONS = 8
ARRAY_ERRORS = (
    *(ValueError, TypeError, LookupError, SyntaxError, OSError, EOFError, MemoryError, OverflowError),
    *(RuntimeError, zipfile.BadZipFile, zlib.error, lzma.LZMAError),  # RuntimeError: encrypted, or unknown compression
)
"""What NumPy and zipfile raise for files that are no arrays."""


def existing_path(path: str | Path) -> Path:
    """A path with `~` expanded; raises if nothing is there, listing what is."""
    found = Path(path).expanduser()
    if found.exists():
        return found
    parent = next((folder for folder in found.absolute().parents if folder.is_dir()), Path("/"))
    there = [entry.name for entry in sorted(parent.iterdir())]
    raise DataError(
        f"{found} doesn't exist; {parent} has {list_some(there) or 'nothing'}: {suggest(found.name, there)}"
    )


def required_path(path: str | Path | None, name: str, what: str) -> Path:
    """The path that a loader needs; raises if it is None or nothing is there."""
    if path is None:
        raise DataError(f"the data set {name!r} needs path=…: {what}")
    return existing_path(path)


def data_roots() -> list[Path]:
    """Where known data sets are: $BAYESIFY_DATA, else ./data or ../shared/data."""
    given = os.environ.get(ROOT)
    return [Path(given).expanduser()] if given else [Path("data"), Path("../shared/data")]


def dataset_folder(path: str | Path | None, folder: str, *, remote: bool = False) -> Path:
    """The given path, or the folder of a known set in a data root; `remote` sets could be downloaded."""
    if path is not None:
        return existing_path(path)
    roots = data_roots()
    found = next((root / folder for root in roots if (root / folder).is_dir()), None)
    if found is None:
        raise DataError(
            f"no folder {folder} in {' or '.join(str(root.absolute()) for root in roots)}; put it there, set {ROOT} to "
            "the folder that has it, or give path=…" + (", or download it with download=True" if remote else "")
        )
    return found


def is_idx(path: Path) -> bool:
    """Whether a file has the name of an idx file.

    >>> is_idx(Path("t10k-images-idx3-ubyte.gz")), is_idx(Path("photo.png"))
    (True, False)
    """
    return "ubyte" in path.name and "idx" in path.name


def read_idx(path: Path) -> np.ndarray:
    """Read an idx file: two zero bytes, the type, the number of dimensions, their sizes, the values."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return _idx_array(file, path)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path} can't be decompressed ({error}); it is truncated or corrupt: download it again"
        ) from error


def _idx_array(file: BinaryIO | gzip.GzipFile, path: Path) -> np.ndarray:
    start = file.read(4)
    kind, dims = (start[2], start[3]) if len(start) == 4 else (0, 0)
    if start[:2] != b"\0\0" or kind not in IDX_TYPES or not 0 < dims <= MOST_DIMENSIONS:
        raise DataError(
            f"{path} starts with the bytes {start.hex(' ') or '(none)'}; an idx file of images starts with "
            "00 00 08 03, of labels with 00 00 08 01: is this another format, or compressed without the ending .gz?"
        )
    sizes = file.read(4 * dims)
    shape = struct.unpack(f">{dims}I", sizes) if len(sizes) == 4 * dims else (0,)
    dtype = np.dtype(IDX_TYPES[kind])
    expected, stored = math.prod(shape) * dtype.itemsize, path.stat().st_size
    most = min(MOST_UNPACKED, stored * MOST_COMPRESSION) if path.suffix == ".gz" else stored
    if expected > most:
        raise DataError(
            f"{path} has {stored} bytes, but its header with shape {shape} says {expected}, more than it can hold; "
            "it is truncated or corrupt: download it again"
        )
    content = file.read(expected + 1)
    if len(content) != expected or 0 in shape:
        first, more = 4 + len(sizes), "more than " * (len(content) > expected)
        raise DataError(
            f"{path} has {more}{first + min(len(content), expected)} bytes, but its header with shape {shape} says "
            f"{first + expected}; it is truncated, corrupt or empty: download it again"
        )
    return np.frombuffer(content, dtype).reshape(shape).astype(dtype.newbyteorder("="))  # writable, as torch needs


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Read all arrays of an .npz file, or that of an .npy file as `x`; raises for pickled objects."""
    try:
        with path.open("rb") as file:  # NumPy leaves a broken file open
            _check_sizes(file)
            loaded = np.load(file, allow_pickle=False)
            return {"x": loaded} if isinstance(loaded, np.ndarray) else {key: loaded[key] for key in loaded.files}
    except ARRAY_ERRORS as error:
        raise DataError(
            f"{path} can't be read as NumPy arrays ({error}); it is corrupt, or holds pickled Python objects, "
            "which aren't loaded for safety: save plain arrays with numpy.savez"
        ) from error


def _check_sizes(file: IO[bytes]) -> None:
    """Raise if an array's header tells of another number of bytes than there are: NumPy would allocate that many."""
    if not zipfile.is_zipfile(file):
        file.seek(0)
        _check_size(file, os.fstat(file.fileno()).st_size)
    else:
        with zipfile.ZipFile(file) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
            if unpacked > max(MOST_UNPACKED, os.fstat(file.fileno()).st_size):
                raise ValueError(f"it unpacks to {unpacked} bytes; expected at most {MOST_UNPACKED} if compressed")
            for entry in archive.infolist():
                if entry.file_size > MOST_COMPRESSION * max(entry.compress_size, 1):
                    raise ValueError(f"{entry.filename} of {entry.compress_size} bytes unpacks to {entry.file_size}")
                with archive.open(entry) as inside:
                    _check_size(inside, entry.file_size)
    file.seek(0)


def _check_size(file: IO[bytes], size: int) -> None:
    version = np.lib.format.read_magic(file)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read_header(file)
    if dtype.hasobject:
        raise ValueError("Object arrays cannot be loaded")
    if not dtype.itemsize or any(type(length) is not int or length < 0 for length in shape):
        raise ValueError(f"an array of {dtype} with shape {shape}")
    expected = file.tell() + math.prod(shape) * dtype.itemsize
    if expected != size:
        raise ValueError(f"an array of {dtype} with shape {shape} needs {expected} bytes, but there are {size}")


def pick(keys: Collection[str], given: str | None, usual: Collection[str], what: str, path: Path) -> str:
    """The key that was given, or the only usual key that the file has."""
    if given is not None:
        if given not in keys:
            raise DataError(f"{path} has no array {given!r}: {suggest(given, keys)}")
        return given
    found = [key for key in usual if key in keys]
    if len(found) != 1:
        raise DataError(
            f"{path} has the arrays {list_some(keys)}; expected exactly one of {', '.join(usual)} for the {what}"
        )
    return found[0]


def input_array(path: Path) -> np.ndarray:
    """Read the inputs in an idx, .npz or .npy file."""
    if is_idx(path):
        return read_idx(path)
    arrays = read_npz(path)
    return arrays[pick(arrays, None, INPUT_KEYS, "inputs", path)]
