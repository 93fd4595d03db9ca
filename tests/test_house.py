"""The rules of the house: public names, the direction of imports, what an import costs, sizes of files."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

import bayesify as by

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "bayesify"
MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts): path
    for path in sorted(SOURCE.rglob("*.py"))
    if path != SOURCE / "__init__.py"
}
ORDER: list[set[str]] = [
    {"errors"},
    {"tensor_files"},
    {"batches"},
    {"methods"},
    {"layers"},
    {"conversion"},
    {"prediction"},
    {"training"},
    {"files"},
    {"familiarity"},
    {"integrations"},
    {"sklearn"},
    {"bayesify"},
    {"lab"},
    {"cli"},
    {"__main__"},
]
"""A part imports only from parts to the left of its own (or from itself); `bayesify` is the public names."""
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}
CORE = [name for name in MODULES if RANK[name.split(".")[0]] <= RANK["sklearn"]]
MOST_LINES = 400
PRIVATE = ("torch._C", "_functorch", "forward_ad._", "torch.utils._py", "torch._foreach")
"""Interfaces of torch that may change without a word."""

DESIGNED = {
    *("convert", "check", "summary", "revert", "kl", "elbo", "add_kl_grad_", "parameter_groups", "predict", "draw"),
    *("members", "save", "load", "export", "Rank1", "IBNN", "EMP", "ECMP", "MeanField", "LowRankEnsemble"),
    *("BatchEnsemble", "MCDropout", "DropConnect", "Ensemble"),
}
"""The names that DESIGN.md promises."""


def imported_parts(module: str, path: Path) -> set[str]:
    """The parts of bayesify (files and packages at its top) that a module imports, wherever in it."""
    package = ["bayesify", *module.split(".")[:-1]]
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{origin}.{alias.name}" for alias in node.names}
    inside = [name.split(".") for name in names if name.split(".")[0] == "bayesify"]
    return {parts[1] if len(parts) > 1 else "bayesify" for parts in inside}


def run_python(code: str) -> str:
    """What a new interpreter prints for `code`; bytecode may be kept, as an installed package's is."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return done.stdout.strip()


# Names.


def test_all_is_exactly_the_public_names() -> None:
    ours = {
        name
        for name, value in vars(by).items()
        if not name.startswith("_")
        and not inspect.ismodule(value)
        and str(getattr(value, "__module__", "")).startswith("bayesify")
    }
    assert set(by.__all__) == ours and len(by.__all__) == len(set(by.__all__))


def test_all_is_sorted_as_ruff_wants() -> None:
    """Constants, then classes, then functions, each by name."""
    order = sorted(by.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    assert by.__all__ == order


def test_the_names_of_the_design_are_there() -> None:
    assert set(by.__all__) >= DESIGNED


def test_every_public_name_has_a_docstring() -> None:
    for name in by.__all__:
        text = vars(getattr(by, name)).get("__doc__") or getattr(by, name).__doc__ or ""
        assert len(text.split()) >= 4 and not text.startswith(f"{name}("), name  # what a dataclass writes by itself


# Imports.


def test_every_module_has_its_place_in_the_order() -> None:
    assert {name.split(".")[0] for name in MODULES} <= set(RANK)


def test_imports_point_one_way() -> None:
    wrong = []
    for module, path in MODULES.items():
        own = module.split(".")[0]
        found = imported_parts(module, path) - {own}
        wrong += [f"{module} imports {part}" for part in sorted(found) if RANK.get(part, len(ORDER)) >= RANK[own]]
    assert not wrong


def test_the_import_checker_sees_every_form(tmp_path: Path) -> None:
    file = tmp_path / "base.py"
    file.write_text(
        "from ..methods.rank1 import Rank1\nfrom .. import objective\nimport bayesify.lab.models\n"
        "import torch\ndef f():\n    from bayesify import cli\n    from .scope import Scope\n"
    )
    assert imported_parts("layers.base", file) == {"methods", "objective", "lab", "cli", "layers"}


def test_layers_know_what_a_method_is_and_none_of_them() -> None:
    for module in CORE:
        tree = ast.parse(MODULES[module].read_text())
        sources = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
        if module.startswith("layers"):
            methods = {name for name in sources if name.startswith("bayesify.methods")}
            assert methods <= {"bayesify.methods.base", "bayesify.methods.draw_design"}, module
        if module.startswith("methods"):
            assert not any(name.startswith("bayesify.layers") for name in sources), module


def test_the_core_does_not_import_the_lab() -> None:
    code = "import bayesify, sys; print([m for m in sys.modules if m.startswith(('bayesify.lab', 'bayesify.cli'))])"
    assert run_python(code) == "[]"


def test_the_core_imports_torch_safetensors_and_numpy_alone() -> None:
    show = "import sys; print(*sorted({name.split('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)))"
    plain = set(run_python(f"import torch, safetensors.torch; {show}").split())
    ours = set(run_python(f"import bayesify; {show}").split())
    assert "bayesify" in ours and ours - plain <= {"bayesify", "numpy"}


def test_import_takes_at_most_a_tenth_longer_than_torch() -> None:
    code = (  # without garbage collection, which looks through all of torch's objects at some point of either import
        "import gc; gc.disable(); from time import perf_counter as t; "
        "a = t(); import torch; b = t(); import bayesify; print(b - a, t() - b)"
    )
    tries = [tuple(map(float, run_python(code).split())) for _ in range(5)]
    torchs, ours = (min(times) for times in zip(*tries, strict=True))
    assert ours <= 0.1 * torchs, f"import bayesify took {torchs + ours:.3f} s, import torch {torchs:.3f} s"


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "zoo"])
def test_what_scripts_import_from_bayesify_is_there(folder: str) -> None:
    """The zoo runs in an environment of its own, so that no other test would notice."""
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "bayesify":
                module = importlib.import_module(node.module)
                for name in (alias.name for alias in node.names):
                    found = hasattr(module, name) or importlib.util.find_spec(f"{node.module}.{name}")
                    assert found, f"{path.name}: {node.module} has no {name}"


# Classes and files.


def levels(kind: type) -> int:
    """The longest chain of classes of ours that a class is the end of."""
    ours = kind.__module__.split(".")[0] == "bayesify"
    return ours + max(map(levels, kind.__bases__), default=0)


def test_no_class_inherits_through_more_than_three_levels() -> None:
    deep = {}
    for module in CORE:
        found = importlib.import_module(f"bayesify.{module.removesuffix('.__init__')}")
        kinds = [kind for kind in vars(found).values() if isinstance(kind, type) and kind.__module__ == found.__name__]
        deep |= {f"{module}.{kind.__name__}": levels(kind) for kind in kinds if levels(kind) > 3}
    assert not deep


def test_levels_are_counted_along_the_longest_chain() -> None:
    class Ours(by.EMP):
        pass

    Ours.__module__ = "bayesify.test"
    assert (levels(object), levels(by.methods.Method), levels(by.EMP), levels(Ours)) == (0, 1, 2, 3)


def test_the_core_uses_no_private_interface_of_torch() -> None:
    uses = [
        f"{module}:{number}: {line.strip()}"
        for module in CORE
        for number, line in enumerate(MODULES[module].read_text().splitlines(), 1)
        if any(name in line for name in PRIVATE)
    ]
    assert not uses


def test_no_file_is_too_long() -> None:
    lines = {module: len(path.read_text().splitlines()) for module, path in MODULES.items()}
    assert {module: count for module, count in lines.items() if count > MOST_LINES} == {}


def test_the_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert by.__version__ == version("bayesify") == project["version"]
    assert f"\nversion: {project['version']}\n" in (ROOT / "CITATION.cff").read_text()
