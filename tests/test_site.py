"""The documentation site: built strictly, complete, independent of the network. `make docs` executes its tutorials."""

from __future__ import annotations

import ast
import base64
import importlib
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import bayesify as by
from bayesify import integrations, lab, sklearn
from docs.site import hooks
from docs.site.cells import BLOCK, ROOT, notebook, tutorials
from docs.site.doctests import fenced

pytestmark = pytest.mark.xdist_group("site")  # one worker builds it, for all tests

PUBLIC = [f"{module.__name__}.{name}" for module in (by, lab, sklearn, integrations) for name in module.__all__]
RESULTS = (by.Prediction, by.Conformal, by.Familiarity, lab.Data)
"""Classes that bayesify makes and nobody else, so that they have no options."""
FROM_ELSEWHERE = re.compile(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
SIGNATURE = re.compile(r'<div class="language-python doc-signature.*?</pre>', re.DOTALL)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built without executing the tutorials.

    Strictly: a page that the navigation lacks, a wrong link or anchor, or a name that is not in the code is an error.
    """
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)  # not --quiet: it would not be strict
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def sections(site: Path) -> dict[str, str]:
    """The HTML of each object of the reference, by its path, from its heading to that of the next."""
    found = {}
    for page in sorted(site.glob("reference/*.html")):
        _, *parts = re.split(r'<h2 id="(bayesify[\w.]*)"', page.read_text(encoding="utf-8"))
        found |= dict(zip(parts[::2], parts[1::2], strict=True))
    return found


def test_every_public_name_is_in_the_reference(sections: dict[str, str]) -> None:
    missing = [path for path in PUBLIC if path not in sections]
    assert not missing, "give each a line such as `::: bayesify.convert` in a page of docs/reference"


def test_every_option_is_explained_in_the_reference(sections: dict[str, str]) -> None:
    """In an `Args:` section, in the text of a docstring, or in a table of options."""
    missing = {}
    for path in PUBLIC:
        text = SIGNATURE.sub("", sections[path])
        names = [name for name in options(path) if not re.search(rf"<code>(?:<[^>]*>)*\**{name}\b", text)]
        missing |= {path: names} if names else {}
    assert not missing


def options(path: str) -> list[str]:
    """The parameters of a public function, or those that a class of settings takes."""
    module, _, name = path.rpartition(".")
    value = getattr(importlib.import_module(module), name)
    if value in RESULTS or (inspect.isclass(value) and issubclass(value, Exception)):
        return []
    return [
        p.name for p in inspect.signature(value).parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]


def test_the_first_mention_of_a_name_leads_to_the_reference(site: Path) -> None:
    text = "# `by.kl`\n\n`by.kl`, [`by.elbo`](x.md), `lab.load` and `by.kl`, `by.other`\n\n```python\n`by.elbo`\n```\n"
    linked = text.replace("`by.kl`,", "[`by.kl`][bayesify.kl],", 1).replace(
        "`lab.load`", "[`lab.load`][bayesify.lab.load]"
    )
    assert hooks.with_references(text) == linked
    assert 'href="reference/predict.html#bayesify.predict"' in (site / "distill.html").read_text(encoding="utf-8")


def test_doctests_are_shown_as_code(sections: dict[str, str]) -> None:
    text = "Adds one.\n\n>>> add(\n...     1\n... )\n2\n\nAnd so on."
    assert fenced(text) == "Adds one.\n\n```pycon\n>>> add(\n...     1\n... )\n2\n```\n\nAnd so on."
    assert not [path for path, section in sections.items() if "<blockquote>" in section]


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 50
    found = {page.name: FROM_ELSEWHERE.findall(page.read_text(encoding="utf-8")) for page in pages}
    # A page's own address is not loaded.
    assert not {name: tags for name, tags in found.items() if [tag for tag in tags if "canonical" not in tag]}
    assert not [css for css in site.rglob("*.css") if re.search(r"url\([\"']?(https?:)?//", css.read_text("utf-8"))]


def test_the_search_finds_words_without_a_server(site: Path) -> None:
    text = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    documents = json.loads(text.removeprefix("var __index = "))["docs"]
    found = {document["location"].split("#")[0] for document in documents if "add_kl_grad_" in document["text"]}
    assert "performance.html" in found


# Tutorials.


def test_at_least_six_tutorials() -> None:
    assert len(tutorials()) >= 6


@pytest.mark.parametrize("page", tutorials(), ids=lambda page: page.stem)
def test_a_tutorial_is_a_notebook_of_its_blocks(page: Path, site: Path) -> None:
    book = json.loads((site / "tutorials" / f"{page.stem}.ipynb").read_text(encoding="utf-8"))
    assert (book["nbformat"], book["metadata"]["kernelspec"]["language"]) == (4, "python")
    code = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    assert code == [block.strip() for block in BLOCK.findall(page.read_text(encoding="utf-8"))]
    assert book["cells"][0]["source"].startswith("# ") and len(code) >= 3
    shown = (site / "tutorials" / f"{page.stem}.html").read_text(encoding="utf-8")
    assert f'href="{page.stem}.ipynb"' in shown


@pytest.mark.parametrize("page", tutorials(), ids=lambda page: page.stem)
def test_the_code_of_a_tutorial_uses_what_there_is(page: Path) -> None:
    """Its syntax, and the names of bayesify: `make docs` runs it."""
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    tree = ast.parse("\n".join(blocks))
    assert [path for path, _ in names_of_bayesify(tree)]
    wrong = [f"{path}.{name}" for path, name in names_of_bayesify(tree) if not has(path, name)]
    assert not wrong


PAGE = "# Title\n\n```python\nprint(1 < 2)\n```\n\nText.\n\n```python\nplot()\n```\n"


def outputs(text: str) -> dict[str, Any]:
    """The notebook of `PAGE` as it is executed: what the first cell prints comes in two pieces, the second draws."""
    book = notebook(text)
    first, second = (cell for cell in book["cells"] if cell["cell_type"] == "code")
    first["outputs"] = [{"output_type": "stream", "name": "stdout", "text": piece} for piece in ("Tr", "ue <\n")]
    png = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + (320).to_bytes(4) + (100).to_bytes(4)
    data = {"image/png": base64.b64encode(png).decode(), "text/plain": "<Figure>"}
    second["outputs"] = [{"output_type": "display_data", "data": data, "metadata": {}}]
    return book


def test_what_a_cell_shows_follows_its_block() -> None:
    text = hooks.with_outputs(PAGE, "page", outputs(PAGE))
    assert '```\n\n<pre class="output"><code>True &lt;</code></pre>\n\nText.' in text
    assert text.endswith('```\n\n![What this code draws](page_1.png){ width="192" }\n')  # 320 of 160 per inch, at 96
    assert [name for name, _ in hooks.images("page", outputs(PAGE))] == ["page_1.png"]


def test_outputs_of_other_code_are_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "EXECUTED", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    (tmp_path / "page.ipynb").write_text(json.dumps(outputs(PAGE)))
    assert hooks.executed(page) == outputs(PAGE)
    page.write_text(PAGE.replace("Text", "Another text"))
    assert hooks.executed(page) == outputs(PAGE.replace("Text", "Another text"))
    page.write_text(PAGE.replace("1 < 2", "2 < 1"))
    assert hooks.executed(page) == notebook(PAGE.replace("1 < 2", "2 < 1"))


def names_of_bayesify(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """What a tutorial imports from modules of bayesify, and the attributes of these that it uses."""
    modules = {"by": "bayesify", "lab": "bayesify.lab"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "bayesify":
            yield from ((str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield modules[node.value.id], node.attr


def has(path: str, name: str) -> bool:
    module = importlib.import_module(path)
    return hasattr(module, name) or importlib.util.find_spec(f"{path}.{name}") is not None
