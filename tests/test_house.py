"""The rules of the house: public names, the direction of imports, what an import costs, sizes of files."""

from __future__ import annotations

import ast
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
    {"errors", "layout", "memory", "noise"},
    {"family", "portions", "prediction", "reading", "replay", "stacked"},
    {"distributions", "tally"},
    {"families", "layers", "likelihood"},
    {"batches", "selection"},
    {"copies", "values"},
    {"skeleton"},
    {"adaptive", "convert", "summary"},
    {"draw_counts", "verdicts"},
    {"kept"},
    {"objective", "sampler", "ood", "check", "checkpoint"},
    {"predict"},
    {"export", "integrations"},
    {"bayesify"},
    {"lab"},
    {"cli"},
    {"__main__"},
]
"""A module imports only from sets to the left of its own (or from its own package); `bayesify` is the public names."""
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}

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


@pytest.mark.parametrize("name", by.__all__)
def test_every_public_name_has_a_docstring(name: str) -> None:
    text = vars(getattr(by, name)).get("__doc__") or getattr(by, name).__doc__ or ""
    assert len(text.split()) >= 4 and not text.startswith(f"{name}(")  # what a dataclass writes by itself


# Imports.


def test_every_module_has_its_place_in_the_order() -> None:
    assert {name.split(".")[0] for name in MODULES} <= set(RANK)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module: str) -> None:
    own = module.split(".")[0]
    found = imported_parts(module, MODULES[module]) - {own}
    wrong = sorted(part for part in found if RANK.get(part, len(ORDER)) >= RANK[own])
    assert not wrong, f"{module} imports {wrong}"


def test_the_import_checker_sees_every_form(tmp_path: Path) -> None:
    file = tmp_path / "base.py"
    file.write_text(
        "from ..families.rank1 import Rank1\nfrom .. import objective\nimport bayesify.lab.models\n"
        "import torch\ndef f():\n    from bayesify import cli\n    from .scope import Scope\n"
    )
    assert imported_parts("layers.base", file) == {"families", "objective", "lab", "cli", "layers"}


def test_families_and_layers_do_not_know_each_other() -> None:
    for module, path in MODULES.items():
        own, *rest = module.split(".")
        if rest and own in ("families", "layers"):
            other = {"families": "layers", "layers": "families"}[own]
            assert other not in imported_parts(module, path), module


def test_the_core_does_not_import_the_lab() -> None:
    code = "import bayesify, sys; print([m for m in sys.modules if m.startswith(('bayesify.lab', 'bayesify.cli'))])"
    assert run_python(code) == "[]"


def test_the_core_imports_torch_safetensors_and_numpy_alone() -> None:
    show = "import sys; print(*sorted({name.split('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)))"
    plain = set(run_python(f"import torch, safetensors.torch; {show}").split())
    ours = set(run_python(f"import bayesify; {show}").split())
    assert "bayesify" in ours and ours - plain <= {"bayesify", "numpy"}


def test_import_takes_at_most_a_tenth_longer_than_torch() -> None:
    code = "from time import perf_counter as t; a = t(); import torch; b = t(); import bayesify; print(b - a, t() - b)"
    tries = [tuple(map(float, run_python(code).split())) for _ in range(5)]
    torchs, ours = (min(times) for times in zip(*tries, strict=True))
    assert ours <= 0.1 * torchs, f"import bayesify took {torchs + ours:.3f} s, import torch {torchs:.3f} s"


# Files.


@pytest.mark.parametrize("module", MODULES)
def test_no_file_is_longer_than_300_lines(module: str) -> None:
    assert len(MODULES[module].read_text().splitlines()) <= 300


def test_the_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert by.__version__ == version("bayesify") == project["version"]
    assert f"\nversion: {project['version']}\n" in (ROOT / "CITATION.cff").read_text()
