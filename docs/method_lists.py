"""Write the lists of methods in README.md and docs/index.md, and docs/reproduction.md: `make lists`.

What a method is called and what it adds are attributes of its class; when to use it is the first sentence after
**Use it** on its page. tests/test_docs.py requires that the files are as this script writes them.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

import bayesify as by
from bayesify.lab.models import MODELS
from bayesify.methods import METHODS
from bayesify.methods.base import Method
from docs.reproduction_tables import tables as reproduction_tables

ROOT = Path(__file__).parents[1]
START, END = "<!-- written by make lists: start -->\n", "<!-- written by make lists: end -->\n"
NETWORK = "wide_resnet_28_10"


def main() -> None:
    for path in LISTS:
        path.write_text(with_list(path), encoding="utf-8")


def with_list(path: Path) -> str:
    """A file with its list of methods written anew."""
    before, rest = path.read_text(encoding="utf-8").split(START)
    return f"{before}{START}{LISTS[path]()}{END}{rest.split(END)[1]}"


def readme_table() -> str:
    """Each method with what it adds to a layer, and to the parameters of a network."""
    rows = [
        [f"[`{name}`](docs/{page_of(name)})", method.title, method.adds, f"{overhead(method()):.2f}%"]
        for name, method in METHODS.items()
    ]
    return markdown(["class", "method", "each layer gets", "parameters added to a WideResNet-28-10"], rows)


def index_table() -> str:
    """Each method with its components, its draws in training, the layers it converts, and when to use it."""
    rows = []
    for name, kind in METHODS.items():
        method = kind()
        rows.append([f"[{name}]({page_of(name)})", components(method), method.draws_per, converted(method), use(name)])
    return markdown(["method", "components", "a training draw is per", "converted by default", "use it"], rows)


def markdown(header: list[str], rows: list[list[str]]) -> str:
    first, *others = [f"| {' | '.join(cells)} |\n" for cells in (header, *rows)]
    return "".join([first, "|" + "---|" * len(header) + "\n", *others])


def page_of(name: str) -> str:
    """The page of a method, from docs/."""
    return f"methods/{METHODS[name].__module__.rpartition('.')[2]}.md"


def overhead(method: Method) -> float:
    """The parameters that a method adds to a network, in percent: on the meta device, which makes shapes alone."""
    with torch.device("meta"):
        return by.summary(by.convert(MODELS[NETWORK](), method)).overhead


def components(method: Method) -> str:
    """How many components a method has by default, and what a draw makes of them."""
    if method.components == 1:
        return "–"
    if not method.ties_components:
        return f"{method.components}, chosen for each {'element' if method.factorised else 'layer'}"
    return f"{method.components}, with noise" if method.noisy else f"{method.components} points"


def converted(method: Method) -> str:
    """The kinds of layers that a method converts by default."""
    roles = ["third-party" if role == "custom" else role for role in method.roles]
    return ", ".join(roles) + ("; not the first layer" if method.skips_input else "")


def use(name: str) -> str:
    """When to use a method, by its page."""
    page = (ROOT / "docs" / page_of(name)).read_text(encoding="utf-8")
    found = re.search(r"^\*\*Use it\*\* (.+?)\.\s", page, re.MULTILINE | re.DOTALL)
    assert found, f"{page_of(name)}: a paragraph must begin with **Use it** and a sentence"
    return " ".join(found[1].split())


LISTS = {
    ROOT / "README.md": readme_table,
    ROOT / "docs/index.md": index_table,
    ROOT / "docs/reproduction.md": reproduction_tables,
}

if __name__ == "__main__":
    main()
