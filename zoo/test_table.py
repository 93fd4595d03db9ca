"""The table's networks: each is run once, two at a time but one large one at most, and not again."""

from __future__ import annotations

import json
import time
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import table

SIZES = {"small": 1, "medium": 2, "other": 3, "large": table.LARGE + 1, "largest": table.LARGE + 2}


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_network_is_run_once_and_at_most_one_large_one_at_a_time(
    jobs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: list[str] = []
    run: list[str] = []
    together: set[tuple[str, ...]] = set()
    lock = Lock()

    def rows_of(name: str) -> list[dict[str, Any]]:
        with lock:
            run.append(name)
            running.append(name)
            together.add(tuple(sorted(running)))
        time.sleep(0.05)
        with lock:
            running.remove(name)
        return [{"name": name, "method": "Rank1(2)", "result": "converted", "converted": 1, "shared": 0, "refused": 0}]

    monkeypatch.setattr(table, "rows_of", rows_of)
    monkeypatch.setattr(table, "parameters", SIZES.__getitem__)
    path = tmp_path / "zoo.json"
    names = list(SIZES)
    table.make_table(names[:1], path, jobs)
    table.make_table(names, path, jobs)
    assert sorted(run) == sorted(names) and max(map(len, together)) == jobs
    assert ("large", "largest") not in together
    assert [row["name"] for row in json.loads(path.read_text())] == names
    assert path.with_suffix(".md").read_text().startswith("# 5 networks, 1 methods")


def test_networks_that_were_run_on_another_core_are_run_again_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: list[str] = []

    def rows_of(name: str) -> list[dict[str, Any]]:
        run.append(name)
        return [{"name": name, "method": "Rank1(2)", "result": "converted"}]

    monkeypatch.setattr(table, "rows_of", rows_of)
    path = tmp_path / "zoo.json"
    monkeypatch.setattr(table, "core", lambda: "before")
    table.make_table(["one", "two"], path, 1)
    monkeypatch.setattr(table, "core", lambda: "after")
    table.make_table(["one", "two"], path, 1)
    assert run == ["one", "two"]
    table.make_table(["one"], path, 1, again=True)
    table.make_table(["one"], path, 1, again=True)
    assert run == ["one", "two", "one"]
    assert {row["name"]: row["core"] for row in json.loads(path.read_text())} == {"one": "after", "two": "before"}
    assert "1 on before, 1 on after" in path.with_suffix(".md").read_text()
