"""Build the user's own networks: functions and classes of a Python file that the user trusts by name."""

import hashlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from bayesify.lab.models.errors import ModelError, suggestion
from bayesify.lab.models.registry import check_options, options_of


def is_user_network(name: str) -> bool:
    """Whether a name refers to a user's own function.

    >>> [is_user_network(name) for name in ("nets/small.py:make", "python:nets:make", "timm:resnet18")]
    [True, True, False]
    """
    return name.startswith("python:") or name.endswith(".py") or ".py:" in name


def build_user_network(
    name: str, options: Mapping[str, Any], pretrained: bool = False, *, trust: str | Path | None = None
) -> nn.Module:
    """Call a function, or create an object of a class, that a trusted file defines.

    Args:
        name: The file and the function, such as `nets/small.py:make`.
        options: The arguments of the function.
        pretrained: Whether to add the argument `pretrained=True`.
        trust: The file that the user trusts. Its name must be that of the file in `name`. It is the file that runs, so
            that a run still loads after it was moved, and a recipe can't choose what runs.

    Returns:
        The network.

    Raises:
        ModelError: If the file is not the trusted one, does not define the function, or the options don't fit.
    """
    where, function_name = _split(name)
    file = _trusted_file(name, where, trust)
    with _importable(file.parent):
        function = _defined(_load(file), file, function_name)
        if pretrained:
            options = {**options, "pretrained": True}
        _check_arguments(name, function, options)
        model = function(**options)
    if not isinstance(model, nn.Module):
        raise ModelError(f"{name} must return a torch.nn.Module, not {type(model).__name__}")
    return model


def _split(name: str) -> tuple[str, str]:
    """The file and the function that a name consists of."""
    where, _, function_name = name.rpartition(":")
    if name.startswith("python:") and not where.endswith(".py"):
        raise ModelError(
            f"{name!r}: networks are not imported by the name of a module, because a recipe could then run any code; "
            "write a function that returns the network into a file, such as networks.py, and use networks.py:function "
            "with --trust networks.py"
        )
    if not where.endswith(".py") or not function_name.isidentifier():
        raise ModelError(f"{name!r} is not a function; expected path/to/file.py:function")
    if function_name.startswith("_"):
        raise ModelError(f"{name!r}: names that begin with _ are private to their file; name another of its functions")
    return where.removeprefix("python:"), function_name


def _trusted_file(name: str, where: str, trust: str | Path | None) -> Path:
    """The file that the user trusts, if the network is in a file of this name."""
    if trust is None:
        raise ModelError(
            f"{name}: this network is code in a file, which runs only if you trust it. Read {where}; then add --trust "
            f"{where}, or in Python trust={where!r} for lab.Run or lab.Recipe.read"
        )
    file = Path(trust).expanduser().resolve()
    if file.suffix != ".py" or not file.is_file():
        raise ModelError(f"trust={str(trust)!r}: {'no such file' if file.suffix == '.py' else 'expected a .py file'}")
    if file.name != Path(where).name:
        raise ModelError(f"{name}: this network is in {Path(where).name}, but the file that you trust is {file}")
    return file


def _load(file: Path) -> ModuleType:
    """Execute a file as a module."""
    # One module per source, so that networks of several calls share their classes and can be pickled.
    digest = hashlib.sha256(str(file).encode() + file.read_bytes()).hexdigest()[:12]
    name = f"{file.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # it ends in .py
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _defined(module: ModuleType, file: Path, name: str) -> Any:
    """A function, or a class of networks, that the file itself defines."""
    found = getattr(module, name, None)
    if _is_own(found, module):
        return found
    if callable(found) and not isinstance(found, nn.Module):
        raise ModelError(
            f"{file}: {name} is not a function or a subclass of torch.nn.Module that this file itself defines; write a "
            "function in it that returns the network"
        )
    names = [known for known, value in vars(module).items() if _is_own(value, module) and not known.startswith("_")]
    raise ModelError(f"{file} has no function {name!r}{suggestion(name, names)}")


def _is_own(value: Any, module: ModuleType) -> bool:
    is_network = isinstance(value, type) and issubclass(value, nn.Module)
    return (is_network or isinstance(value, FunctionType)) and value.__module__ == module.__name__


def _check_arguments(name: str, function: Any, options: Mapping[str, Any]) -> None:
    """Raise for wrong options before the call, so that errors inside the function pass through unchanged."""
    parameters = options_of(function, given=())
    check_options(name, function, options, given=())
    named = [each for each in parameters.values() if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    missing = [each.name for each in named if each.default is each.empty and each.name not in options]
    if missing:
        raise ModelError(f"{name} needs the option{'s' * (len(missing) > 1)} {', '.join(missing)}")


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Let a trusted file import its neighbours, but nothing else that is imported later."""
    sys.path.append(str(folder))  # at the end, so that it never hides an installed module
    try:
        yield
    finally:
        sys.path.remove(str(folder))
