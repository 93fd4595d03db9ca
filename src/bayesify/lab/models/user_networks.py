"""Build the user's own networks: functions in a module or in a file."""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from bayesify.lab.models.errors import ModelError, suggestion
from bayesify.lab.models.registry import check_options, options_of


def is_user_network(name: str) -> bool:
    """Whether a name refers to a user's own function.

    >>> [is_user_network(name) for name in ("python:nets:make", "nets/small.py:make", "timm:resnet18")]
    [True, True, False]
    """
    return name.startswith("python:") or name.endswith(".py") or ".py:" in name


def build_user_network(name: str, options: Mapping[str, Any], pretrained: bool = False) -> nn.Module:
    """Call a user's own function with the options.

    >>> build_user_network("python:torch.nn:Linear", {"in_features": 4, "out_features": 3})
    Linear(in_features=4, out_features=3, bias=True)
    """
    where, _, attribute = name.removeprefix("python:").rpartition(":")
    if not where or not attribute or attribute.endswith(".py"):
        raise ModelError(
            f"{name!r} is not a function; expected python:package.module:function or path/to/file.py:function"
        )
    module = _from_file(Path(where)) if where.endswith(".py") else _import(where)
    function = getattr(module, attribute, None)
    if not callable(function):
        names = [known for known, value in vars(module).items() if callable(value) and not known.startswith("_")]
        raise ModelError(f"{where} has no function {attribute!r}{suggestion(attribute, names)}")
    if pretrained:
        options = {**options, "pretrained": True}
    _check_arguments(name, function, options)
    model = function(**options)
    if not isinstance(model, nn.Module):
        raise ModelError(f"{name} must return a torch.nn.Module, not {type(model).__name__}")
    return model


def _check_arguments(name: str, function: Any, options: Mapping[str, Any]) -> None:
    """Raise for wrong options before the call, so that errors inside the function pass through unchanged."""
    try:
        parameters = options_of(function, given=())
    except ValueError:  # some built-in callables have no signature
        return
    check_options(name, function, options, given=())
    named = [each for each in parameters.values() if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    missing = [each.name for each in named if each.default is each.empty and each.name not in options]
    if missing:
        raise ModelError(f"{name} needs the option{'s' * (len(missing) > 1)} {', '.join(missing)}")


def _import(module: str) -> ModuleType:
    _importable(Path.cwd())
    importlib.invalidate_caches()  # the file may be new
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists, but something that it imports does not
        raise ModelError(f"no module {module!r} on Python's path or in {Path.cwd()}") from error


def _from_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise ModelError(f"{path}: no such file")
    # One module per source, so that networks of several calls share their classes and can be pickled.
    digest = hashlib.sha256(str(path).encode() + path.read_bytes()).hexdigest()[:12]
    name = f"{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # it ends in .py
    _importable(path.parent)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _importable(folder: Path) -> None:
    """Add a folder to the end of the import path, so that it never hides an installed module."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
