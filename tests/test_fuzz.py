"""Random networks × methods × options against independent oracles, and every network that ever failed.

The cases depend on nothing but the version of bayesify, so a failure can be seen again; `make fuzz` tries others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz.case import DTYPES, Case
from fuzz.expected import expected, same
from fuzz.networks import BLOCKS, MODES
from fuzz.oracles import ORACLES
from fuzz.runner import CORPUS, Fault, Statistics, fuzz, read_case, run_case
from fuzz.search import write_case
from torch import Tensor

import bayesify as by
from bayesify import batches
from bayesify.conversion import check, check_one_draw, check_rows
from bayesify.conversion.check_rows import main_tensor
from bayesify.conversion.drawn_network import DrawnNetwork
from bayesify.layers.call_scope import OpenScope
from bayesify.layers.rows import Rows
from bayesify.methods import METHODS
from bayesify.prediction import plan
from bayesify.prediction.plan import Plan
from bayesify.training import objective

EXAMPLES = {"exported": 12}
"""How many cases an oracle gets, where it is not 150: together they take a minute."""
PARTS = 3
MOST_REFUSED = 0.4
VERSION = sum(map(ord, by.__version__))


@pytest.mark.parametrize("oracle", ORACLES)
def test_random_networks(oracle: str) -> None:
    statistics = Statistics()
    for part in range(PARTS):  # hypothesis varies cases that it has had, so that those of one seed are alike
        statistics.add(fuzz(oracle, EXAMPLES.get(oracle, 150) // PARTS, seed=PARTS * VERSION + part))
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


# What is hidden from a first call: each new shape of network is found wrong once its check is left out.

LINEAR, TANH = ["linear", {"size": 4, "bias": True}], ["activation", {"kind": "Tanh"}]
RANK1 = [[None, "Rank1", {"components": 3, "dropout_rate": 0.2}]]


IN_ONE_MODE = {mode: ["reads_in_one_mode", {"mode": mode}] for mode in MODES}
MIXES, IN_EVALUATION = ["mixes_rows", {"how": "mean"}], ["in_one_mode", {"mode": "evaluation", "kind": "linear"}]
READS_INPUT = Case("vector", [4], [["cached", {"where": "attribute"}], LINEAR], RANK1, first="zeros")

READS_POOLED = Case("vector", [4], [["reads_weight", {}]], [[None, "DropConnect", {}]], around="rows pooled")


def case_of(*blocks: list[Any], **options: Any) -> Case:
    return Case("vector", [4], [LINEAR, *blocks, LINEAR], RANK1, **options)


def without_training_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (check, check_one_draw, check_rows):
        monkeypatch.setattr(module, "set_modes", lambda network, model: network.eval())


def without_rows_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "set_modes", lambda network, model: network.eval())


def without_comparison_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    right = check.compare_with_drawn

    def compare(model: Any, batch: Any, rows: int, in_training: bool = False) -> None:
        if not in_training:
            right(model, batch, rows)

    monkeypatch.setattr(check, "compare_with_drawn", compare)


def with_the_first_tensor_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_one_draw, "tensors_in", lambda output: [main_tensor(output)])
    with_rows_of_the_main_tensor_alone(monkeypatch)


def with_rows_of_the_main_tensor_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_rows, "_places_of_rows", lambda output, rows: [])


def without_names_of_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (batches, plan):
        monkeypatch.setattr(module, "output_of", batches.first_tensor)


def with_draws_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    right = DrawnNetwork.write
    monkeypatch.setattr(DrawnNetwork, "write", lambda self, *args: right(self, *args).train())


def without_what_is_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective, "has_scope", lambda module: True)


def with_names_in_the_part(monkeypatch: pytest.MonkeyPatch) -> None:
    right = DrawnNetwork.__init__

    def wrong(self: DrawnNetwork, *args: Any, **kwargs: Any) -> None:
        right(self, *args, **kwargs)
        self._names = {name: layer.site_name for name, layer in self.layers.items()}

    monkeypatch.setattr(DrawnNetwork, "__init__", wrong)


def with_one_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def set_next(scopes: Any, *args: Any) -> bool:
        for scope in scopes:
            scope.check_from = {False: inf, True: inf}
        return True

    monkeypatch.setattr(check, "_set_next_checks", set_next)


def with_evaluation_settled_by_training(monkeypatch: pytest.MonkeyPatch) -> None:
    right = check._set_next_checks

    def set_next(scopes: Any, *args: Any) -> bool:
        for scope in scopes:
            scope.check_from[False] = inf
        return right(scopes, *args)

    monkeypatch.setattr(check, "_set_next_checks", set_next)


def with_equal_rows_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_has_equal_rows", lambda batch, batch_dim: False)


def with_zeros_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_ordinary", lambda batch, batch_dim, to_float32=False: batch)


HIDDEN: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None], Case]] = {
    "a weight read in training": (
        "training_rows",
        without_training_mode,
        case_of(["reads_in_one_mode", {"mode": "training"}]),
    ),
    "rows mixed in training": (
        "training_rows",
        without_rows_in_training,
        case_of(["mixes_in_training", {"how": "views"}]),
    ),
    "rows mixed in training at the end": (
        "training_rows",
        without_comparison_in_training,
        Case("vector", [4], [LINEAR, ["mixes_in_training", {"how": "next row"}]], [["0*", *RANK1[0][1:]]]),
    ),
    "a branch in evaluation": ("predictions", with_draws_in_training, case_of(IN_EVALUATION)),
    "a weight read beside the output": (
        "training_rows",
        with_the_first_tensor_alone,
        case_of(returns="tuple", beside="reads"),
    ),
    "rows mixed beside the output": (
        "training_rows",
        with_rows_of_the_main_tensor_alone,
        case_of(returns="dict", beside="mixed"),
    ),
    "logits that are not first": ("predictions", without_names_of_outputs, case_of(returns="named tuple")),
    "a part called twice": ("training_rows", without_what_is_around, case_of(around="siamese")),
    "rows pooled around a part": ("training_rows", without_what_is_around, case_of(around="rows pooled")),
    "rows folded around a part": ("training_rows", without_what_is_around, case_of(around="views side by side")),
    "copies of a part": ("composed", with_names_in_the_part, SMALL),
    "training at first": (
        "evaluation",
        with_evaluation_settled_by_training,
        Case("vector", [4], [IN_ONE_MODE["evaluation"], LINEAR], [[None, "DropConnect", {}]], first="other mode"),
    ),
    "fewer rows at first": (
        "training_rows",
        with_one_check,
        case_of(["mixes_rows", {"how": "above"}], first="fewer rows"),
    ),
    "one row at first": ("training_rows", with_one_check, case_of(MIXES, first="one row")),
    "equal rows at first": (
        "training_rows",
        with_equal_rows_as_they_are,
        replace(READS_POOLED, first="equal rows"),
    ),
    "zeros at first": ("training_rows", with_zeros_as_they_are, READS_INPUT),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_what_a_first_call_hides_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle, inject, case = HIDDEN[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_case(oracle, case)
        inject(monkeypatch)
        with pytest.raises(AssertionError, match=r"differs by|draw the same noise"):
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


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads which processes there are from /proc")
def test_workers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    """Killed while the workers still start, so that they can't see from their parent's number that it has changed."""
    tests = Path(__file__).parent
    command = [sys.executable, "-m", "fuzz", "--minutes", "5", "--cores", "1", "--failures", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(tests)}
    workers: set[int] = set()
    for kill in (signal.SIGTERM, signal.SIGKILL):
        process = subprocess.Popen(
            command, cwd=tests.parent, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        found = wait_for(lambda pid=process.pid: len(children(pid)) == 2 and children(pid))  # one is multiprocessing's
        workers |= set(found)
        process.send_signal(kill)
        process.wait(10)
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))


def children(parent: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            state, ppid = path.read_text().rpartition(")")[2].split()[:2]
            found += [int(path.parent.name)] * (int(ppid) == parent and state != "Z")
    return found


def wait_for(condition: Callable[[], Any]) -> Any:
    """What a condition gives, once it holds."""
    end = time.monotonic() + 120
    while not (found := condition()):
        assert time.monotonic() < end, "waited for two minutes"
        time.sleep(0.05)
    return found
