"""The benchmark's own sums: ratios, peaks, goals, tables, the figure; and the documentation shows its results."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bayesify as by
from benchmarks.adaptive import shuffled_turns
from benchmarks.speed import figure, tables
from benchmarks.speed.cases import CASES
from benchmarks.speed.goals import goal
from benchmarks.speed.measure import Row, of_pairs, peak, size, training_memory
from benchmarks.speed.methods import EXAMPLES, FAMILIES, NO_NORMS, OURS, Trial, converted, plain

ROOT = Path(__file__).parents[1]
STORED = ROOT / "benchmarks" / "results" / "speed.json"
KIND = "flipout"


def small_results() -> dict[str, Any]:
    """One network, one method of ours and one of a peer, as a run would write them."""
    rows = [
        Row("resnet20", "step", "bayesify", "MeanField flipout", KIND, 2.5, 2.6),
        Row("resnet20", "predict", "bayesify", "MeanField flipout", KIND, 1.25),
        Row("resnet20", "step", "other", "Flipout", KIND, 5.0, 5.0),
        Row("resnet20", "predict", "other", "Flipout", KIND, 1.0),
        Row("resnet20", "step, in turn", "bayesify", "MeanField flipout", KIND, 2.5, 3.0),
        Row("resnet20", "predict, in turn", "bayesify", "MeanField flipout", KIND, 1.25),
        Row("resnet20", "step, in turn", "other", "Flipout", KIND, 5.0, 4.5),
        Row("resnet20", "predict, in turn", "other", "Flipout", KIND, 1.0),
        Row("resnet20", "kl", "bayesify", "MeanField flipout", KIND, 0.004),
        Row("mlp", "step", "bayesify", "MeanField flipout", KIND, 3.0),
        Row("one row", "single", "bayesify", "Rank1", "", 0.25),
        Row("LSTM", "lstm", "bayesify", "Rank1", "", 1.2),
    ]
    facts = {"command": "make bench", "quick": False, "torch": "2", "threads": 1, "machine": "any", "versions": {}}
    growth = [
        {"axis": axis, "value": value, "method": "Rank1", **dict.fromkeys(names, float(value))}
        for axis, names in {"K": ("step", "memory"), "S": ("forwards",), "B": ("step",), "width": ("step",)}.items()
        for value in (1, 4)
    ]
    return {
        "made": facts | {"rounds": "1", "optimizer": "SGD", "memory": "kept"},
        "cases": {"resnet20": "ResNet-20, B=128", "mlp": "MLP, B=128"},
        "rows": [row.plain() for row in rows],
        "growth": growth,
        "imports": {"torch": 1.0},
        "optimizers": {"default": 1.1},
        "cannot": [{"case": "mlp", "library": "other", "method": "Flipout", "reason": "it can't"}],
        "missing": {"absent": "ModuleNotFoundError: absent"},
    }


def test_a_ratio_is_of_the_best_times_and_its_median_of_the_pairs() -> None:
    assert of_pairs([(2.0, 3.0), (1.0, 4.0), (4.0, 4.0)]) == (3.0, 1.5)


def test_the_peak_is_what_is_held_at_once() -> None:
    assert peak([4, 4, -4, -4, 6]) == 8
    assert peak([-4, 2]) == 0


def test_training_memory_counts_weights_gradients_momentum_and_activations() -> None:
    rows, width = 64, 256
    x, y = torch.randn(rows, width), torch.randint(width, (rows,))
    found = training_memory(plain(nn.Linear(width, width, bias=False)), x, y)
    weights, activations = 3 * 4 * width * width, 4 * rows * width
    assert weights + activations <= found <= weights + 10 * activations


def test_the_memory_of_a_step_grows_with_the_rows_under_exemplar_but_not_under_shared() -> None:
    def ratio(family: object) -> float:
        base = nn.Linear(64, 64)
        x, y = torch.randn(32, 64), torch.randint(64, (32,))
        trial = converted(family)(copy.deepcopy(base))
        return training_memory(trial, x, y) / training_memory(plain(base), x, y)

    assert ratio(FAMILIES["MeanField shared"]) < 4 < 8 < ratio(FAMILIES["MeanField exemplar"])


def test_a_tensor_with_two_names_is_counted_once() -> None:
    layer = nn.Linear(4, 3, bias=False)
    layer.again = nn.Parameter(layer.weight)  # another parameter in the same memory
    assert len(list(layer.parameters())) == 2
    assert size(layer) == 4 * 12


def test_a_step_adds_the_gradient_of_the_kl() -> None:
    family = by.MeanField(estimator="shared")
    trial: Trial = converted(family)(nn.Linear(4, 3))
    log_std = trial.model.posterior.weight_log_std
    expected = (log_std.detach().mul(2).exp() / family.prior_std**2 - 1) / EXAMPLES
    trial.step(torch.zeros(8, 4), torch.zeros(8, dtype=torch.long))()  # of zero inputs the likelihood has no gradient
    assert torch.allclose(log_std.grad, expected, rtol=1e-4)


def test_every_family_and_estimator_is_measured() -> None:
    assert {type(family).__name__ for family in FAMILIES.values()} == set(by.families.FAMILIES)
    estimators = {family.estimator for family in FAMILIES.values() if isinstance(family, by.MeanField)}
    assert estimators == {"shared", "flipout", "local", "exemplar"}
    assert [method.name for method in OURS] == [*FAMILIES, *NO_NORMS]


@pytest.mark.parametrize("name", [name for name in CASES if name != "resnet18"])  # which is torchvision's
def test_cases_classify_their_batches(name: str) -> None:
    x, y = CASES[name].batch(2)
    assert CASES[name].network()(x).shape == (2, 10) and y.shape == (2,)


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (("resnet20", "step", "bayesify", "IBNN"), 1.12),
        (("mlp", "step", "bayesify", "IBNN"), None),
        (("resnet18", "head", "bayesify", "Rank1"), 1.3),
        (("mlp", "memory", "bayesify", "ECMP"), 1.15),
        (("mlp", "memory", "bayesify", "MeanField shared"), None),
        (("resnet20", "step", "torch-uncertainty", "BatchEnsemble"), None),
        (("LSTM", "lstm", "bayesify", "Rank1"), 1.10),
    ],
)
def test_goals_are_those_of_the_case_the_measure_and_the_method(place: tuple[str, ...], expected: float) -> None:
    assert goal(*place) == expected


def test_the_page_says_what_missed_its_goal_and_who_is_ahead() -> None:
    text = tables.page(small_results())
    assert (
        "| resnet20 | training step | `MeanField flipout` | **2.50** | 2.60 | ≤ 2.20 | missed | two convolutions, and"
        in text
    )
    assert "| `MeanField flipout` | 0.40% |  | ≤ 1% | met |" in text
    assert "| flipout | resnet20 | training step | other | 2.50 | 5.00 | 2.00 | 1.50 |" in text
    assert "| flipout | resnet20 | one draw of a prediction | other | 1.25 | 1.00 | **0.80** |  |" in text
    assert "- absent: ModuleNotFoundError" in text and "it can't" in text
    assert "| method | one row: 50 draws of one input, over a loop | LSTM: a draw for the batch |" in text
    assert "| `Rank1` | 0.25 | **1.20** |" in text


def test_a_smoke_run_says_that_it_is_one() -> None:
    results = small_results()
    results["made"]["quick"] = True
    assert "mean nothing" in tables.docs_block(results) and "mean nothing" not in tables.docs_block(small_results())


def test_the_figure_shows_every_figure(tmp_path: Path) -> None:
    from PIL import Image

    figure.draw(small_results(), tmp_path / "speed.png")
    with Image.open(tmp_path / "speed.png") as image:
        colors = {color for _, color in image.convert("RGB").getcolors(maxcolors=1 << 20)}
        width, height = image.size
    shown = {tuple(bytes.fromhex(color[1:])) for color in (figure.OURS, figure.PEER)}
    assert width > height > 100 and shown <= colors


def test_the_documentation_has_the_tables_of_the_results() -> None:
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    block = tables.UNMEASURED if not STORED.exists() else tables.docs_block(json.loads(STORED.read_text()))
    assert text == tables.with_block(text, block)


def test_the_page_is_that_of_the_results() -> None:
    if not STORED.exists():
        pytest.skip("benchmarks/results/speed.json is not there: make bench writes it")
    assert STORED.with_suffix(".md").read_text(encoding="utf-8") == tables.page(json.loads(STORED.read_text()))


def test_other_orders_of_draws_are_orders_in_which_components_take_turns() -> None:
    order = shuffled_turns(11, 3, seed=0)
    assert order.sort().values.tolist() == list(range(11)) and order.tolist() != list(range(11))
    assert (order % 3).tolist() == [place % 3 for place in range(11)]
