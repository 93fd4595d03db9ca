"""The benchmarks' own sums, tables and figures, and that what they say of the code holds."""

from __future__ import annotations

import copy
import doctest
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import nn

import bayesify as by
from benchmarks import call_path, draws, familiarity, plan, regulariser
from benchmarks.adaptive import shuffled_blocks
from benchmarks.speed import before_after, figure, tables
from benchmarks.speed.cases import CASES
from benchmarks.speed.goals import goal
from benchmarks.speed.measure import Row, parameter_bytes, peak, ratios, times_in_turn, training_memory
from benchmarks.speed.methods import EXAMPLES, METHODS, OURS, POINT_METHODS, WITHOUT_NORMS, convert_with, plain

ROOT = Path(__file__).parents[1]
STORED = ROOT / "benchmarks" / "results" / "speed.json"
BEFORE_AFTER = STORED.with_name("before_after.json")
KIND = "flipout"


def small_results() -> dict[str, Any]:
    """One network, one method of ours and one of a peer, as a run would write them."""
    rows = [
        Row("resnet20", "step", "bayesify", "MeanField flipout", KIND, 2.6, 2.5),
        Row("resnet20", "predict", "bayesify", "MeanField flipout", KIND, 1.25),
        Row("resnet20", "step", "other", "Flipout", KIND, 5.0, 5.0),
        Row("resnet20", "predict", "other", "Flipout", KIND, 1.0),
        Row("resnet20", "step, side by side", "bayesify", "MeanField flipout", KIND, 2.5, 3.0),
        Row("resnet20", "predict, side by side", "bayesify", "MeanField flipout", KIND, 1.25),
        Row("resnet20", "step, side by side", "other", "Flipout", KIND, 5.0, 4.5),
        Row("resnet20", "predict, side by side", "other", "Flipout", KIND, 1.0),
        Row("resnet20", "kl", "bayesify", "MeanField flipout", KIND, 0.004),
        Row("mlp", "step", "bayesify", "MeanField flipout", KIND, 3.0),
        Row("one row", "single", "bayesify", "Rank1", "", 0.25),
        Row("LSTM", "lstm", "bayesify", "Rank1", "", 1.2),
    ]
    facts = {"command": "make bench", "quick": False, "torch": "2", "threads": 1, "machine": "any", "versions": {}}
    growth = [
        {"axis": axis, "value": value, "method": "Rank1", **dict.fromkeys(names, float(value))}
        for axis, names in {
            "K": ("step", "memory"),
            "S": ("forward passes",),
            "B": ("step",),
            "width": ("step",),
        }.items()
        for value in (1, 4)
    ]
    return {
        "setup": facts | {"rounds": "Medians of 1 round", "optimizer": "SGD", "memory": "kept"},
        "cases": {"resnet20": "ResNet-20, B=128", "mlp": "MLP, B=128"},
        "rows": [row.to_dict() for row in rows],
        "growth": growth,
        "imports": {"torch": 1.0},
        "optimizers": {"default": 1.1},
        "failed": [{"case": "mlp", "library": "other", "method": "Flipout", "reason": "it can't"}],
        "missing": {"absent": "ModuleNotFoundError: absent"},
    }


def test_a_ratio_is_the_median_of_the_rounds_beside_the_ratio_of_the_best() -> None:
    assert ratios([(2.0, 3.0), (1.0, 4.0), (4.0, 4.0)]) == (1.5, 3.0)


def test_calls_are_timed_in_turn_in_both_orders_with_times_in_their_places() -> None:
    called = []
    group = [lambda: called.append("short"), lambda: (called.append("long"), time.sleep(0.005))]
    times = times_in_turn([group, group], rounds=2)
    assert called == [*["short", "long"] * 2, "short", "long", "long", "short"]  # the first four warm up
    assert len(times) == 2 and all(short < 0.005 <= long for short, long in times)


def test_slow_rounds_end_early_but_not_before_every_copy_was_timed() -> None:
    assert len(times_in_turn([[lambda: time.sleep(0.01)]] * 3, rounds=9, limit=0.0)) == 3


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
    def ratio(method: object) -> float:
        base = nn.Linear(64, 64)
        x, y = torch.randn(32, 64), torch.randint(64, (32,))
        ours = convert_with(method)(copy.deepcopy(base))
        return training_memory(ours, x, y) / training_memory(plain(base), x, y)

    assert ratio(METHODS["MeanField shared"]) < 4 < 8 < ratio(METHODS["MeanField exemplar"])


def test_a_tensor_with_two_names_is_counted_once() -> None:
    layer = nn.Linear(4, 3, bias=False)
    layer.again = nn.Parameter(layer.weight)  # another parameter in the same memory
    assert len(list(layer.parameters())) == 2
    assert parameter_bytes(layer) == 4 * 12


def test_a_step_adds_the_gradient_of_the_kl() -> None:
    method = by.MeanField(estimator="shared")
    ours = convert_with(method)(nn.Linear(4, 3))
    log_std = ours.model.posterior.weight_log_std
    expected = (log_std.detach().mul(2).exp() / method.prior_std**2 - 1) / EXAMPLES
    ours.step(torch.zeros(8, 4), torch.zeros(8, dtype=torch.long))()  # of zero inputs the likelihood has no gradient
    assert torch.allclose(log_std.grad, expected, rtol=1e-4)


def test_every_method_and_estimator_is_measured() -> None:
    assert {type(method).__name__ for method in METHODS.values()} == set(by.methods.METHODS)
    estimators = {method.estimator for method in METHODS.values() if isinstance(method, by.MeanField)}
    assert estimators == {"shared", "flipout", "local", "exemplar"}
    assert [each.name for each in OURS] == [*METHODS, *WITHOUT_NORMS]


@pytest.mark.parametrize("name", METHODS)
def test_point_methods_are_those_whose_further_draws_repeat(name: str) -> None:
    torch.manual_seed(0)
    ours = convert_with(METHODS[name])(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)))
    x, model = torch.randn(32, 8), ours.model.eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)  # components begin alike
    k = ours.members or METHODS[name].components
    once, twice = (by.predict(model, x, samples=draws, seed=0).probs for draws in (k, 2 * k))
    repeats = torch.allclose(once, twice, atol=1e-6)
    assert repeats == (ours.members is not None) == (type(METHODS[name]).__name__ in POINT_METHODS)


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
        "| resnet20 | training step | `MeanField flipout` | **2.60** | 2.50 | ≤ 2.20 | missed | two convolutions, and"
        in text
    )
    assert "| `MeanField flipout` | 0.40% |  | ≤ 1% | met |" in text
    assert "| flipout | resnet20 | training step | other | 2.50 | 5.00 | 2.00 | 1.50 |" in text
    assert "| flipout | resnet20 | one draw of a prediction | other | 1.25 | 1.00 | **0.80** |  |" in text
    assert "- absent: ModuleNotFoundError" in text and "it can't" in text
    assert "| method | one row: 50 draws of one input, over a loop | LSTM: a draw for the batch |" in text
    assert "| `Rank1` | 0.25 | **1.20** |" in text


def test_a_quick_run_says_that_it_is_one() -> None:
    results = small_results()
    results["setup"]["quick"] = True
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


# Two versions.


def source_tree(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / "src" / "bayesify" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def test_another_version_is_imported_beside_this_one(tmp_path: Path) -> None:
    files = {
        "__init__.py": "from bayesify.inner.one import value\nfrom . import inner\nVERSION = 'bayesify'\n",
        "inner/__init__.py": "import bayesify as by\n",
        "inner/one.py": "def value():\n    from bayesify.inner import by\n    return by.VERSION, by.__name__\n",
        "lab/__init__.py": "raise ImportError\n",
    }
    with before_after.imported_from(source_tree(tmp_path, files)) as other:
        assert other.value() == ("bayesify", "bayesify_before") and other is not by
        assert not hasattr(by, "VERSION")
    with pytest.raises(ModuleNotFoundError):
        __import__("bayesify_before")


def test_a_folder_without_the_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="expected the source tree"), before_after.imported_from(tmp_path):
        pass


def test_two_versions_are_compared_with_the_plain_network_and_with_each_other() -> None:
    times = [(1.0, 2.0, 1.0), (1.0, 4.0, 3.0), (2.0, 4.0, 4.0)]
    assert before_after.three_ratios(times) == {"before": 2.0, "after": 2.0, "after/before": 0.75}


def test_a_comparison_of_versions_is_resumed_only_with_the_same_sources(tmp_path: Path) -> None:
    folder, unfinished = source_tree(tmp_path / "before", {"__init__.py": ""}), tmp_path / "rows.jsonl"
    row = {"network": "mlp", "method": "Rank1"}
    unfinished.write_text(json.dumps(before_after.facts(folder, False)) + "\n" + json.dumps(row) + "\n")
    assert next(before_after.measure(folder, False, "", unfinished)) == row
    source_tree(folder, {"__init__.py": "VERSION = 2\n"})
    with pytest.raises(SystemExit, match="measured otherwise"):
        next(before_after.measure(folder, False, "", unfinished))


def test_the_page_of_two_versions_is_that_of_the_results() -> None:
    if not BEFORE_AFTER.exists():
        pytest.skip("before_after.json is not there: python -m benchmarks.speed --before FOLDER writes it")
    page = before_after.page(json.loads(BEFORE_AFTER.read_text()))
    assert BEFORE_AFTER.with_suffix(".md").read_text(encoding="utf-8") == page


# The way through the code.


def test_calls_are_counted_in_the_package_alone(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "from b import inner\ndef outer():\n    return sorted([inner(), inner(), abs(-1)])\n"
    )
    (tmp_path / "b.py").write_text("def inner():\n    return 2\n")
    spaces: dict[str, dict[str, Any]] = {"a": {}, "b": {}}
    for name, space in spaces.items():
        text = (tmp_path / f"{name}.py").read_text().replace("from b import inner\n", "")
        exec(compile(text, str(tmp_path / f"{name}.py"), "exec"), space)
    spaces["a"]["inner"] = spaces["b"]["inner"]
    assert call_path.count_calls(spaces["a"]["outer"], tmp_path) == call_path.Calls(calls=3, files=2, changes=2)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return x", 1),
        ("return x if x else y", 2),
        ("for i in x:\n        while y:\n            pass", 3),
        ("if x and y or z:\n        pass\n    elif y:\n        pass\n    else:\n        pass", 5),
        ("try:\n        pass\n    except ValueError:\n        pass\n    finally:\n        pass", 2),
        ("return [i for i in x if i if y], {i for i in y}", 3),
        ("match x:\n        case 1:\n            pass\n        case _:\n            pass", 3),
        ("with x:\n        return lambda: y or z", 2),
        ("def inner():\n        if x:\n            pass", 1),
    ],
)
def test_complexity_counts_the_ways_through_a_function(body: str, expected: int) -> None:
    found = {name: figure for figure, name in call_path.complexities(f"def function(x, y, z):\n    {body}\n")}
    assert found["function"] == expected


def test_examples_of_the_call_path_hold() -> None:
    found = doctest.testmod(call_path)
    assert found.attempted >= 3 and not found.failed


def test_private_interfaces_of_torch_are_found() -> None:
    text = (
        "torch._C._functorch.f(); torch.utils._pytree; forward_ad._current_level; torch.__version__; self._C; torch.nn"
    )
    assert call_path.PRIVATE.findall(text) == [
        "torch._C._functorch.f",
        "torch.utils._pytree",
        "forward_ad._current_level",
    ]


@pytest.mark.parametrize("case", call_path.CASES)
def test_the_way_through_the_code_is_short(case: str) -> None:
    found, goals = call_path.second(call_path.CASES[case]()), call_path.GOALS[case]
    assert found.calls <= goals["calls"] and found.files <= goals["files"], found


def test_the_core_is_small_and_its_functions_are_simple() -> None:
    found, goals = call_path.source_figures(), call_path.GOALS["source"]
    assert found["core_lines"] <= goals["core_lines"]
    assert found["complexity"] <= goals["complexity"], found["most_complex"]


def test_the_page_of_the_way_is_that_of_the_results() -> None:
    results = json.loads(call_path.RESULTS.read_text())
    assert call_path.RESULTS.with_suffix(".md").read_text(encoding="utf-8") == call_path.page(results)


# Adaptive sampling.


def test_other_orders_of_draws_are_orders_of_complete_blocks() -> None:
    order = shuffled_blocks(11, 3, seed=0)
    assert order.sort().values.tolist() == list(range(11)) and order.tolist() != list(range(11))
    assert (order % 3).tolist() == [place % 3 for place in range(11)]


# Familiarity.


def stored_familiarity() -> dict[str, Any]:
    results: dict[str, Any] = json.loads(familiarity.RESULTS.read_text())
    return results


def test_the_tables_of_familiarity_are_those_of_its_results() -> None:
    results = stored_familiarity()
    assert familiarity.RESULTS.with_suffix(".md").read_text() == familiarity.markdown(results)
    assert familiarity.summary(results) in (ROOT / "docs" / "familiarity.md").read_text()


def test_the_doubt_detects_other_data_as_well_as_either_of_its_parts() -> None:
    results = stored_familiarity()
    goals = {"fashion-mnist": {}, "cifar10": {"svhn": 0.95, "dtd": 0.95, "cifar100": 0.8}}
    for part, special in goals.items():
        for runs in results[part].values():
            assert len(runs) >= 3
            for name in [each for each in runs[0] if each != "test"]:
                mean = {s: sum(run[name][s]["auroc"] for run in runs) / len(runs) for s in familiarity.SCORES}
                assert mean["doubt"] >= special.get(name, 0.98)
                assert mean["doubt"] >= max(mean["entropy"], mean["familiarity"]) - 0.01


def test_absurd_rows_are_flagged_every_one() -> None:
    table = stored_familiarity()["table"]
    assert len(table) == 5
    for runs in table.values():
        assert all(run["absurd"] == 1 and run["test"] < 0.08 for run in runs)


# Balanced draws.


def test_balanced_draws_reach_their_goals_and_the_docs_say_what_they_are_worth() -> None:
    read = json.loads(draws.RESULTS.read_text())["results"]
    results = {key: read[key] for name in draws.TASKS for key in read if key.startswith(f"{name}/")}
    assert draws.RESULTS.with_suffix(".md").read_text(encoding="utf-8") == draws.page(results)
    sizes = tuple(map(str, draws.SIZES))
    assert all(draws.median(results, method, sizes) >= goal for method, goal in draws.GOALS.items())
    worth = {method: round(20 * draws.median(results, method, ("20",))) for method in ("Rank1", "EMP", "MeanField")}
    text = " ".join((ROOT / "docs" / "prediction.md").read_text(encoding="utf-8").split())
    assert "in the median {Rank1} for `Rank1`, {MeanField} to {EMP} for the other methods".format(**worth) in text


# Vectorized draws.


def test_vectorized_draws_gain_a_tenth_on_two_networks_or_more() -> None:
    rows = json.loads(plan.RESULTS.read_text())["rows"]
    assert plan.RESULTS.with_suffix(".md").read_text(encoding="utf-8") == plan.page(rows)
    few = {row["network"] for row in rows if row["rows"] == 1 and row["ratio"] <= 0.9 and "head" not in row["method"]}
    heads = {row["network"] for row in rows if row["ratio"] <= 0.9 and "head" in row["method"]}
    assert len(few) >= 2 and len(heads) >= 2
    assert max(row["ratio"] for row in rows if row["rows"] <= plan.FEW_ROWS) <= 1.2


def test_the_benchmark_of_vectorized_draws_predicts_the_same_both_ways() -> None:
    model = by.convert(plan.Recurrent(), by.Rank1(2)).eval()
    assert plan.ratio(model, torch.randn(1, 3, 37)) > 0


# The regulariser.


def stored_regulariser() -> dict[str, Any]:
    results: dict[str, Any] = json.loads(regulariser.RESULTS.read_text())
    return results


def test_the_tables_of_the_regulariser_are_those_of_its_results() -> None:
    results = stored_regulariser()
    assert regulariser.RESULTS.with_suffix(".md").read_text(encoding="utf-8") == regulariser.markdown(results)
    assert regulariser.summary(results) in (ROOT / "docs" / "training.md").read_text(encoding="utf-8")


def test_the_settings_of_the_regulariser_are_chosen_without_the_seeds_and_sets_that_are_shown() -> None:
    results = stored_regulariser()
    trials = {text: regulariser.Trial(**json.loads(text)) for text in results["trials"]}
    assert not set(regulariser.CHOOSING) & set(regulariser.SHOWING) and len(regulariser.SHOWING) >= 3
    for text, trial in trials.items():
        sets = {"mnist", "notmnist"} if trial.seed in regulariser.SHOWING else {"kmnist", "gtsrb", "svhn"}
        assert {"mnist", "notmnist", "kmnist", "gtsrb", "svhn"} & set(results["trials"][text]) == sets
    choosing = {text: record for text, record in results["trials"].items() if trials[text].seed in regulariser.CHOOSING}
    for method in regulariser.METHODS:
        assert regulariser.chosen({"trials": choosing}, method) == regulariser.chosen(results, method)


def test_intervals_of_the_regulariser_are_students() -> None:
    values = [0.3, 0.1, 0.4]
    found = regulariser.interval(values)
    expected = stats.t.interval(0.95, 2, loc=found[0], scale=stats.sem(values))
    assert found[1:] == pytest.approx(expected, rel=1e-3)
