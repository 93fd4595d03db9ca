"""The words are true: every code block runs, every table agrees with the code, every link leads somewhere."""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import bayesify as by
from bayesify.methods import METHODS
from docs.method_lists import LISTS, with_list

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXECUTED = [page for page in PAGES if page.parent.name != "tutorials"]
"""The tutorials take longer: `make docs` executes them, and tests/test_site.py looks at their code."""
METHOD_PAGES = sorted((ROOT / "docs/methods").glob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
OPTION = re.compile(r"^\| `(\w+)` \| `(.+?)` \| .+ \|$", re.MULTILINE)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def title_class(page: Path) -> str:
    found = re.match(r"# .*\(`(\w+)`\)\n", page.read_text(encoding="utf-8"))
    assert found, f"{name_of(page)}: the title must end in the class, as in # Rank-1 BNN (`Rank1`)"
    return found[1]


@pytest.mark.parametrize("page", EXECUTED, ids=name_of)
def test_code_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    text = page.read_text(encoding="utf-8")
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in BLOCK.finditer(text):
        first_line = text[: block.start(1)].count("\n")
        exec(compile("\n" * first_line + block[1], str(page), "exec", dont_inherit=True), namespace)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=name_of)
def test_relative_links_exist(page: Path) -> None:
    targets = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
    missing = [link for link in targets if not (page.parent / link.split("#")[0]).exists()]
    assert not missing


def test_every_method_has_one_page_and_is_linked() -> None:
    assert sorted(map(title_class, METHOD_PAGES)) == sorted(METHODS)
    for index in (ROOT / "README.md", ROOT / "docs/index.md"):
        linked = {(index.parent / link).resolve() for link in LINK.findall(index.read_text(encoding="utf-8"))}
        assert set(METHOD_PAGES) <= linked


@pytest.mark.parametrize("page", METHOD_PAGES, ids=name_of)
def test_options_table_lists_the_fields_and_their_defaults(page: Path) -> None:
    method = METHODS[title_class(page)]
    documented = dict(OPTION.findall(page.read_text(encoding="utf-8")))
    in_code = {field.name: default_in_source(method, field.name) for field in fields(method)}
    assert list(documented) == list(in_code)
    assert {name: expression(value) for name, value in documented.items()} == in_code


@pytest.mark.parametrize("page", METHOD_PAGES, ids=name_of)
def test_method_page_has_an_example_and_a_paper(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert any(f"by.{title_class(page)}(" in block[1] for block in BLOCK.finditer(text))
    assert re.search(r"^Papers?: .+", text, re.MULTILINE)


@pytest.mark.parametrize("page", LISTS, ids=name_of)
def test_lists_of_methods_are_as_make_lists_writes_them(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == with_list(page), "run make lists"


def test_the_number_of_methods_is_true() -> None:
    number = ("Eight", "Nine", "Ten", "Eleven", "Twelve", "Thirteen", "Fourteen")[len(METHODS) - 8]
    assert f"## {number} methods, one interface\n" in readme()


def test_first_screen_has_the_commands_and_an_example() -> None:
    first_screen = "\n".join(readme().splitlines()[:40])
    assert "make demo" in first_screen
    assert "make test" in first_screen
    assert BLOCK.search(first_screen)


def test_every_public_name_is_documented() -> None:
    words = "\n".join(page.read_text(encoding="utf-8") for page in PAGES if page.name != "CONTRIBUTING.md")
    assert not [name for name in by.__all__ if not re.search(rf"\b(by\.|`){name}\b", words)]


def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def default_in_source(method: type, name: str) -> str:
    """The expression that gives a field its default, as it stands in the class or the one it inherits from.

    Where that is the name of a constant, its value.
    """
    for base in method.__mro__:
        tree = ast.parse(textwrap.dedent(inspect.getsource(base))) if name in base.__dict__ else ast.Module([], [])
        for node in ast.walk(tree):
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name and node.value is not None:
                return repr(getattr(method, name)) if isinstance(node.value, ast.Name) else ast.unparse(node.value)
    raise AssertionError(f"{method.__name__}.{name} has no default")


def expression(text: str) -> str:
    """The same expression in Python's own spelling."""
    return ast.unparse(ast.parse(text, mode="eval"))


def test_the_figures_in_the_readme_are_those_measured() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "cifar10.json").read_text())["rows"]
    plain, rank1 = (next(row for row in rows if row["name"] == name) for name in ("pretrained", "rank1"))
    text = (ROOT / "README.md").read_text()
    for test in (plain["test"], rank1["test"]):
        assert f"{test['nll']:.3f}" in text and f"{test['ece']:.3f}" in text
    assert f"for {rank1['parameters_added_percent']:.1f}% more parameters" in text
    assert abs(plain["test"]["accuracy"] - rank1["test"]["accuracy"]) < 0.002
