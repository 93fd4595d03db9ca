"""Read the plain values in a pickle without Python's `pickle`: nothing is imported, called or constructed from it.

A pickle is a program for a stack machine. `read_plain_pickle` knows the instructions that files of arrays, bytes,
words, numbers, lists, tuples and dictionaries have, such as CIFAR's of Python 2 and 3. The calls that rebuild a NumPy
array are recognised by name, and the array is made from its bytes, once their number has been compared with its type
and shape.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bayesify.lab.data.errors import DataError

NUMBER_TYPE = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248])")
"""The types of arrays that are read: booleans, integers and floats."""
MOST_DIMENSIONS = 8


class _Malformed(Exception):
    """Instructions that no pickle of plain values has."""


@dataclass(frozen=True)
class _Name:
    """The name of something that a pickle would import."""

    module: str
    name: str


class _Array:
    """An array that a later instruction fills."""

    value: np.ndarray | None = None


class _Type:
    """The type of an array's numbers, such as "u1"; a later instruction may set its byte order."""

    def __init__(self, code: str) -> None:
        self.code = code


def read_plain_pickle(path: Path) -> Any:
    """The value in a pickle of plain values.

    Args:
        path: The file.

    Returns:
        Dictionaries, lists, tuples, words, bytes, numbers and arrays of numbers.

    Raises:
        DataError: If the file has anything else, or is damaged.
    """
    try:
        return _plain(_Machine(path.read_bytes()).run())
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    except (_Malformed, struct.error, LookupError, ValueError, TypeError, OverflowError, MemoryError) as error:
        raise DataError(
            f"{path} can't be read ({type(error).__name__}: {error}); it is truncated or not a pickle of plain values: "
            "download it again"
        ) from error


class _Machine:
    """The stack, the marks in it, and the values that instructions refer to by number."""

    def __init__(self, content: bytes) -> None:
        self.content, self.position = content, 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.budget = 4 * len(content) + 1_000_000

    def run(self) -> Any:
        while True:
            code = self.take(1)
            if code == b".":
                return self.stack.pop()
            if code not in INSTRUCTIONS:
                raise _Malformed(f"instruction {code!r} at byte {self.position - 1}")
            INSTRUCTIONS[code](self)

    # Reading the program.

    def take(self, count: int) -> bytes:
        taken = self.content[self.position : self.position + count]
        if len(taken) != count:
            raise _Malformed(f"{count} bytes expected at byte {self.position} of {len(self.content)}")
        self.position += count
        return taken

    def number(self, kind: str) -> int:
        value: int = struct.unpack(kind, self.take(struct.calcsize(kind)))[0]
        return value

    def line(self) -> str:
        end = self.content.index(b"\n", self.position)
        text = self.content[self.position : end].decode("ascii")
        self.position = end + 1
        return text

    # The stack.

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def since_mark(self) -> list[Any]:
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def pop(self, count: int) -> list[Any]:
        if len(self.stack) < count + (self.marks[-1] if self.marks else 0):
            raise _Malformed(f"{count} values expected on the stack at byte {self.position}")
        values = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return values

    def remember(self, place: int) -> None:
        self.memo[place] = self.stack[-1]

    # Lists and dictionaries.

    def append(self, values: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise _Malformed(f"values appended to a {type(self.stack[-1]).__name__}")
        self.stack[-1].extend(values)

    def set_items(self, values: list[Any]) -> None:
        if not isinstance(self.stack[-1], dict) or len(values) % 2:
            raise _Malformed(f"items set in a {type(self.stack[-1]).__name__}")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, (str, bytes, int)):
                raise _Malformed(f"a key of type {type(key).__name__}")
            self.stack[-1][key] = value

    # The calls that rebuild an array.

    def spend(self, values: tuple[Any, ...]) -> None:
        """Raise if calls are given more text and bytes in all than they are in a file of arrays; they may copy them."""
        self.budget -= sum(len(value) for value in values if isinstance(value, (str, bytes)))
        if self.budget < 0:
            raise _Malformed("calls that copy the same values again and again")

    def find(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise _Malformed("the name of a function that is no word")
        if (module, name) not in CALLS:
            raise DataError(f"the pickle asks for {module}.{name}, which could run code; only plain arrays are allowed")
        self.push(_Name(module, name))

    def call(self) -> None:
        name, arguments = self.pop(2)
        if not isinstance(name, _Name) or not isinstance(arguments, tuple):
            raise _Malformed("a call of something that is not a function")
        self.spend(arguments)
        self.push(CALLS[name.module, name.name](*arguments))

    def build(self) -> None:
        """Fill an array, or set the byte order of a type."""
        thing, state = self.pop(2)
        self.spend(state if isinstance(state, tuple) else ())
        if isinstance(thing, _Array) and isinstance(state, tuple) and len(state) == 5:
            _, shape, kind, is_fortran, content = state
            thing.value = _filled(content, kind, shape, "F" if is_fortran else "C")
        elif isinstance(thing, _Type) and isinstance(state, tuple) and len(state) >= 2:
            thing.code = _text(state[1]) + thing.code[-2:]
        else:
            raise _Malformed("a state for something that is neither an array nor its type")
        self.push(thing)


def _text(value: Any) -> str:
    """Words, which Python 2 writes as bytes."""
    text = value.decode("latin1") if isinstance(value, bytes) else value
    if not isinstance(text, str):
        raise _Malformed(f"a {type(value).__name__} where words were expected")
    return text


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """How Python 3 writes bytes for Python 2."""
    if _text(encoding) not in ("latin1", "latin-1"):
        raise DataError("the pickle asks for an encoding other than latin1")
    return _text(text).encode("latin1")


def _type(code: Any, *_: Any) -> _Type:
    return _Type(_text(code))


def _filled(content: Any, kind: Any, shape: Any, order: Any = "C") -> np.ndarray:
    """The array that these bytes hold."""
    if not isinstance(kind, _Type) or not NUMBER_TYPE.fullmatch(kind.code):
        raise DataError("the pickle has an array of something other than numbers")
    sizes = (shape,) if isinstance(shape, int) else shape
    if not isinstance(sizes, tuple) or len(sizes) > MOST_DIMENSIONS:
        raise _Malformed("an array without a shape")
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise _Malformed("an array with a negative size, or one that is no integer")
    dtype, data = np.dtype(kind.code), _encode(content) if isinstance(content, str) else content
    if not isinstance(data, bytes) or len(data) != math.prod(sizes) * dtype.itemsize:
        found = f"{len(data)} bytes" if isinstance(data, bytes) else f"a {type(data).__name__}"
        raise _Malformed(f"an array of {dtype} with shape {sizes} from {found}")
    flat = np.frombuffer(data, dtype)
    return flat.reshape(sizes, order="F" if order in ("F", b"F") else "C")


def _scalar(kind: Any, content: Any) -> Any:
    return _filled(content, kind, ()).item()


CALLS: dict[tuple[str, str], Callable[..., Any]] = {
    ("_codecs", "encode"): _encode,
    ("numpy", "dtype"): _type,
    ("numpy", "ndarray"): lambda *_: _Array(),  # named as an argument of _reconstruct
}
for _package in ("numpy.core", "numpy._core"):  # NumPy 2 renamed it
    CALLS[f"{_package}.multiarray", "_reconstruct"] = lambda *_: _Array()
    CALLS[f"{_package}.multiarray", "scalar"] = _scalar
    CALLS[f"{_package}.numeric", "_frombuffer"] = _filled


def _long(machine: _Machine) -> int:
    return int.from_bytes(machine.take(machine.number("<B")), "little", signed=True)


def _string(machine: _Machine, kind: str) -> bytes:
    return machine.take(machine.number(kind))


def _words(machine: _Machine, kind: str) -> str:
    return _string(machine, kind).decode("utf-8", "surrogatepass")


INSTRUCTIONS: dict[bytes, Callable[[_Machine], Any]] = {
    b"\x80": lambda m: m.take(1),  # the protocol
    b"\x95": lambda m: m.take(8),  # the length of a frame
    b"(": lambda m: m.marks.append(len(m.stack)),
    b"0": lambda m: m.pop(1),
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),
    b"\x89": lambda m: m.push(False),
    b"K": lambda m: m.push(m.number("<B")),
    b"M": lambda m: m.push(m.number("<H")),
    b"J": lambda m: m.push(m.number("<i")),
    b"\x8a": lambda m: m.push(_long(m)),
    b"G": lambda m: m.push(m.number(">d")),
    b"U": lambda m: m.push(_string(m, "<B")),
    b"T": lambda m: m.push(_string(m, "<I")),
    b"C": lambda m: m.push(_string(m, "<B")),
    b"B": lambda m: m.push(_string(m, "<I")),
    b"\x8e": lambda m: m.push(_string(m, "<Q")),
    b"\x96": lambda m: m.push(_string(m, "<Q")),
    b"\x8c": lambda m: m.push(_words(m, "<B")),
    b"X": lambda m: m.push(_words(m, "<I")),
    b"\x8d": lambda m: m.push(_words(m, "<Q")),
    b"]": lambda m: m.push([]),
    b"a": lambda m: m.append(m.pop(1)),
    b"e": lambda m: m.append(m.since_mark()),
    b"}": lambda m: m.push({}),
    b"s": lambda m: m.set_items(m.pop(2)),
    b"u": lambda m: m.set_items(m.since_mark()),
    b")": lambda m: m.push(()),
    b"\x85": lambda m: m.push(tuple(m.pop(1))),
    b"\x86": lambda m: m.push(tuple(m.pop(2))),
    b"\x87": lambda m: m.push(tuple(m.pop(3))),
    b"t": lambda m: m.push(tuple(m.since_mark())),
    b"q": lambda m: m.remember(m.number("<B")),
    b"r": lambda m: m.remember(m.number("<I")),
    b"\x94": lambda m: m.remember(len(m.memo)),
    b"h": lambda m: m.push(m.memo[m.number("<B")]),
    b"j": lambda m: m.push(m.memo[m.number("<I")]),
    b"c": lambda m: m.find(m.line(), m.line()),
    b"\x93": lambda m: m.find(*m.pop(2)),
    b"R": lambda m: m.call(),
    b"b": lambda m: m.build(),
}
"""What each instruction does; those that are missing are never in files of plain values."""


def _plain(value: Any) -> Any:
    """A value with the arrays in the dictionary at its top, which is all that data files have."""
    if isinstance(value, dict):
        return {key: _unwrapped(each) for key, each in value.items()}
    return _unwrapped(value)


def _unwrapped(value: Any) -> Any:
    if isinstance(value, _Array):
        if value.value is None:
            raise _Malformed("an array without values")
        return value.value
    return value
