"""What the report claims: the recommendation, thresholds, errors by class, the data; against what was counted."""

from __future__ import annotations

import csv
import html
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from comparisons import fake_classifier, faked
from sklearn import metrics as sk

import bayesify as by
from bayesify.cli import main
from bayesify.lab.comparison import Comparison
from bayesify.lab.comparison.columns import Column
from bayesify.lab.comparison.table import CompareError
from bayesify.lab.data import Columns, Images
from bayesify.lab.evaluation.rows import ROWS
from bayesify.lab.metrics.proportions import exact_interval, tail_probability
from bayesify.lab.recipes import Recipe
from bayesify.lab.report import write_report
from bayesify.lab.report.abstention import Abstention
from bayesify.lab.report.data_description import input_words
from bayesify.lab.report.figures.draw import curves_figure, reliability_figure
from bayesify.lab.report.figures.model_figures import ModelFigures
from bayesify.lab.report.figures.style import as_svg
from bayesify.lab.report.figures.training_curves import read_log
from bayesify.lab.report.headline import error_cut, recommendation
from bayesify.lab.report.numbers import proportion, share_words
from bayesify.lab.report.tables import Table
from bayesify.lab.report.verdict import best_row
from bayesify.lab.runs import Run, RunError, write_json
from bayesify.lab.training import train

NAMES = ("ant", "bee", "cat <i>")
PLAIN = Recipe.of({"method": "none"})


def predictions(rows: int, seed: int = 0, sharpness: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of three classes that are calibrated at sharpness 1, and the true classes; most rows are easy."""
    draw = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(rows, 3, generator=draw)
    truth = torch.distributions.Categorical(logits=logits).probs
    return sharpness * logits, torch.multinomial(truth, 1, generator=draw).squeeze(1)


def told(*runs: Run, target: float | None = None) -> list[str]:
    found = Comparison.of({run.name: [run] for run in runs})
    index = next(i for i, row in enumerate(found.rows) if row is best_row(found))
    return recommendation(found, ModelFigures(index, found.rows[index], found.split), target)


# Proportions.


@pytest.mark.parametrize(("successes", "rows"), [(0, 7), (7, 7), (1, 1), (97, 100), (9173, 10_000), (3, 2000)])
def test_intervals_of_proportions_are_scipys(successes: int, rows: int) -> None:
    expected = scipy.stats.binomtest(successes, rows).proportion_ci(0.95, "exact")
    assert exact_interval(successes, rows) == pytest.approx((expected.low, expected.high), abs=1e-9)
    for share in (0.02, 0.5, 0.98):
        tail = scipy.stats.binom.sf(successes - 1, rows, share)
        assert tail_probability(successes, rows, share) == pytest.approx(tail, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(
    ("value", "error", "shown"),
    [(0.03612, 0.0084, "0.036"), (0.03612, 0.0012, "0.0361"), (1234.5, 400.0, "1,200"), (1234.5, 100.0, "1,230")],
)
def test_numbers_have_the_digits_of_their_standard_error(value: float, error: float, shown: str) -> None:
    assert Column("x", "x", ("x",)).format(value, error) == shown  # the rule of the Particle Data Group
    assert Column("x", "x", ("x",)).format(-0.00004, 0.01) == "0.000" and share_words(1.0, 0.99, 1.0)[0] == "100"


# Which cases to refer.


def test_promises_are_broken_as_rarely_as_promised() -> None:
    draw, broken, made = np.random.default_rng(0), 0, 0
    for _ in range(300):
        score = draw.uniform(size=600)
        right = draw.uniform(size=600) > 0.2 * score**2  # P(right | score ≤ s) = 1 - 0.2 s²/3, overall 93.3%
        promise = Abstention([score], [right]).best_promise(0.05)
        if promise is not None:
            target, referral = promise
            made += 1
            broken += 1 - 0.2 * referral.thresholds[0] ** 2 / 3 < target
    assert made > 250 and broken <= scipy.stats.binom.isf(0.01, made, 0.05)


def test_a_promise_needs_enough_rows() -> None:
    score, right = np.linspace(0, 1, 500), np.ones(500, bool)
    shares = {n: Abstention([score[:n]], [right[:n]]).reaching(0.98) for n in (100, 148, 149, 250, 500)}
    # 0.98^149 is the first power below 0.05, and 70% of the rows must be as many at first
    assert [n for n, found in shares.items() if found is not None] == [250, 500]
    assert shares[500] is not None and shares[500].share == 0


def test_runs_promise_no_more_than_one_and_as_much_as_their_worst_spread_allows() -> None:
    score, right = np.linspace(0, 1, 400), np.ones(400, bool)
    wrong = right.copy()
    wrong[40:60] = False  # 5% errors, of which the score knows nothing
    alone, twice = Abstention([score], [right]), Abstention([score] * 2, [right] * 2)
    assert alone.at(0).interval == pytest.approx(twice.at(0).interval)
    assert twice.reaching(0.98) is not None and Abstention([score] * 2, [right, wrong]).reaching(0.98) is None


def test_equally_certain_cases_are_referred_together() -> None:
    found = Abstention([np.array([0.1, 0.5, 0.5, 0.5, 0.9])], [np.array([True, True, False, True, False])])
    assert found.at(0.2).answered == (4,) and found.at(0.4).answered == (4,) and found.at(1.0).answered == (0,)
    assert found.at(0.4).correct == (3,) and found.at(0.4).share == pytest.approx(0.2)


@pytest.mark.parametrize("cost", [0.5, 3.0, 40.0])
def test_no_threshold_is_cheaper_than_the_cheapest(cost: float) -> None:
    draw = np.random.default_rng(1)
    score = draw.uniform(size=200)
    wrong = draw.uniform(size=200) < score**2
    found = Abstention([score], [~wrong]).cheapest(cost)
    costs = [cost * wrong[score <= limit].mean() * (score <= limit).mean() + (score > limit).mean() for limit in score]
    ours = cost * found.errors + found.share
    assert ours <= min(cost * wrong.mean(), 1.0) and ours == pytest.approx(min([*costs, 1.0]), abs=0.01 * (1 + cost))


# The recommendation.


def test_the_recommendation_is_counted_and_holds(tmp_path: Path) -> None:
    logits, truth = predictions(2000)
    first, basis = told(fake_classifier(tmp_path / "mine", logits, truth, NAMES))
    share, target = (float(each) for each in re.findall(r"([\d.]+)%", first))
    assert first == f"Refer {share:.0f}% of cases to a person to be {target:g}% right on the rest."
    entropy, right = (
        torch.distributions.Categorical(logits=logits).entropy().numpy(),
        (logits.argmax(1) == truth).numpy(),
    )
    kept = entropy <= np.sort(entropy)[len(entropy) - int(share / 100 * len(entropy)) - 1]
    assert scipy.stats.binomtest(int(right[kept].sum()), int(kept.sum()), target / 100, "greater").pvalue < 0.05
    now, low, high, rest = (float(each) for each in re.findall(r"(?:in|interval|to) ([\d.]+)", basis)[:4])
    expected = scipy.stats.binomtest(int(right.sum()), 2000).proportion_ci(0.95, "exact")
    assert now == pytest.approx(100 * right.mean(), abs=0.05) and rest == pytest.approx(
        100 * right[kept].mean(), abs=0.06
    )
    assert (low, high) == pytest.approx((100 * expected.low, 100 * expected.high), abs=0.06)
    fewer = kept | (entropy <= np.sort(entropy)[len(entropy) - int((share - 2) / 100 * len(entropy)) - 1])
    assert scipy.stats.binomtest(int(right[fewer].sum()), int(fewer.sum()), target / 100, "greater").pvalue > 0.01


def test_a_target_that_is_asked_for_is_the_one(tmp_path: Path) -> None:
    run = fake_classifier(tmp_path / "mine", *predictions(2000), NAMES)
    assert "to be 96% right on the rest" in told(run, target=0.96)[0]
    easy = told(run, target=0.6)
    assert easy[0] == "It is right in at least 60% of cases without a person."
    few = told(run, target=0.9999)
    assert (
        few[0].startswith("The evidence does not suffice to say how many cases to refer") and "99.99% right" in few[1]
    )


def test_few_rows_promise_nothing(tmp_path: Path) -> None:
    first, _ = told(fake_classifier(tmp_path / "mine", *predictions(40), NAMES))
    assert first == "It is right in at least 80% of cases without a person." or "does not suffice" in first
    logits, truth = predictions(12)
    first, basis = told(fake_classifier(tmp_path / "tiny", logits, truth, NAMES))
    assert "does not suffice" in first and "without the 25% that it is least certain of" in basis  # 3 of 12 rows
    assert re.search(r"That does not show that it would be \d+\.?\d*% right\.$", basis)


def test_the_better_model_is_to_be_used_if_it_is_beyond_chance(tmp_path: Path) -> None:
    logits, truth = predictions(2000)
    good = fake_classifier(tmp_path / "good", logits, truth, NAMES)
    rash = fake_classifier(tmp_path / "rash", 3 * logits, truth, NAMES, PLAIN)
    first = told(good, rash)[0]
    assert re.fullmatch(r"Use good; refer \d+% of cases to a person to be [\d.]+% right on the rest\.", first)
    same = fake_classifier(tmp_path / "same", 1.001 * logits, truth, NAMES, PLAIN)
    assert re.match(
        "The evidence does not suffice to choose between (good and same|same and good); with ", told(good, same)[0]
    )


def test_a_recommendation_hides_no_drawback(tmp_path: Path) -> None:
    logits, truth = predictions(2000)
    right = torch.nn.functional.one_hot(truth, 3) * 0.02 + 0.01 * torch.rand(2000, 3)  # nearly always right, and timid
    timid = fake_classifier(tmp_path / "timid", right, truth, NAMES, PLAIN)
    sharp = fake_classifier(tmp_path / "sharp", logits, truth, NAMES)
    sentences = told(sharp, timid)
    assert sentences[0].startswith("Use sharp; ") and sentences[-1] == "By accuracy, timid is better than sharp."
    same = fake_classifier(tmp_path / "same", logits, truth, NAMES, PLAIN)
    metrics = same.metrics
    write_json(same.folder / "metrics.json", metrics | {"draws": 20})
    assert "The cheapest of these is " not in " ".join(told(same, sharp)[:1])
    assert told(same, sharp)[-1] == "The cheapest of these is sharp: it needs a single forward pass."


def test_of_several_models_promises_are_more_careful(tmp_path: Path) -> None:
    logits, truth = predictions(2000)
    alone = fake_classifier(tmp_path / "alone", logits, truth, NAMES)
    others = [fake_classifier(tmp_path / f"o{i}", 4 * logits, truth, NAMES) for i in range(3)]

    def referred(*runs: Run) -> float:
        return float(re.findall(r"refer ([\d.]+)%", told(*runs, target=0.97)[0].lower())[0])

    assert referred(alone, *others) >= referred(alone)


def test_rows_of_several_answers_have_a_page_without_thresholds(tmp_path: Path) -> None:
    run = fake_classifier(tmp_path / "mine", *predictions(60), NAMES)
    with np.load(run.folder / ROWS) as rows:  # as those of several labels or pixels: the share that is right
        kept = {key: each for key, each in rows.items() if key not in ("test_label", "test_truth", "test_nll")}
    np.savez(run.folder / ROWS, **{**kept, "test_correct": np.linspace(0.5, 1, 60)})
    first, basis = told(run)
    assert first == "The evidence does not suffice to say how many cases to refer to a person."
    low, high = (100 * each for each in run.metrics["test"]["interval"]["accuracy"])
    ends = re.findall(r"of labels or pixels \(95% interval ([\d.]+) to ([\d.]+)\)", basis)[0]
    assert [float(end) for end in ends] == pytest.approx([low, high], abs=0.51)
    page = Found(tmp_path, run).text
    assert "Thresholds" not in page and 'id="classes"' not in page and 'id="calibration"' in page


def test_regression_is_told_what_referrals_save_and_whether_intervals_hold(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    x = draw.uniform(-2, 2, 700)
    y = x + np.where(x > 0, 1.0, 0.05) * draw.normal(size=700)
    (tmp_path / "t.csv").write_text("\n".join(["x,y", *(f"{a:.4f},{b:.4f}" for a, b in zip(x, y, strict=True))]))
    data = {"name": "table", "path": str(tmp_path / "t.csv"), "options": {"target": "y", "task": "regression"}}
    given = {"data": {**data, "test": 0.4}, "model": {"name": "mlp"}, "training": {"epochs": 30}, "method": "none"}
    given["likelihood"] = {"precision": "input"}
    run = train(Recipe.of(given), tmp_path / "mine", progress=False)
    first, basis = told(run)
    with np.load(run.folder / ROWS) as rows:
        std, squares, inside = rows["test_std"], rows["test_residual"][:, 0] ** 2, rows["test_quantile"][:, 0]
    kept = std <= np.sort(std)[len(std) - int(0.2 * len(std)) - 1]
    cut = 100 * (1 - np.sqrt(squares[kept].mean() / squares.mean()))
    shown, low, high = (
        float(each) for each in re.findall(r"by ([\d.]+)% \(95% interval ([\d.]+) to ([\d.]+)\)", first)[0]
    )
    assert first.startswith("Refer the 20% least certain cases to a person to cut the RMSE by ")
    assert shown == pytest.approx(cut, abs=0.6) and 0 < low < shown < high
    held = float(re.findall(r"hold ([\d.]+)% of targets", basis)[0])
    assert held == pytest.approx(100 * ((inside >= 0.05) & (inside <= 0.95)).mean(), abs=0.6)
    low, high = run.metrics["test"]["interval"]["coverage"]
    assert ("as they should" in basis) == (low <= 0.9 <= high)
    shuffled = {"test_std": draw.permutation(std)}
    with np.load(run.folder / ROWS) as rows:
        np.savez(run.folder / ROWS, **{**rows, **shuffled})
    found = Comparison.of({"mine": [run]})
    assert error_cut(ModelFigures(0, found.rows[0], "test")) is None
    assert told(run)[0] == "The evidence does not suffice to say that its uncertainty finds its errors."


# The page.


class Found:
    """The page of a report of made-up runs, and what is beside it."""

    def __init__(self, home: Path, *runs: Run, **options: Any) -> None:
        write_report(list(runs), home / "report.html", **options)
        self.text, self.files = (home / "report.html").read_text(), home / "report_files"

    def csv(self, name: str) -> list[dict[str, str]]:
        with (self.files / name).open(newline="") as file:
            return list(csv.DictReader(file))

    def section(self, key: str) -> str:
        return self.text.split(f'<details class="section" id="{key}"')[1].split('<details class="section"')[0]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, torch.Tensor, torch.Tensor]:
    """Two models on the same rows."""
    home = tmp_path_factory.mktemp("made")
    logits, truth = predictions(1200)
    mine = fake_classifier(home / "mine", logits, truth, NAMES)
    rash = fake_classifier(home / "rash", 3 * logits, truth, NAMES, PLAIN)
    counts = {"train": [50, 30, 20], "test": truth.bincount().tolist()}
    described = {"rows": {"train": 100, "test": 1200}, "classes": counts, "missing": {}}
    write_json(rash.folder / "metrics.json", rash.metrics | {"data": described})
    return Found(home, rash, mine, error_costs=[7.0], target_accuracy=0.94), logits, truth


def test_the_page_begins_with_the_recommendation(made: Any) -> None:
    page = made[0].text
    (first,) = re.findall(r'<p class="recommendation"><b>(.*?)</b>', page)
    assert first.startswith("Use mine; refer ") and "to be 94% right on the rest" in first
    assert page.index('class="recommendation"') < page.index("<table") and "±" not in page.split("<main")[1]


def test_the_confusion_matrix_is_scikit_learns(made: Any) -> None:
    page, logits, truth = made
    label = logits.argmax(1)
    matrix = sk.confusion_matrix(truth, label)
    rows = page.csv("confusion-2-mine.csv")
    assert [[int(row[f"predicted {name}"]) for name in NAMES] for row in rows] == matrix.tolist()
    shown = re.findall(r'<table class="confusion">.*?</table>', page.section("classes"), re.DOTALL)[0]  # the best first
    cells = [int(cell) if cell else 0 for cell in re.findall(r"<td[^>]*>(\d*)</td>", shown.split("<tbody>")[1])]
    assert cells == matrix.ravel().tolist()
    shares = [float(each) for each in re.findall(r"--share: ([\d.]+)", shown)]
    assert shares == pytest.approx([s for s in (matrix / matrix.sum(1, keepdims=True)).ravel() if s], abs=6e-4)


def test_precision_and_recall_are_scikit_learns(made: Any) -> None:
    page, logits, truth = made
    precision, recall, _, rows = sk.precision_recall_fscore_support(truth, logits.argmax(1))
    for k, row in enumerate(page.csv("classes-2-mine.csv")):
        assert (float(row["precision"]), float(row["recall"])) == pytest.approx((precision[k], recall[k]))
        assert int(row["rows"]) == rows[k] and row["class"] == NAMES[k]
    shown = page.section("classes").split("Precision and recall")[1]
    pattern = r'<td data-value="[\d.]+">([\d.]+)<small>([\d.]+) to ([\d.]+)</small>'
    for (value, low, high), k in zip(re.findall(pattern, shown)[1:6:2], range(3), strict=True):
        hits, many = int((logits.argmax(1)[truth == k] == k).sum()), int((truth == k).sum())
        ends = scipy.stats.binomtest(hits, many).proportion_ci(0.95, "exact")
        expected = [100 * hits / many, 100 * ends.low, 100 * ends.high]
        assert [float(value), float(low), float(high)] == pytest.approx(expected, abs=0.06)


def test_seeds_that_share_rows_are_no_better_evidence_than_one() -> None:
    assert proportion(270, 300, runs=3) == proportion(90, 100) and proportion(270, 300) != proportion(90, 100)


def test_names_of_classes_are_text(made: Any) -> None:
    assert "<i>" not in re.sub(r'<i style="width', "", made[0].section("classes"))
    assert html.escape(NAMES[2]) in made[0].section("data") and html.escape(NAMES[2]) in made[0].section("classes")


def test_many_classes_have_their_most_frequent_errors_listed(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    truth = torch.arange(30).repeat(20)
    logits = 3 * torch.nn.functional.one_hot(truth, 30) + torch.randn(600, 30, generator=draw)
    logits[truth == 4, 9] += 9  # most of class 4 are taken for class 9
    page = Found(tmp_path, fake_classifier(tmp_path / "mine", logits, truth, [f"c{i}" for i in range(30)]))
    shown = page.section("classes")
    assert "Confusion matrix" not in shown and "Classes with the lowest recall" in shown
    matrix = sk.confusion_matrix(truth, logits.argmax(1))
    count = int(matrix[4, 9])
    listed = re.findall(r'<th scope="row">(\w+)</th><td class="words">(\w+)</td><td>(\d+)</td><td>([\d.]+)</td>', shown)
    assert listed[0] == ("c4", "c9", str(count), f"{100 * count / 20:.1f}") and len(listed) == 20
    assert re.findall(r'<th scope="row">(\w+)</th>', shown.split("lowest recall")[1])[0] == "c4"


def test_the_data_are_described_with_the_balance_of_classes(made: Any) -> None:
    shown, truth = made[0].section("data"), made[2]
    assert "100 train and 1,200 test" in shown and "arrays of 2 numbers" in shown and "<dd>3</dd>" in shown
    for k, name in enumerate(NAMES):
        row = shown.split(f'<th scope="row">{html.escape(name)}</th>')[1].split("</tr>")[0]
        counts = [int(each) for each in re.findall(r'data-value="(\d+)"', row)]
        assert counts == [[50, 30, 20][k], int((truth == k).sum())]
        assert re.findall(r"<small>([\d.]+)%", row)[0] == str([50, 30, 20][k])


def test_inputs_are_described_in_words() -> None:
    columns = Columns(("age", "pay"), (0.0, 0.0), (1.0, 1.0), ("sex",), (("f", "m"),))
    assert input_words(columns) == "2 columns of numbers (age and pay); 1 column of category (sex)"
    assert input_words(Images((1, 28, 20), (0.5,), (0.2,))) == "images of 20 × 28 pixels in 1 channel"
    many = Columns(tuple(f"x{i}" for i in range(40)), (0.0,) * 40, (1.0,) * 40)
    assert input_words(many).startswith("40 columns of numbers (x0, ") and input_words(many).endswith(
        "x29 and 10 more)"
    )


def test_thresholds_are_by_coverage_by_accuracy_and_by_cost(made: Any) -> None:
    page, logits, truth = made
    entropy, right = (
        torch.distributions.Categorical(logits=logits).entropy().numpy(),
        (logits.argmax(1) == truth).numpy(),
    )
    lines = {row["rule"]: row for row in page.csv("thresholds-2-mine.csv")}
    for share in (0.05, 0.2, 0.5):
        line, kept = lines[f"refer {share:.0%}"], entropy <= np.quantile(entropy, 1 - share, method="inverted_cdf")
        assert float(line["accuracy"]) == pytest.approx(right[kept].mean(), abs=1e-3)
        assert float(line["referred"]) == pytest.approx(share, abs=2e-3)
        assert (entropy > float(line["threshold"])).mean() == pytest.approx(float(line["referred"]), abs=1e-3)
    goal = lines["be 94% right"]
    assert float(goal["accuracy"]) > 0.94 and "refer 0%" in lines
    kept = entropy <= float(lines["an error costs 7 referrals"]["threshold"]) + 1e-9
    cost = 100 * (7 * (~right & kept).mean() + (~kept).mean())
    told = re.match(r"([\d.]+) referrals per 100 cases; ([\d.]+) if none", lines["an error costs 7 referrals"]["note"])
    assert told is not None
    assert [float(each) for each in told.groups()] == pytest.approx([cost, 100 * 7 * (~right).mean()], abs=0.6)
    assert not any(rule.startswith("an error costs 20") for rule in lines)


def test_date_and_versions_are_there(made: Any) -> None:
    page = made[0]
    assert re.search(r"Written on \d{4}-\d\d-\d\d by bayesify " + re.escape(by.__version__), page.text)
    runs = page.section("run")
    assert f"torch {torch.__version__}" in runs and re.search(r"Begun \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", runs)


def test_differences_are_beside_the_values_and_the_best_is_beyond_chance(made: Any) -> None:
    page, logits, truth = made
    table = re.findall(r'<table id="table-all".*?</table>', page.text, re.DOTALL)[0]
    assert "with the difference Δ from rash and 95% intervals" in table
    mine = table.split('<th scope="row">mine</th>')[1].split("</tr>")[0]
    accuracy, nll, ece = mine.split("<td ")[1:4]
    nlls = [torch.nn.functional.cross_entropy(each, truth, reduction="none").double() for each in (logits, 3 * logits)]
    apart = (nlls[0] - nlls[1]).numpy()
    shown, low, high = (
        float(each.replace("−", "-"))
        for each in re.findall(r"Δ ([−+][\d.]+)</small><small>([−+][\d.]+) to ([−+][\d.]+)", nll)[0]
    )
    margin = 1.96 * apart.std(ddof=1) / np.sqrt(len(apart))
    assert shown == pytest.approx(apart.mean(), rel=0.05) and (low + high) / 2 == pytest.approx(shown, abs=0.3 * margin)
    assert (high - low) / 2 == pytest.approx(margin, rel=0.2)
    assert 'class="best"' in nll and 'class="best"' in ece and 'class="best"' not in accuracy
    assert "Δ 0.0</small>" in accuracy or "Δ 0.00</small>" in accuracy  # the same labels


def test_seeds_have_differences_in_place_of_deviations(tmp_path: Path) -> None:
    found = faked(
        tmp_path, plain=[(0.31, 0.05), (0.3, 0.04), (0.33, 0.06)], A=[(0.2, 0.01), (0.21, 0.05), (0.24, 0.03)]
    )
    table = Table.of(found, "all", "All", found.columns)
    (_, plain), (_, ours) = table.rows
    low, high = scipy.stats.ttest_rel([0.2, 0.21, 0.24], [0.31, 0.3, 0.33]).confidence_interval(0.95)
    assert plain[1].text == "0.313" and "±" not in str(table.rows)
    assert ours[1].below[0] == "Δ −0.097" and ours[1].is_best
    ends = [float(end.replace("−", "-")) for end in ours[1].below[1].split(" to ")]
    assert ends == pytest.approx([low, high], abs=6e-4)
    assert not ours[2].is_best and table.caption == ", with the difference Δ from plain and 95% intervals over 3 seeds"


def test_options_of_the_report_are_checked(made: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = fake_classifier(tmp_path / "mine", *predictions(50), NAMES)
    for wrong in (0.0, 1.0, 98.0, float("nan")):
        with pytest.raises(CompareError, match=r"target_accuracy=.*expected a share between 0 and 1, such as 0.98"):
            write_report([run], tmp_path / "report.html", target_accuracy=wrong)
    for wrong in (0.0, -3.0, float("inf"), float("nan")):
        with pytest.raises(CompareError, match=r"error_costs has .*expected numbers above 0"):
            write_report([run], tmp_path / "report.html", error_costs=[wrong])
    page = tmp_path / "page.html"
    words = ["report", str(run.folder), "--out", str(page), "--target-accuracy", "0.6"]
    assert main([*words, "--error-cost", "3", "--error-cost", "30"]) == 0
    assert "an error costs 30 referrals" in page.read_text() and "be 60% right" in page.read_text()
    assert main([*words[:-1], "98"]) == 2 and "such as 0.98" in capsys.readouterr().err


# The figures.


def test_values_are_where_the_pointer_finds_them() -> None:
    at, value = np.array([0.0, 1.0, 2.0, 4.0]), np.array([0.5, 0.1, 0.2, 0.7])
    curves = {"a <b>": (at, value), "other": (at[1:], value[1:] / 2)}
    text = as_svg(curves_figure(curves, "epoch", "NLL"), "key", "a figure")
    line = re.findall(r'<path d="([^"]*)"[^>]*stroke-width: 1.6', text)[0]
    drawn = [float(x) for x, _ in re.findall(r"[ML] ([\d.]+) ([\d.]+)", line)]
    marks = re.findall(
        r'<rect class="hit" x="([\d.]+)" y="[\d.]+" width="([\d.]+)" height="[\d.]+"><title>([^<]*)<', text
    )
    assert len(marks) == 4 and all(
        float(x) < at < float(x) + float(w) for at, (x, w, _) in zip(drawn, marks, strict=True)
    )
    assert float(marks[1][0]) == pytest.approx((drawn[0] + drawn[1]) / 2, abs=0.06)  # strips meet halfway
    assert marks[0][2] == "NLL, at epoch 0: a &lt;b&gt; 0.5" and marks[3][2].endswith("a &lt;b&gt; 0.7, other 0.35")
    bins = {"middle": [0.5, 0.9], "rows": [3, 7], "confidence": [0.52, 0.91], "accuracy": [0.33, 1.0]}
    bars = as_svg(reliability_figure({k: np.array(v) for k, v in bins.items()}), "key", "a figure")
    assert "<title>mean confidence 52.0%: accuracy 33.0% of 3 rows</title></rect>" in bars


def test_training_curves_are_means_of_the_log(tmp_path: Path) -> None:
    lines = ["step,epoch,log_likelihood,val_nll", "1,0,-2.0,", "2,0,-1.0,", "2,0,,1.25", "3,1,-0.5,", "4,1,,0.75"]
    (tmp_path / "metrics.csv").write_text("\n".join(lines))
    found = {name: [each.tolist() for each in curve] for name, curve in read_log(tmp_path / "metrics.csv").items()}
    assert found == {"training": [[1.0, 2.0], [1.5, 0.5]], "validation": [[1.0, 2.0], [1.25, 0.75]]}
    run = fake_classifier(tmp_path / "mine", *predictions(50), NAMES)
    (run.folder / "metrics.csv").write_text("\n".join(lines))
    page = Found(tmp_path, run)
    assert 'id="training"' in page.text and "last epoch: training 0.5, validation 0.75" in page.text
    assert [float(row["nll"]) for row in page.csv("training-1-mine.csv")] == [1.5, 0.5, 1.25, 0.75]
    (run.folder / "metrics.csv").write_text("step,epoch,val_nll\n1,x,3\n")
    with pytest.raises(RunError, match=r"metrics\.csv: not a training log .*remove it"):
        write_report([run], tmp_path / "report.html")
