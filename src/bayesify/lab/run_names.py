"""The folders of runs that nobody has named."""

from __future__ import annotations

from itertools import count
from pathlib import Path

RUNS = Path("runs")
YAML = (".yaml", ".yml")


def is_data(source: str | Path) -> bool:
    """Whether a path or a name is one of data; otherwise it is that of a recipe.

    >>> is_data("recipe.yaml"), is_data("customers.csv"), is_data("ylecun/mnist")
    (False, True, True)
    """
    path = Path(source)
    return path.suffix.lower() not in YAML and not (path.is_file() and not path.suffix)


def first_free(folder: Path) -> Path:
    """The given folder if it does not exist or is empty, else the first such with -2, -3, … appended."""
    for number in count(1):
        free = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        if not free.exists() or (free.is_dir() and not any(free.iterdir())):
            return free
    raise AssertionError("count() does not end")


def name_of(source: str | Path) -> str:
    """The name of a run for a recipe, for data or for a data set.

    >>> name_of("shop/customers.csv.gz"), name_of("photos/"), name_of("hf:ylecun/mnist")
    ('customers', 'photos', 'mnist')
    """
    path = Path(str(source).removeprefix("hf:"))
    return path.resolve().name.removesuffix("".join(path.suffixes[-2:])) or "data"
