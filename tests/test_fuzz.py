"""Random networks × methods × options against independent oracles, and every network that ever failed.

The cases depend on nothing but the version of bayesify, so a failure can be seen again; `make fuzz` tries others.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz.case import DTYPES, Case
from fuzz.expected import expected, same
from fuzz.networks import BLOCKS
from fuzz.oracles import ORACLES
from fuzz.runner import CORPUS, Fault, fuzz, read_case, run_case
from fuzz.search import write_case
from torch import Tensor

import bayesify as by
from bayesify.layers.call_scope import OpenScope
from bayesify.layers.rows import Rows
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


# What is rounding, and what is a fault.


def test_comparisons_are_relative() -> None:
    small = torch.tensor([1e-9, 2e-9])
    numbers = expected(SMALL, lambda: small * 1)
    same(small, numbers, "equal")
    with pytest.raises(AssertionError, match="differs by"):
        same(small * 1.00001, numbers, "ten in a million more")
    with pytest.raises(AssertionError, match="differs by nan"):
        same(small * torch.nan, numbers, "not a number")


@pytest.mark.parametrize("amplified", [1.0, 1e3])
def test_what_may_differ_is_what_the_network_amplifies(amplified: float) -> None:
    """The mean of (1 + x) - 1 for x about 1 / amplified has 1 + amplified times the relative error of its operands."""
    x = torch.linspace(1, 2, 50, dtype=torch.float64) / amplified
    numbers, unit = expected(SMALL, lambda: ((1 + x) - 1).mean()), torch.finfo(torch.float32).eps
    one_unit = (1 + amplified) * unit * numbers.value  # if the errors of all operands agree; by chance, a seventh of it
    same(numbers.value + 0.2 * one_unit, numbers, "rounding")
    with pytest.raises(AssertionError, match="differs by"):
        same(numbers.value + 20 * one_unit, numbers, "a hundred times that")


def with_faulty_tensors(monkeypatch: pytest.MonkeyPatch, change: Callable[[str, Tensor], Tensor]) -> None:
    """Let `predict` compute with other tensors than those of its draws."""
    right = Plan._tensors
    monkeypatch.setattr(
        Plan, "_tensors", lambda self, draws: {name: change(name, t) for name, t in right(self, draws).items()}
    )


def with_faulty_factors(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    """Let rows of training batches get other factors and biases than those drawn for them."""
    right = Rows.spread
    monkeypatch.setattr(Rows, "spread", lambda self, draws, *rest: right(self, change(draws), *rest))


FAULTS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "weights of the next draw": ("predictions", lambda m: with_faulty_tensors(m, lambda name, t: t.roll(1, 0))),
    "no bias": ("predictions", lambda m: with_faulty_tensors(m, lambda name, t: t * (not name.endswith("bias")))),
    "weights 1% too large": ("predictions", lambda m: with_faulty_tensors(m, lambda name, t: t * 1.01)),
    "factors of the next row": ("training_rows", lambda m: with_faulty_factors(m, lambda draws: draws.roll(1, 0))),
    "one row's noise for all": ("training_rows", lambda m: with_faulty_factors(m, lambda draws: 0 * draws + draws[0])),
    "factors 1% too large": ("training_rows", lambda m: with_faulty_factors(m, lambda draws: draws * 1.01)),
}


BODIES = [["activation", {"kind": "Tanh"}], ["layer_norm", {"kind": "layer"}], ["residual", {"kind": "norm"}]]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_faults_are_no_rounding(fault: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if dtype == "bfloat16" and "1%" in fault:
        pytest.skip("numbers of 16 bits differ by that")
    oracle, inject = FAULTS[fault]
    methods: list[list[Any]] = [["BatchEnsemble", {"mean_std": 0.4}], ["Rank1", {"dropout_rate": 0.2}]]
    layer, options = ["linear", {"size": 3, "bias": True}], {"components": 3, "bias": "component"}
    cases = [
        Case("vector", [4], [layer, body, layer], [[None, name, chosen | options]], dtype=dtype)
        for body, (name, chosen) in product(BODIES, methods)
    ]
    # Without the check at the first call, which would refuse what is wrong in training before the oracle sees it.
    monkeypatch.setattr(
        OpenScope, "__init__", lambda self, scope, check=None: vars(self).update(scope=scope, check=None)
    )
    for case in cases:
        run_case(oracle, case)
    inject(monkeypatch)
    for case in cases:
        with pytest.raises(AssertionError, match="differs by"):
            run_case(oracle, case)


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
