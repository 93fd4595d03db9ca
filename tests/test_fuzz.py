"""Random networks × methods × options against independent oracles, and every network that ever failed.

The cases depend on nothing but the version of bayesify, so a failure can be seen again; `make fuzz` tries others.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fuzz.case import Case
from fuzz.expected import same
from fuzz.networks import BLOCKS
from fuzz.oracles import ORACLES
from fuzz.runner import CORPUS, Fault, fuzz, read_case, run_case
from fuzz.search import write_case

import bayesify as by
from bayesify.methods import METHODS
from bayesify.prediction.plan import Plan

EXAMPLES = {"exported": 12}
"""How many cases an oracle gets, where it is not 250: together they take a minute."""
MOST_REFUSED = 0.3
VERSION = sum(map(ord, by.__version__))


@pytest.mark.parametrize("oracle", ORACLES)
def test_random_networks(oracle: str) -> None:
    statistics = fuzz(oracle, EXAMPLES.get(oracle, 250), seed=VERSION)
    print(f"{oracle}: {statistics}")
    assert statistics.refused_share <= MOST_REFUSED, statistics


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.json")), ids=lambda path: path.stem)
def test_networks_that_failed_once(path: Path) -> None:
    case = read_case(path)
    for oracle in ORACLES:
        if oracle != "exported" or "export" in path.stem:
            try:
                run_case(oracle, case)
            except Exception as error:
                raise AssertionError(f"{oracle}: {error}") from error


# The fuzzer itself.

SMALL = Case("vector", [4], [["linear", {"size": 3, "bias": True}]], [[None, "MeanField", {}]])


def test_every_method_and_block_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()

    def watch(case: Case) -> None:
        seen.update(name for name, _ in case.blocks)
        seen.update(name for _, name, _ in case.methods if name)

    monkeypatch.setitem(ORACLES, "watch", watch)
    for seed in range(6):
        if seen != {*BLOCKS, *METHODS}:
            fuzz("watch", 200, seed)
    assert seen == {*BLOCKS, *METHODS}


def test_a_fault_is_found_made_small_and_can_be_read_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Predictions by draws other than those that `draw` returns."""
    right = Plan._tensors
    monkeypatch.setattr(Plan, "_tensors", lambda self, draws: right(self, range(draws.start + 1, draws.stop + 1)))
    with pytest.raises(Fault) as caught:
        fuzz("predictions", 100, seed=0)
    case = caught.value.case
    assert len(case.blocks) == 1
    path = write_case(case, tmp_path, "predictions")
    assert read_case(path) == case
    with pytest.raises(AssertionError, match="draws of predict"):
        run_case("predictions", read_case(path))


def test_a_case_is_the_same_network_each_time() -> None:
    one, other = SMALL.network().state_dict(), SMALL.network().state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(SMALL.batch(), SMALL.batch())


def test_comparisons_are_relative() -> None:
    small = torch.tensor([1e-9, 2e-9])
    same(SMALL, small, small, "equal")
    with pytest.raises(AssertionError, match="differs by"):
        same(SMALL, small, small * 1.01, "one percent more")


def test_make_fuzz_runs_and_counts(tmp_path: Path) -> None:
    tests = Path(__file__).parent
    command = [sys.executable, "-m", "fuzz", "--minutes", "0.02", "--cores", "1", "--seed", "0"]
    done = subprocess.run(
        [*command, "--failures", tmp_path, "--summary", tmp_path / "table.md"],
        cwd=tests.parent,
        env={**os.environ, "PYTHONPATH": str(tests)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "cases, no fault" in done.stdout, done.stdout + done.stderr
    table = (tmp_path / "table.md").read_text().splitlines()
    assert table[0].startswith("| oracle | cases") and table[2].startswith("| `predictions` |")
