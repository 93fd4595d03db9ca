"""The report: its words, that its numbers are those of the runs, its files, and what it refuses."""

from __future__ import annotations

import csv
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import scipy.stats
import yaml
from comparisons import BASE, RECIPES, SHORT, enrich, fake, faked
from PIL import Image

import bayesify as by
from bayesify.cli import main
from bayesify.lab.analyses import Bands, panels
from bayesify.lab.comparison.chance import paired_difference
from bayesify.lab.comparison.compare_recipes import compare
from bayesify.lab.comparison.find_runs import group_by_model, runs_at
from bayesify.lab.comparison.table import CompareError, Comparison
from bayesify.lab.evaluation import gallery_of, rows_of
from bayesify.lab.metrics import calibration_bins
from bayesify.lab.recipes import Recipe
from bayesify.lab.report import write_report
from bayesify.lab.report.figures import style
from bayesify.lab.report.figures.draw import risk_figure, shifts_figure
from bayesify.lab.report.figures.style import as_svg
from bayesify.lab.report.verdict import best_row, verdict
from bayesify.lab.runs import Run, RunError, write_json
from bayesify.lab.shift import CORRUPTIONS, mean_corruption_error
from bayesify.lab.training import train


@pytest.fixture(autouse=True)
def _coarse_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the reports that tests write; in that of `rich`, which is written before, pictures are as they should be."""
    monkeypatch.setattr(style, "DOTS", 40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compare")


@pytest.fixture(scope="module")
def trained(folder: Path) -> Comparison:
    return compare(RECIPES, folder, seeds=2, base=BASE, progress=False)


@pytest.fixture(scope="module")
def rich(trained: Comparison, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of runs that were also evaluated on other sets, under shifts and an attack."""
    home = tmp_path_factory.mktemp("rich") / "runs"
    shutil.copytree(folder, home)
    for run in runs_at([home]):
        enrich(run)
    write_report(runs_at([home]), home.parent / "report.html")
    return home.parent / "report.html"


class Page(HTMLParser):
    """What a page consists of, as far as it matters here."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.labels: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.cells: dict[str, list[list[str]]] = {}
        self.text = path.read_text()
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        self.ids += [values["id"]] if "id" in values else []
        self.labels += [values["aria-label"]] if tag == "svg" and "aria-label" in values else []
        self.links += [values[name] for name in ("src", "href", "xlink:href") if name in values]
        if tag == "table":
            self.table = self.cells.setdefault(values.get("id", "other"), [])
        if tag == "tr":
            self.table.append([])
        if tag == "td" and "data-value" in values:
            self.table[-1].append(values["data-value"])

    def numbers(self, table: str) -> list[list[float | None]]:
        """The values of a table's body."""
        return [[float(cell) if cell else None for cell in row] for row in self.cells[f"table-{table}"] if row]


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# The words.


def test_the_words_say_who_wins(tmp_path: Path) -> None:
    found = faked(tmp_path, plain=[(0.3, 0.05)] * 2, A=[(0.2, 0.01), (0.35, 0.02)], B=[(0.1, 0.01), (0.1, 0.01)])
    assert verdict(found) == (
        "B beats the plain network on NLL and ECE; A on neither (means over 2 seeds). "
        "NLL: B 0.100, plain 0.300, a difference of −0.200 (−0.200 to −0.200); better in 2 of 2 seeds. "
        "ECE: B 1.0%, plain 5.0%, a difference of −4.0 (−4.0 to −4.0); better in 2 of 2 seeds."
    )


def test_the_words_say_who_does_not(tmp_path: Path) -> None:
    some = faked(tmp_path / "some", plain=[(0.3, 0.05)], A=[(0.2, 0.01)], B=[(0.2, 0.09)])
    assert verdict(some).startswith("A beats the plain network on NLL and ECE; B on NLL only; B is worse on ECE. NLL: ")
    none = faked(tmp_path / "none", plain=[(0.3, 0.05)], A=[(0.2, 0.06)], B=[(0.3, 0.05)], C=[(0.4, 0.06)])
    expected = (
        "No Bayesian model beats the plain network on both NLL and ECE: A on NLL only; B and C on neither; "
        "A is worse on ECE; C is worse on NLL and ECE."
    )
    assert verdict(none).startswith(expected)
    alone = faked(tmp_path / "alone", plain=[(0.3, 0.05)], A=[(0.2, 0.01)])
    assert verdict(alone).startswith("A beats the plain network on NLL and ECE. NLL: A 0.200, plain 0.300.")


@pytest.mark.parametrize("differences", [[-0.1, -0.2, -0.3], [-0.1, -0.2, -0.1, 0.3], [0.2, 0.25, 0.21, 0.23, 0.2]])
def test_margins_of_differences_are_those_of_a_paired_t_test(differences: list[float]) -> None:
    theirs = [0.5, 0.7, 0.2, 0.9, 0.4][: len(differences)]
    ours = [a + b for a, b in zip(theirs, differences, strict=True)]
    mean, margin = paired_difference(ours, theirs)
    low, high = scipy.stats.ttest_rel(ours, theirs).confidence_interval(0.95)
    assert (mean - margin, mean + margin) == pytest.approx((low, high))


def test_a_difference_that_all_seeds_agree_on_may_still_be_chance(tmp_path: Path) -> None:
    plain = [(0.3, 0.05)] * 3
    ours = [(0.29, 0.049), (0.299, 0.01), (0.2, 0.03)]  # p-values of the paired t-test: 0.35 and 0.21
    found = faked(tmp_path / "chance", plain=plain, A=ours)
    assert verdict(found).startswith("No Bayesian model beats the plain network on both NLL and ECE: A on neither (")
    assert verdict(found).count("better in 3 of 3 seeds; may be due to chance.") == 2
    clear = faked(tmp_path / "clear", plain=plain, A=[(0.2, 0.049), (0.21, 0.01), (0.2, 0.03)])
    assert verdict(clear).startswith("No Bayesian model beats the plain network on both NLL and ECE: A on NLL only (")


def test_the_best_model_is_one_that_no_other_beats_if_there_is_one(tmp_path: Path) -> None:
    chance = faked(tmp_path / "chance", plain=[(0.3, 0.05)] * 3, A=[(0.1, 0.07), (0.31, 0.04), (0.3, 0.045)])
    assert best_row(chance).name == "A"
    worse = faked(  # B has the lowest NLL by chance, and a worse ECE than both beyond it
        tmp_path / "worse", plain=[(0.3, 0.05)] * 3, A=[(0.29, 0.05)] * 3, B=[(0.1, 0.09), (0.31, 0.09), (0.3, 0.09)]
    )
    assert best_row(worse).name == "A"


def test_the_best_plain_network_is_the_one_to_beat(tmp_path: Path) -> None:
    found = faked(tmp_path, plain=[(0.3, 0.05)], plain_longer=[(0.1, 0.05)], A=[(0.2, 0.01)])
    expected = "No Bayesian model beats the best plain network on both NLL and ECE: A on ECE only; A is worse on NLL."
    assert verdict(found).startswith(expected) and "plain_longer 0.100" in verdict(found)


def test_another_temperature_makes_no_network_bayesian(tmp_path: Path) -> None:
    recipe = Recipe.of({"method": "temperature", "model": {"weights": "w.pt"}})
    runs = {"temperature": [fake(tmp_path / "t", recipe)], "A": [fake(tmp_path / "A", nll=0.1, ece=0.01)]}
    assert verdict(Comparison.of(runs)).endswith("There is no plain network to compare with.")


def test_another_temperature_is_no_plain_network_but_may_be_better(tmp_path: Path) -> None:
    recipe = Recipe.of({"method": "temperature", "model": {"weights": "w.pt"}})
    runs = {
        "wide": [fake(tmp_path / "wide", Recipe.of({"method": "none"}), nll=0.3, ece=0.05)],
        "A": [fake(tmp_path / "A", nll=0.2, ece=0.03)],
        "scaled": [fake(tmp_path / "t", recipe, nll=0.25, ece=0.01)],
    }
    assert verdict(Comparison.of(runs)) == (
        "A beats the plain network on NLL and ECE. NLL: A 0.200, wide 0.300. ECE: A 3.0%, wide 5.0%. "
        "scaled, which is not Bayesian, has ECE 1.0%."
    )


def test_of_single_runs_that_may_be_chance_whose_intervals_overlap(tmp_path: Path) -> None:
    plain, ours = {"nll": [0.25, 0.35], "ece": [0.04, 0.06]}, {"nll": [0.15, 0.24], "ece": [0.02, 0.045]}
    runs = {
        "plain": [fake(tmp_path / "p", Recipe.of({"method": "none"}), nll=0.3, ece=0.05, interval=plain)],
        "A": [fake(tmp_path / "A", nll=0.2, ece=0.03, interval=ours)],
    }
    assert verdict(Comparison.of(runs)).startswith(
        "No Bayesian model beats the plain network on both NLL and ECE: A on NLL only. NLL: A 0.200, plain 0.300. "
        "ECE: A 3.0%, plain 5.0%; may be due to chance."
    )


def test_seeds_are_compared_with_themselves(tmp_path: Path) -> None:
    found = faked(tmp_path, plain=[(0.1, 0.1), (0.2, 0.2), (0.3, 0.3)], A=[(0.09, 0.09), (0.19, 0.19), (0.29, 0.29)])
    plain, ours = (list(row.runs) for row in found.rows)
    assert "better in 3 of 3 seeds" in verdict(Comparison.of({"plain": plain, "A": ours[::-1]}))


def test_without_an_opponent_nothing_is_claimed(tmp_path: Path) -> None:
    found = faked(tmp_path, A=[(0.2, 0.01)], B=[(0.3, 0.05)])
    assert verdict(found) == (
        "A has NLL 0.200 and ECE 1.0%, the best of them. There is no plain network to compare with."
    )


def test_the_page_has_the_verdict(rich: Path) -> None:
    assert verdict(Comparison.of(group_by_model(runs_at([rich.with_name("runs")])))) in Page(rich).text


def test_sections_have_the_names_of_the_field_and_links_to_them(rich: Path) -> None:
    text = rich.read_text()
    heads = dict(re.findall(r'<details class="section" id="(\w+)" open>\s*<summary><h2>(.*?)</h2>', text))
    names = ("Calibration", "Selective prediction", "Out-of-distribution detection", "Common corruptions")
    assert {*names, "Adversarial attacks", "Errors by class", "Data", "Metrics"} < {*heads.values()}
    assert re.findall(r'<li><a href="#(\w+)">', text) == list(heads)


def test_the_share_of_noise_that_is_detected_can_be_counted(trained: Comparison) -> None:
    for row in trained.rows:
        each = [(rows_of(run)["test_entropy"], rows_of(run)["noise_entropy"]) for run in row.runs]
        alarm = [np.sort(test)[len(test) - 1 - int(0.05 * len(test))] for test, _ in each]
        counted = [(noise > limit).mean() for (_, noise), limit in zip(each, alarm, strict=True)]
        assert row.measured_values["noise_rejected"] == pytest.approx(counted, abs=1e-6)


# The numbers.


def test_the_page_says_what_the_runs_say(rich: Path) -> None:
    page, models = Page(rich), group_by_model(runs_at([rich.with_name("runs")]))
    tests = {name: [run.metrics["test"] for run in runs] for name, runs in models.items()}
    accuracy, nll, ece, by_entropy, by_epistemic = list(zip(*page.numbers("all"), strict=True))[:5]
    for i, runs in enumerate(tests.values()):
        assert accuracy[i] == pytest.approx(fmean(run["accuracy"] for run in runs))
        assert nll[i] == pytest.approx(fmean(run["nll"] for run in runs))
        assert ece[i] == pytest.approx(fmean(run["ece"] for run in runs))
        assert by_entropy[i] == pytest.approx(fmean(run["ood"]["noise"]["entropy"]["auroc"] for run in runs))
    assert by_epistemic[0] is None and by_epistemic[1] is not None
    calibration = page.numbers("calibration")
    wanted = ("top5", "brier", "gibbs_nll", "mean_logits_nll", "ece", "ece20", "adaptive_ece", "classwise_ece", "mce")
    for row, runs in zip(calibration, tests.values(), strict=True):
        assert row == pytest.approx([fmean(run[key] for run in runs) for key in wanted])
    selective = page.numbers("selective")
    for row, runs in zip(selective, tests.values(), strict=True):
        shares = ("0.95", "0.9", "0.8")
        at = [fmean(run["accuracy_at"][share] for run in runs) for share in shares]
        assert row[:4] == pytest.approx([fmean(run["aurc"] for run in runs), *at])
        if row is selective[0]:  # a single network has no mutual information to rank by
            assert row[4:] == [None] * 4
            continue
        at = [fmean(run["accuracy_at_epistemic"][share] for run in runs) for share in shares]
        assert row[4:] == pytest.approx([fmean(run["aurc_epistemic"] for run in runs), *at])
    for row, runs in zip(page.numbers("attack"), tests.values(), strict=True):
        assert row[1] == pytest.approx(fmean(run["attack"]["pgd"]["robust_accuracy"] for run in runs))
    assert "pgd: epsilon 0.03, steps 40, step size 0.002." in page.text


def test_corruption_is_measured_against_the_plain_network_of_the_seed(rich: Path) -> None:
    models = group_by_model(runs_at([rich.with_name("runs")]))
    shift = {name: [run.metrics["test"]["shift"] for run in runs] for name, runs in models.items()}
    plain, rank1, _ = Page(rich).numbers("shift")
    assert plain[3:] == [1.0, 1.0]
    pairs = zip(shift["Rank1"], shift["plain network"], strict=True)
    assert rank1[3] == pytest.approx(fmean(mean_corruption_error(*pair) for pair in pairs))
    assert rank1[0] == pytest.approx(fmean(run.metrics["test"]["corrupted"]["accuracy"] for run in models["Rank1"]))


def test_a_single_run_has_intervals_and_several_have_deviations(trained: Comparison, tmp_path: Path) -> None:
    run = trained.rows[1].runs[0]
    write_report([run], tmp_path / "one.html")
    low, high = run.metrics["test"]["interval"]["nll"]
    value, shown = re.findall(
        r'<td data-value="([\d.]+)">[\d.]+<small>([\d.]+ to [\d.]+)</small>', _all_models(tmp_path / "one.html")
    )[1]
    assert float(value) == run.metrics["test"]["nll"] and "Δ" not in _all_models(tmp_path / "one.html")
    assert [float(end) for end in shown.split(" to ")] == pytest.approx([low, high], abs=0.06)
    write_report(trained, tmp_path / "all.html")
    text = _all_models(tmp_path / "all.html")
    assert "±" not in text and "Δ" in text and "95% intervals over 2 seeds" in text


def _all_models(page: Path) -> str:
    return page.read_text().split('<table id="table-all"')[1].split("</table>")[0]


def test_how_changed_inputs_were_made_is_said_of_each_model_where_it_differs(rich: Path, tmp_path: Path) -> None:
    assert "Measured on" not in rich.read_text()  # of runs that don't know it
    home = tmp_path / "runs"
    shutil.copytree(rich.with_name("runs"), home)
    for run in runs_at([home]):
        name, metrics = run.folder.parent.name, run.metrics
        own, few = metrics["test"], 5 if name == "base" else 7
        own["shift_rows"] = own["attack"]["pgd"]["n"] = few
        own["attack"]["pgd"] |= {"samples": 1 if name == "base" else 4, "epsilon": 0.1 if name == "Rank1" else 0.03}
        write_json(run.folder / "metrics.json", metrics)
    write_report(runs_at([home]), tmp_path / "report.html")
    text, n = (tmp_path / "report.html").read_text(), own["n"]
    rows = f"5 of the {n} rows (plain network) and 7 of the {n} rows (Rank1 and BatchEnsemble)"
    assert f"Measured on {rows}." in text
    assert (
        "pgd: epsilon 0.03 (plain network and BatchEnsemble) and 0.1 (Rank1), steps 40, step size 0.002, "
        f"draws 1 (plain network) and 4 (Rank1 and BatchEnsemble), on {rows}." in text
    )


def test_models_without_shifts_leave_others_theirs(rich: Path, tmp_path: Path) -> None:
    home = tmp_path / "runs"
    shutil.copytree(rich.with_name("runs"), home)
    for run in runs_at([home / "base"]):
        metrics = run.metrics
        del metrics["test"]["shift"], metrics["test"]["corrupted"]
        write_json(run.folder / "metrics.json", metrics)
    write_report(runs_at([home]), tmp_path / "report.html")
    for name in ("mixing", "corruptions", "each"):
        models = {row["model"] for row in read_csv(tmp_path / "report_files" / f"shift-{name}-nll.csv")}
        assert models == {"Rank1", "BatchEnsemble"}
    for run in runs_at([home]):
        metrics = run.metrics
        metrics["test"].pop("shift", None)
        write_json(run.folder / "metrics.json", metrics)
    write_report(runs_at([home]), tmp_path / "report.html")
    shift = (tmp_path / "report.html").read_text().split('id="shift"')[1].split('<details class="section"')[0]
    assert "<table" in shift and "legend" not in shift


def test_what_was_not_measured_has_no_place(trained: Comparison, tmp_path: Path) -> None:
    write_report(trained, tmp_path / "report.html")
    page = Page(tmp_path / "report.html")
    assert not {"shift", "attack", "table-shift", "table-attack"} & set(page.ids)
    assert {"ood", "gallery", "table-ood"} <= set(page.ids)


def test_runs_that_know_only_the_core_have_a_page(trained: Comparison, tmp_path: Path) -> None:
    home = tmp_path / "old"
    shutil.copytree(trained.rows[0].runs[0].folder, home)
    known = Run(home).metrics
    core = {key: known["test"][key] for key in ("n", "accuracy", "nll", "ece")}
    write_json(home / "metrics.json", {"test": core, "overhead": 0.0})
    for name in ("gallery.npz", "model.safetensors"):
        (home / name).unlink()
    write_report([Run(home)], tmp_path / "report.html")
    page = Page(tmp_path / "report.html")
    assert "the model is right in" in page.text and not {"gallery", "ood", "table-selective"} & set(page.ids)


# The page and its files.


def test_the_page_needs_nothing_else(rich: Path) -> None:
    page = Page(rich)
    assert all(link.startswith(("#", "data:")) for link in page.links)
    assert not {"link", "iframe"} & set(page.tags) and page.tags.count("script") == 1
    assert "@import" not in page.text and "url(http" not in page.text and "default-src 'none'" in page.text
    assert len(page.ids) == len(set(page.ids))
    assert len(page.labels) == 3 + 1 + 3 + 15 + 5 and all(len(label.split()) > 5 for label in page.labels)
    assert "DejaVu" not in page.text and "#1f6fb2" not in page.text.split("</style>")[1]


def test_it_has_recipes_conversions_and_galleries(trained: Comparison, tmp_path: Path) -> None:
    write_report(trained, tmp_path / "sub" / "report.html")
    page = Page(tmp_path / "sub" / "report.html")
    assert "name: Rank1" in page.text and page.tags.count("img") == 3 * 24
    assert str(by.summary(trained.rows[1].runs[0].load().model)).splitlines()[0] in page.text
    assert yaml.safe_load(re.findall(r": recipe\">(.*?)</pre>", page.text, re.DOTALL)[0])["method"]["name"] == "none"


MODELS = ((1, "plain-network"), (2, "rank1"), (3, "batchensemble"))


def test_every_figure_is_a_picture_and_a_table_beside_the_page(rich: Path) -> None:
    files = {path.name for path in rich.with_name("report_files").iterdir()}
    pictures = {name for name in files if name.endswith(".png")}
    tables = {f"{kind}-{i}-{name}.csv" for kind in ("confusion", "classes", "thresholds") for i, name in MODELS}
    assert {name.replace(".png", ".csv") for name in pictures} | {"comparison.csv"} | tables == files - pictures
    assert len(pictures) == 3 + 1 + 3 + 15 + 5 + 3
    for name in pictures:
        with Image.open(rich.with_name("report_files") / name) as image:
            assert image.convert("RGB").getpixel((0, 0)) == (255, 255, 255) and image.width >= 580
            assert image.info["dpi"][0] == pytest.approx(200, abs=1)
            assert len(image.convert("RGB").getcolors(10**6)) > 3


def test_the_tables_hold_what_the_figures_show(rich: Path) -> None:
    files, models = rich.with_name("report_files"), group_by_model(runs_at([rich.with_name("runs")]))
    rows = [rows_of(run) for run in models["Rank1"]]
    both = {name: np.concatenate([each[name] for each in rows]) for name in rows[0]}
    bins = calibration_bins(both["test_confidence"], both["test_correct"])
    written = read_csv(files / "calibration-2-rank1.csv")
    assert [float(row["accuracy"]) for row in written] == pytest.approx(bins["accuracy"].tolist())
    risk = [row for row in read_csv(files / "risk.csv") if row["model"] == "Rank1"]
    errors = fmean(1 - run.metrics["test"]["accuracy"] for run in models["Rank1"])
    assert float(risk[-1]["coverage_share"]) == 1 and float(risk[-1]["error_share"]) == pytest.approx(errors)
    histogram = read_csv(files / "uncertainty-2-rank1.csv")
    for name in ("test", "noise", "letters"):
        assert sum(float(row[f"{name}_percent"]) for row in histogram) == pytest.approx(100)
    first = both["noise_entropy"] < float(histogram[0]["to"])
    assert float(histogram[0]["noise_percent"]) == pytest.approx(100 * first.mean())


def test_the_tables_hold_the_shifts(rich: Path) -> None:
    files, models = rich.with_name("report_files"), group_by_model(runs_at([rich.with_name("runs")]))
    tests = [run.metrics["test"] for run in models["Rank1"]]
    mixing = [row for row in read_csv(files / "shift-mixing-nll.csv") if row["model"] == "Rank1"]
    assert float(mixing[0]["nll"]) == pytest.approx(fmean(test["nll"] for test in tests))
    assert mixing[3]["intensity"] == "0.3"
    assert float(mixing[3]["nll"]) == pytest.approx(fmean(test["shift"]["mixing"]["0.3"]["nll"] for test in tests))
    means = {row["intensity"]: row for row in read_csv(files / "shift-corruptions-ece.csv") if row["model"] == "Rank1"}
    every = [test["shift"][kind]["5"]["ece"] for test in tests for kind in CORRUPTIONS]
    assert float(means["5.0"]["ece"]) == pytest.approx(fmean(every))
    each = read_csv(files / "shift-each-accuracy.csv")
    assert {row["corruption"] for row in each} == set(CORRUPTIONS) and len(each) == 15 * 3 * 6
    epistemic = read_csv(files / "shift-mixing-epistemic.csv")
    assert {row["model"] for row in epistemic} == {"Rank1", "BatchEnsemble"}  # a plain network has none


def test_the_gallery_is_of_the_least_and_the_most_certain(rich: Path) -> None:
    files, run = rich.with_name("report_files"), group_by_model(runs_at([rich.with_name("runs")]))["Rank1"][0]
    rows, entropy, shown = read_csv(files / "gallery-2-rank1.csv"), rows_of(run)["test_entropy"], gallery_of(run)
    assert {int(row["row"]) for row in rows[:12]} == set(np.argsort(-entropy, kind="stable")[:12].tolist())
    assert [float(row["total_uncertainty"]) for row in rows] == pytest.approx(shown["test_entropy"].tolist())
    for row, probs, truth in zip(rows, shown["test_probs"], shown["test_truth"], strict=True):
        assert row["predicted"] == str(probs.argmax()) and row["truth"] == str(truth)
        assert sum(float(row[f"p_{i}"]) for i in range(10)) == pytest.approx(1, abs=1e-5)


def test_names_cannot_break_the_page(trained: Comparison, tmp_path: Path) -> None:
    runs = {"<b>&\"odd'/": trained.rows[0].runs, "Rank1": trained.rows[1].runs}
    write_report(Comparison.of(runs), tmp_path / "report.html")
    assert '<b>&"' not in (tmp_path / "report.html").read_text()
    assert (tmp_path / "report_files" / "calibration-1--b---odd--.csv").exists()


def test_names_mean_nothing_to_matplotlib() -> None:
    curve = np.array([0.5, 1.0]), np.array([0.1, 0.2])
    text = as_svg(risk_figure({"_mine": curve, r"$\oops$": curve}, "errors, %"), "risk", "a figure")
    assert "_mine</text>" in text and r"$\oops$</text>" in text
    names = {f"_{i} $a$ $": curve for i in range(3)}
    assert as_svg(shifts_figure({"fog $": names}, "$NLL$"), "shift", "a figure").count("$a$ $</text>") == 3
    chart = Bands(*np.arange(8.0).reshape(4, 2), points=np.arange(4.0).reshape(2, 2))
    assert r"$\oops$</text>" in as_svg(panels({r"$\oops$": chart}), "panels", "a figure")


def test_numbers_stay_clear_of_what_they_are_of() -> None:
    curve = np.arange(6.0), 2.3 + np.linspace(0, 1e-4, 6)
    figure = shifts_figure({f"kind {i}": {"a": curve} for i in range(15)}, "NLL")
    figure.draw_without_rendering()
    ticks = [axes.yaxis.get_tightbbox() for axes in figure.axes if axes.get_subplotspec().is_first_col()]
    assert all(figure._supylabel.get_window_extent().x1 < box.x0 for box in ticks)
    assert all(not axes.yaxis.get_offset_text().get_text() for axes in figure.axes)


def test_a_new_report_leaves_no_old_figures(trained: Comparison, tmp_path: Path) -> None:
    first, second = ([run for run in row.runs] for row in trained.rows[:2])
    write_report([*first, *second], tmp_path / "report.html")
    files = tmp_path / "report_files"
    for name in ("calibration-3-mine.png", "notes.csv"):
        (files / name).write_text("someone else's")
    assert (files / "calibration-2-rank1.png").exists()
    write_report(second, tmp_path / "report.html")
    page = Page(tmp_path / "report.html")
    offered = set(re.findall(r'download="(.*?)"', page.text))
    assert {path.name for path in files.iterdir()} == offered | {"calibration-3-mine.png", "notes.csv"}
    (tmp_path / "report.html").write_text('<a download="notes.csv">of another program</a>')
    write_report(second, tmp_path / "report.html")
    assert (files / "notes.csv").exists()


def test_a_split_of_one_row_has_a_page(trained: Comparison, tmp_path: Path) -> None:
    shutil.copytree(trained.rows[1].runs[0].folder, tmp_path / "one")
    for name, rows in (("evaluation.npz", 1), ("gallery.npz", 0)):
        with np.load(tmp_path / "one" / name) as file:
            arrays = {key: each[:rows] if key.startswith("test_") else each for key, each in file.items()}
        np.savez(tmp_path / "one" / name, **arrays)
    metrics = Run(tmp_path / "one").metrics
    metrics["test"]["n"] = 1
    write_json(tmp_path / "one" / "metrics.json", metrics)
    write_report([Run(tmp_path / "one")], tmp_path / "report.html")
    assert "gallery" not in Page(tmp_path / "report.html").ids


def test_a_page_about_regression(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    rows = [
        f"{v:.4f},{w},{3 * v + 1:.4f}"
        for v, w in zip(draw.normal(size=100), draw.choice(["red", "blue"], 100), strict=True)
    ]
    (tmp_path / "data.csv").write_text("\n".join(["x,colour,y", *rows]))
    data = {"name": "table", "path": str(tmp_path / "data.csv"), "options": {"target": "y", "task": "regression"}}
    given = {"data": data, "model": {"name": "mlp"}, "training": SHORT, "method": "IBNN"}
    run = train(Recipe.of(given), tmp_path / "mine", progress=False)
    write_report([run], tmp_path / "report.html")
    page = Page(tmp_path / "report.html")
    assert "AURC is the root of the area under the curve of squared errors" in page.text and "✓" not in page.text
    assert "Predictions are means ± standard deviations." in page.text and re.search(
        r"<td>[\d.-]+ ± [\d.]+</td>", page.text
    )
    assert "predicted quantile" in page.text and len(page.labels) == 3
    assert re.search(r"its RMSE is [\d.]+, and its 90% intervals hold [\d.]+% of targets", page.text)
    shown, test = read_csv(tmp_path / "report_files" / "gallery-1-mine.csv"), run.data().test
    raw = {f"{v:.4g}": w for v, w in (row.split(",")[:2] for row in rows) for v in [float(v)]}
    assert all(row["colour"] == raw[row["x"]] for row in shown)
    truth = run.data().targets.restore(test.targets, test.targets)[0].flatten()
    assert all(float(row["truth"]) == pytest.approx(float(truth[int(row["row"])]), rel=1e-3) for row in shown)


def test_tables_show_the_most_probable_classes(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    values = [(f"{v:.4f}", "warm" if v > 0 else "cold") for v in draw.normal(size=60)]
    (tmp_path / "data.csv").write_text("\n".join(["x,y", *map(",".join, values)]))
    data = {"name": "table", "path": str(tmp_path / "data.csv"), "options": {"target": "y"}}
    run = train(
        Recipe.of({"data": data, "model": {"name": "mlp"}, "training": SHORT}), tmp_path / "mine", progress=False
    )
    write_report([run], tmp_path / "report.html")
    text, first = (tmp_path / "report.html").read_text(), gallery_of(run)
    assert "AURC is the area under this risk-coverage curve" in text and "Bars are" not in text
    assert "The most probable classes are shown with their probabilities; ✓ marks the true class." in text
    names, probs, truth = ("cold", "warm"), first["test_probs"][0], int(first["test_truth"][0])
    told = [f"{names[c]}{' ✓' if c == truth else ''} {probs[c]:.2f}" for c in np.argsort(-probs)]
    assert f"<td>{', '.join(told)}</td>" in text


# Which runs.


def test_the_folder_of_a_comparison_is_all_its_runs(trained: Comparison, folder: Path) -> None:
    models = group_by_model(runs_at([folder]))
    assert {name: len(some) for name, some in models.items()} == {"plain network": 2, "Rank1": 2, "BatchEnsemble": 2}
    assert [run.folder.name for run in runs_at([folder / "Rank1"])] == ["seed-0", "seed-1"]
    assert len(runs_at([folder, folder / "Rank1", folder / "Rank1" / "seed-0"])) == 6  # each once


def test_what_is_no_evaluated_run_is_refused(trained: Comparison, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not a run"):
        runs_at([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match="not a run"):
        runs_at([tmp_path / "empty"])
    begun = Run.create(tmp_path / "begun", Recipe.of({}))
    with pytest.raises(CompareError, match="training has not finished; run `bayesify train --resume"):
        write_report([begun], tmp_path / "report.html")
    shutil.copytree(folder / "Rank1" / "seed-0", tmp_path / "done")
    (tmp_path / "done" / "metrics.json").unlink()
    with pytest.raises(CompareError, match="not evaluated yet; run `bayesify evaluate"):
        write_report([Run(tmp_path / "done")], tmp_path / "report.html")
    rowless = Run.create(tmp_path / "rowless", Recipe.of({"data": {"validation": 0, "test": 0}}))
    rowless.model_file.touch()
    with pytest.raises(CompareError, match="no validation or test rows to evaluate on"):
        write_report([rowless], tmp_path / "report.html")
    other = fake(tmp_path / "other", Recipe.of({"data": {"limit": 7}}))
    with pytest.raises(CompareError, match="compare models on the same data"):
        write_report([other, trained.rows[0].runs[0]], tmp_path / "report.html")


def test_the_command(folder: Path, trained: Comparison, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "pages" / "both.html"
    assert main(["report", str(folder / "base"), str(folder / "Rank1"), "--out", str(page)]) == 0
    assert capsys.readouterr().out.strip() == str(page) and page.with_name("both_files").is_dir()
    assert main(["report", str(tmp_path), "--out", str(page)]) == 2
    assert "not a run" in capsys.readouterr().err
    assert main(["report", str(folder), "--out", str(tmp_path / "page.pdf")]) == 2
    assert "expected an .html file, such as" in capsys.readouterr().err
